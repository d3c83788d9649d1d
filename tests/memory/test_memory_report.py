# SPDX-License-Identifier: Apache-2.0
"""The memory report: what its numbers add up to, what values are called, whether it is so."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.api import lower
from amp_ir.errors import OptionError
from amp_ir.host import native
from amp_ir.ir.step_module import StepModule

ROWS, WIDTH = 256, 64


class Net(nn.Module):
    """Two linear layers of WIDTH x WIDTH with a nonlinearity between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.nn.functional.gelu(self.body(x)))


@pytest.fixture(scope="module")
def mod() -> StepModule:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = (torch.randn(ROWS, WIDTH),)
    return amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)[0]


@pytest.fixture(scope="module")
def amp(mod: StepModule) -> StepModule:
    return amp_ir.autocast(mod, amp_dtype="bfloat16")


@pytest.mark.parametrize("which", ["mod", "amp"])
def test_everything_adds_up(which: str, request: pytest.FixtureRequest) -> None:
    module = request.getfixturevalue(which)
    report = amp_ir.memory_report(module)
    plan = lower(module).plan
    assert report.peak_bytes == plan.peak_bytes
    assert report.peak_bytes == sum(report.nbytes_by_role.values()) + report.gap_bytes
    assert report.lower_bound_bytes == sum(one.nbytes for one in report.live_at_peak)
    assert report.lower_bound_bytes == sum(report.nbytes_by_dtype.values())
    assert report.lower_bound_bytes == max(moment.nbytes for moment in report.timeline)
    assert report.timeline[report.peak_call].nbytes == report.lower_bound_bytes
    assert all(m.nbytes == sum(m.nbytes_by_role.values()) for m in report.timeline)
    assert len(report.timeline) == len(plan.calls)
    for device in ("cpu", torch.device("cpu")):
        assert amp_ir.get_peak_memory(module, device) == report.peak_bytes / 2**20


def test_state_and_batch_have_their_bytes(mod: StepModule) -> None:
    report = amp_ir.memory_report(mod)
    parameters = 2 * (WIDTH * WIDTH + WIDTH) * 4
    assert report.nbytes_by_role["parameter"] == parameters
    assert report.nbytes_by_role["optimizer state"] == parameters  # the momentum
    assert report.nbytes_by_role["batch"] == ROWS * WIDTH * 4
    assert report.nbytes_by_role["result"] == 4
    names = [one.name for one in report.live_at_peak]
    assert "body.weight" in names and "optimizer0.body.weight.momentum_buffer" in names


def test_what_the_backward_pass_reads_is_a_saved_activation(mod: StepModule) -> None:
    values = {one.name: one for one in lower(mod).plan.values}
    saved = [one for one in values.values() if one.role.value == "saved activation"]
    # The input of gelu and its result; the loss needs the scores.
    assert {(one.op, one.location.module, one.nbytes) for one in saved} == {
        ("matmul", "body", ROWS * WIDTH * 4),
        ("gelu", "", ROWS * WIDTH * 4),
        ("matmul", "head", ROWS * WIDTH * 4),
    }
    gradients = [one for one in values.values() if one.role.value == "gradient"]
    assert {one.location.module for one in gradients} == {"body", "head"}
    assert all(one.location.phase == "backward" for one in gradients)


def test_a_weight_in_low_precision_is_called_a_copy(mod: StepModule, amp: StepModule) -> None:
    copies = [v for v in lower(amp).plan.values if v.role.value == "low copy of a weight"]
    assert [(one.dtype, one.nbytes) for one in copies] == [("bfloat16", WIDTH * WIDTH * 2)] * 2
    assert {one.location.module for one in copies} == {"body", "head"}
    assert not [v for v in lower(mod).plan.values if v.role.value == "low copy of a weight"]


def test_amp_saved_less_cost_is_the_difference_of_the_peaks(
    mod: StepModule, amp: StepModule
) -> None:
    report = amp_ir.memory_report(amp, baseline=mod)
    balance = report.balance
    assert balance is not None
    before = amp_ir.memory_report(mod).peak_bytes
    assert balance.baseline_peak_bytes == before
    assert balance.saved_bytes - balance.cost_bytes == before - report.peak_bytes
    assert balance.saved_bytes > 0
    # Not by its share of the peak: what is alive there depends on when libraries need workspace.
    assert _saved_nbytes(amp) < _saved_nbytes(mod)
    assert str(balance) in str(report)
    assert amp_ir.memory_report(mod, baseline=mod).balance.change_by_role == {}


def _saved_nbytes(module: StepModule) -> int:
    values = lower(module).plan.values
    return sum(one.nbytes for one in values if one.role.value == "saved activation")


def test_the_balance_in_words() -> None:
    shrank = amp_ir.report.memory.AmpBalance(64 << 20, {"temporary": -(8 << 20), "batch": 2 << 20})
    assert str(shrank) == "AMP saved 8.00 MiB, cost 2.00 MiB: 6.00 MiB less than 64.0 MiB without"
    grew = amp_ir.report.memory.AmpBalance(64 << 20, {"temporary": 8 << 20})
    assert str(grew) == "AMP saved 0.00 MiB, cost 8.00 MiB: 8.00 MiB more than 64.0 MiB without"


def test_the_text_names_peak_roles_and_values(amp: StepModule, mod: StepModule) -> None:
    text = str(amp_ir.memory_report(amp, baseline=mod))
    assert text.splitlines()[0] == amp_ir.memory_report(amp).headline()
    for word in ("saved activation", "body.weight", "in head", " peak ", "AMP saved"):
        assert word in text, text
    assert max(map(len, text.splitlines())) <= 120


def test_the_json_holds_the_same_numbers(amp: StepModule, mod: StepModule) -> None:
    report = amp_ir.memory_report(amp, baseline=mod)
    document = json.loads(report.to_json())
    assert document["peak_bytes"] == report.peak_bytes
    assert document["gap_bytes"] == report.gap_bytes
    assert document["balance"]["saved_bytes"] == report.balance.saved_bytes
    assert len(document["timeline"]) == len(report.timeline)
    assert document["live_at_peak"][0]["nbytes"] == report.live_at_peak[0].nbytes


def test_a_step_without_calls_has_a_report() -> None:
    model = nn.Linear(2, 2)
    mod, _ = amp_ir.trace_step(lambda x: x, (torch.ones(2),), model=model)
    report = amp_ir.memory_report(mod)
    assert report.peak_bytes == sum(one.nbytes for one in report.live_at_peak)
    assert "peak" in str(report)


def test_wrong_uses_say_what_to_pass(mod: StepModule) -> None:
    advice = "make one with amp_ir.trace_step(step, example_batch, model=..., optimizer=...)"
    with pytest.raises(OptionError) as caught:
        amp_ir.memory_report(3)
    assert str(caught.value) == f"memory_report takes a StepModule and got int; {advice}"
    with pytest.raises(OptionError) as caught:
        amp_ir.memory_report(mod, baseline="fp32")
    expected = f"memory_report(baseline=...) takes a StepModule and got str; {advice}"
    assert str(caught.value) == expected


@pytest.mark.skipif(not native.has("amp_ir.onednn.matmul"), reason="asks oneDNN for its workspace")
def test_workspace_of_the_library_is_counted(amp: StepModule) -> None:
    workspace = [one for one in lower(amp).plan.values if one.role.value == "library workspace"]
    # A weight gradient multiplies a transposed operand, which oneDNN copies.
    assert any(one.location.phase == "backward" and one.nbytes > 0 for one in workspace)
    assert all(one.first_use == one.last_use for one in workspace)


MEASURE = """
    import ctypes, gc, sys
    import torch, amp_ir

    def status(key):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    def compiled(width, rows):
        layers = [m for _ in range(3) for m in (torch.nn.Linear(width, width), torch.nn.GELU())]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()
        batch = (torch.randn(rows, width),)
        mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
        if sys.argv[1] != "float32":
            mod = amp_ir.autocast(mod, args, amp_dtype=sys.argv[1])
        return amp_ir.compile(mod), batch

    train, batch = compiled(64, 64)
    train(*batch)  # code and thread stacks that any step needs
    square = torch.ones(1024, 1024).to(getattr(torch, sys.argv[1]))
    square @ square  # PyTorch's code for matmuls, which a small step does not call
    train, batch = compiled(1536, 4096)
    plan = train.report.plan
    train.module.hooks.install_state()  # else optimizer state is made inside of the first step
    for kept in train.module.state.values():
        if isinstance(kept, torch.Tensor):
            kept.detach().mul_(1)  # the pages of new state are touched by the first step
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    train(*batch)
    train(*batch)
    given = status("VmHWM") - before
    print(plan.arena_bytes + plan.result_bytes + plan.library_bytes, given, plan.peak_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_bytes_are_what_the_system_really_gives(dtype: str) -> None:
    """The rise of the resident set during two steps, beside what the plan says it is."""
    # What PyTorch's own oneDNN takes inside of a bfloat16 matmul cannot be asked for, and that is
    # what multiplies where ours is missing: with AMX 2.7 to 3.1 % more than the bound in the plan.
    by_pytorch = dtype == "bfloat16" and not native.has("amp_ir.onednn.matmul")
    # With AMX some of the matmuls are PyTorch's: 1.4 to 2.0 %, and 0.9 to 1.3 without those.
    some_by_pytorch = dtype == "bfloat16" and native.has_amx()
    tolerance = 0.06 if by_pytorch else 0.03 if some_by_pytorch else 0.02
    # The system joins pages into large ones when it likes, and these count as given: one process
    # of three that it leaves alone is enough.
    tries = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(MEASURE), dtype], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        planned, given, peak = map(int, done.stdout.split())
        assert planned > 70 << 20
        tries.append((planned, given, peak))
        # State and batch were there before and are equal by definition: this is the stricter test.
        if abs(given - planned) <= tolerance * planned:
            return
    raise AssertionError(f"planned, given and peak in bytes: {tries}")
