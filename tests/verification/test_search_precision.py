# SPDX-License-Identifier: Apache-2.0
"""A search finds a plan within its budget that is cheaper than what it was not asked to keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.cli import main
from amp_ir.host.machine_model import Curve, MachineModel
from amp_ir.verification import estimated_machine
from amp_ir.verification import search_precision as module_of_search
from amp_ir.verification.gradients import StepGradients
from amp_ir.verification.measured_plans import MeasuredPlans
from amp_ir.verification.outcome import relative_error
from amp_ir.verification.plan_search import PlanSearch


def machine(low_rate: float = 800.0) -> MachineModel:
    """A machine that multiplies low numbers eight times as fast, whatever this one does."""
    rates = {"float32": 100.0, "bfloat16": low_rate, "float16": low_rate}
    return MachineModel(
        "a test's", "cpu", {name: Curve(((1.0, rate),)) for name, rate in rates.items()},
        Curve(((1.0, 50.0),)), call_microseconds=0.0, units=0, multiple=16, source="a test",
    )  # fmt: skip


ESTIMATED = {"machine": machine(), "measure": False, "progress": False}
Parts = tuple[nn.Module, Any, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]


class Net(nn.Module):
    """A sensitive layer, whose result is large beside what is left of it, between two others."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.first, self.sensitive, self.last = (nn.Linear(24, 24) for _ in range(3))
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        h = self.sensitive(h * self.offset)
        return self.last(torch.tanh(h - h.mean(1, keepdim=True)))


def parts(offset: float, *, is_whole: bool = False) -> Parts:
    """The net's training; without clipping and AdamW a search takes half the time."""
    torch.manual_seed(0)
    model = Net(offset)
    kind = torch.optim.AdamW if is_whole else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if is_whole:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step, batch_of(1)


def batch_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 24, generator=generator), torch.randn(16, 24, generator=generator)


def captured(offset: float, *, is_whole: bool = False) -> tuple[amp_ir.StepModule, tuple[Any, ...]]:
    model, optimizer, step, batch = parts(offset, is_whole=is_whole)
    return amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)


@pytest.fixture(scope="module")
def found() -> amp_ir.PrecisionSearch:
    mod, args = captured(4.0, is_whole=True)
    return amp_ir.search_precision(mod, args, max_error=3e-3, batches=[batch_of(2)], **ESTIMATED)


def test_the_plan_is_within_the_budget_on_every_batch(found):
    assert found.default.error > 3e-3 >= found.found.error > 0.0
    mod, _ = captured(4.0, is_whole=True)
    batches = [mod.signature.flatten_batch(one) for one in (batch_of(1), batch_of(2))]
    gradients = StepGradients(mod, batches)
    errors = [
        relative_error(gradients.evaluated(found.mod, k), gradients.exact(k)) for k in range(2)
    ]
    assert max(errors) == pytest.approx(found.found.error, rel=1e-12)


def test_the_plan_costs_less_than_float32_and_than_all_that_autocast_keeps(found):
    assert found.default.cost < found.found.cost < found.full.cost
    assert found.is_complete
    mod, args = captured(4.0, is_whole=True)
    # The least that is given back: with any part low again, the budget is broken or nothing saved.
    for part in found.given_back:
        assert part.error_without > 3e-3 or part.cost <= 0.0
    kept = amp_ir.search_precision(
        mod, args, max_error=3e-3, batches=[batch_of(2)], **ESTIMATED, policy="conservative"
    )
    assert found.found.cost <= kept.found.cost


def test_the_plan_is_an_ordinary_one(found, tmp_path):
    mod, args = captured(4.0, is_whole=True)
    found.plan.save(tmp_path / "plan.json")
    again = amp_ir.autocast(mod, args, plan=amp_ir.CastPlan.load(tmp_path / "plan.json"),
                            amp_dtype="bfloat16")  # fmt: skip
    assert again.plan.hash == found.plan.hash
    default = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    assert "float32" in default.plan.diff(found.plan)
    decided = amp_ir.autocast(
        mod, args, amp_dtype="bfloat16", overrides=found.overrides, policy=found.policy
    )
    assert decided.plan.hash == found.plan.hash
    model, optimizer, step, batch = parts(4.0, is_whole=True)
    train = amp_ir.jit(
        step,
        model=model,
        optimizer=optimizer,
        amp_dtype="bfloat16",
        overrides=found.overrides,
        policy=found.policy,
    )
    assert torch.isfinite(train(*batch))


def test_it_says_what_was_given_back(found):
    text = str(found).splitlines()
    assert text[0].startswith("bfloat16, gradient error at most 3.00e-03 on 2 batches; ")
    names = ["begun", "conservative", "searched", "float32"]
    assert [line.split()[0] for line in text[2:6]] == names
    assert [line.endswith("returned") for line in text[2:6]] == [False, False, True, False]
    assert text[2].endswith("over the budget")
    assert text[6] == "(estimated, not measured (measure=False); estimated for a test's)"
    assert len(text) == 9 + len(found.given_back)
    assert any("sensitive" in part.name or "first" in part.name for part in found.given_back)
    data = json.loads(found.to_json())
    assert data["found"]["error"] == found.found.error
    assert data["given_back"][0]["overrides"][0]["to"] in ("float32", "float32_result")


def test_a_step_that_overflows_in_float16_is_mended():
    mod, args = captured(4e5)
    found = amp_ir.search_precision(mod, args, max_error=2e-2, amp_dtype="float16", **ESTIMATED)
    assert found.default.error == float("inf")
    assert found.found.error <= 2e-2
    assert found.found.cost < found.full.cost
    assert any(one.module == "sensitive" for one in found.overrides)
    low = [one for one in found.plan.ops if "float16" in one.reads]
    assert low


def test_a_budget_that_the_plan_holds_gives_nothing_back():
    mod, args = captured(1.0)
    found = amp_ir.search_precision(mod, args, max_error=0.5, **ESTIMATED)
    # That of the policy "conservative" is the other.
    assert (found.given_back, found.overrides, found.plans) == ((), (), 2)
    assert found.found == found.default
    assert [one.name for one in found.compared] == ["begun with", "conservative", "float32"]
    assert str(found).endswith('Nothing had to be given back under the policy "default".')


def test_the_peak_may_be_the_objective():
    model, optimizer, step, _ = parts(4.0)
    rows = torch.randn(512, 24), torch.randn(512, 24)
    mod, args = amp_ir.trace_step(step, rows, model=model, optimizer=optimizer)
    found = amp_ir.search_precision(mod, args, max_error=3.5e-3, objective="memory", **ESTIMATED)
    peaks = [amp_ir.get_peak_memory(one, "cpu") * 2**20 for one in (mod, found.mod)]
    assert [found.full.cost, found.found.cost] == peaks
    assert found.found.cost < found.full.cost
    assert found.found.error <= 3.5e-3 < found.default.error
    assert "MiB" in str(found)


@pytest.mark.parametrize("ends", [KeyboardInterrupt, None])
def test_an_interrupt_or_the_end_of_the_time_leaves_the_best_plan(monkeypatch, ends):
    evaluated = PlanSearch.try_plan
    seen = []

    def interrupted(self, choices, policy):
        if len(seen) == 4 and ends is not None:
            raise ends
        if len(seen) == 4:
            self.until = 0.0
        seen.append(choices)
        return evaluated(self, choices, policy)

    monkeypatch.setattr(PlanSearch, "try_plan", interrupted)
    mod, args = captured(4.0)
    found = amp_ir.search_precision(mod, args, max_error=3e-3, **ESTIMATED)
    assert not found.is_complete
    assert found.found.error <= 3e-3
    assert "ended early: the best so far" in str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "size"}, "objective='size' is not known; expected 'time' or 'memory'"),
        ({"amp_dtype": "float32"}, "amp_dtype='float32' rounds nothing; expected 'float16' or "
                                   "'bfloat16'"),
        ({"max_error": 2.0}, "max_error=2.0; expected a relative error between 0 and 1, such as "
                             "5e-3"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options, message):
    mod, args = captured(1.0)
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        amp_ir.search_precision(mod, args, **{"max_error": 1e-2, **options})
    assert str(caught.value) == message


def test_what_float32_cannot_hold_is_refused():
    mod, args = captured(1.0)
    with pytest.raises(amp_ir.errors.OptionError, match="in float32 the gradient error of this st"):
        amp_ir.search_precision(mod, args, max_error=1e-9, **ESTIMATED)
    low = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    with pytest.raises(amp_ir.errors.OptionError, match="went through autocast"):
        amp_ir.search_precision(low, args, max_error=1e-2)


def measured_as(monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> list[list[str]]:
    """Let steps take these times; return the names of those that are timed."""
    timed = []

    def measured(steps, _batch, _show):
        timed.append(list(steps))
        return MeasuredPlans({name: times[name] for name in steps}, 3, 1)

    monkeypatch.setattr(module_of_search, "measure_plans", measured)
    return timed


@pytest.mark.parametrize(
    ("times", "returned"),
    [
        ((9.0, 5.0, 6.0, 7.0), "searched"),  # conservative is faster, but over the budget
        ((1.0, 5.0, 8.0, 7.0), "float32"),
    ],
)
def test_the_fastest_measured_plan_within_the_budget_is_returned(monkeypatch, times, returned):
    names = ["begun with", "conservative", "searched", "float32"]
    timed = measured_as(monkeypatch, dict(zip(names, times, strict=True)))
    mod, args = captured(4.0)
    found = amp_ir.search_precision(mod, args, max_error=3e-3, machine=machine(), progress=False)
    assert timed == [names]
    assert found.returned == returned
    assert [one.milliseconds for one in found.compared] == list(times)
    assert "(measured: the shortest of 3 steps in turns on this CPU, 1 threads; estim" in str(found)
    wrong = 'By the estimate "searched" costs less; measured, "float32" is faster.'
    assert (wrong in str(found)) == (found.mod is None) == (returned == "float32")


def test_a_plan_that_gives_everything_back_is_the_step_in_float32(monkeypatch):
    timed = {}

    def measured(steps, _batch, _show):
        timed.update(steps)
        # Equal steps are one program, with one time.
        return MeasuredPlans(
            {name: 1.0 if one is mod else 2.0 for name, one in steps.items()}, 3, 1
        )

    monkeypatch.setattr(module_of_search, "measure_plans", measured)
    mod, args = captured(1.0)
    found = amp_ir.search_precision(mod, args, max_error=1e-6, machine=machine(), progress=False)
    assert timed["searched"] is mod
    assert found.returned == "float32"
    assert found.plan is None


def test_conservative_is_returned_where_it_is_faster_than_a_plan_within_the_budget(monkeypatch):
    measured_as(monkeypatch, {"begun with": 2.0, "conservative": 1.0, "float32": 3.0})
    mod, args = captured(1.0)
    found = amp_ir.search_precision(mod, args, max_error=0.5, machine=machine())
    assert (found.returned, found.policy, found.overrides) == ("conservative", "conservative", ())
    decided = amp_ir.autocast(mod, args, amp_dtype="bfloat16", policy=found.policy)
    assert decided.plan.hash == found.plan.hash


def test_measuring_runs_every_plan_and_changes_nothing():
    model, optimizer, step, batch = parts(4.0, is_whole=True)
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    before = [one.clone() for one in model.parameters()]
    found = amp_ir.search_precision(mod, args, max_error=3e-3, machine=machine())
    assert all(one.milliseconds > 0.0 for one in found.compared)
    within = [one.milliseconds for one in found.compared if one.is_within]
    returned = next(one for one in found.compared if one.name == found.returned)
    assert returned.milliseconds == min(within)
    for one, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(one, kept)
        assert one.grad is None
    assert all(not state["exp_avg"].any() for state in optimizer.state.values())


@pytest.mark.parametrize("stops", [KeyboardInterrupt(), amp_ir.errors.OutOfMemoryError("no room")])
def test_where_measuring_stops_the_estimate_decides(monkeypatch, stops):
    def stopped(*_args):
        raise stops

    monkeypatch.setattr(module_of_search, "measure_plans", stopped)
    mod, args = captured(4.0)
    found = amp_ir.search_precision(mod, args, max_error=3e-3, machine=machine())
    assert found.returned == "searched"
    assert found.how_compared.startswith("estimated: measuring ")


def test_a_machine_on_which_low_products_are_slow_gives_float32():
    mod, args = captured(4.0)
    slow = {**ESTIMATED, "machine": machine(low_rate=1.0)}
    found = amp_ir.search_precision(mod, args, max_error=3e-3, **slow)
    assert (found.mod, found.returned, found.found) == (None, "float32", found.full)
    assert "The step stays in float32" in str(found)


def test_a_gpu_that_is_not_here_is_estimated(monkeypatch):
    monkeypatch.setattr(module_of_search, "measure_plans", None)
    mod, args = captured(1.0)
    found = amp_ir.search_precision(mod, args, max_error=0.5, gpu="H100", progress=False)
    assert found.machine == "H100"
    assert found.how_compared == "estimated for H100, not measured"


FILE = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 24))
batch = (torch.randn(16, 24),)
batches = [(torch.randn(16, 24),)]

def step(x):
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()
"""


def test_the_command_searches_a_file_of_the_users(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimated_machine, "measured_cpu", lambda _threads: machine())
    (tmp_path / "train.py").write_text(FILE)
    plan, data = tmp_path / "plan.json", tmp_path / "found.json"
    files = ["--out", str(plan), "--json", str(data)]
    assert main(["search", str(tmp_path / "train.py"), "--max-error", "1.5e-3", "--no-measure",
                 *files]) == 0  # fmt: skip
    shown = capsys.readouterr().out
    assert "on 2 batches" in shown
    assert "    amp_ir.Override(to='float32" in shown
    assert f"wrote {plan}" in shown
    assert amp_ir.CastPlan.load(plan).ops
    assert json.loads(data.read_text())["max_error"] == 1.5e-3
    absent = tmp_path / "absent.json"
    words = ["search", str(tmp_path / "train.py"), "--max-error", "1e-6", "--no-measure"]
    assert main([*words, "--out", str(absent)]) == 1
    expected = f"{absent} was not written: a step in float32 has no plan\n"
    assert capsys.readouterr().out.endswith(expected)
    assert main(["search", "train.py", "--max-error", "1e-3", "--out", "/nowhere/plan.json"]) == 2
    assert "--out=/nowhere/plan.json: there is no such folder; make it" in capsys.readouterr().err
