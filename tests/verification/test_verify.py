# SPDX-License-Identifier: Apache-2.0
"""`verify` passes what is right, finds what is planted, and leaves the user's objects alone."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.cli import main
from amp_ir.loops import lowerings  # noqa: F401 - fills LOWERINGS
from amp_ir.loops.lowering_registry import LOWERINGS


@attrs.frozen(eq=False)
class Training:
    """A small model with its step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    batch: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def make(
        cls, *, dropout: float = 0.0, is_scaled: bool = False, is_adam: bool = False
    ) -> Training:
        model = nn.Sequential(
            nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 5)
        )
        # SGD's step is compiled in half of the time.
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if is_adam:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = amp_ir.GradScaler(init_scale=1024.0) if is_scaled else None
        return cls(model, optimizer, scaler, (torch.randn(16, 12), torch.randint(0, 5, (16,))))

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), y)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def verify(self, **options: Any) -> amp_ir.Verification:
        return amp_ir.verify(
            self.step,
            self.batch,
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            **options,
        )


@pytest.mark.parametrize(
    ("amp_dtype", "is_scaled", "unit"),
    [("bfloat16", False, 2.0**-8), ("float16", True, 2.0**-11), ("float32", False, 2.0**-24)],
)
def test_a_right_step_is_good(amp_dtype, is_scaled, unit):
    is_adam = amp_dtype == "bfloat16"
    found = Training.make(is_scaled=is_scaled, is_adam=is_adam).verify(amp_dtype=amp_dtype)
    assert found.failures == ()
    assert found.is_good
    assert found.plan.mismatches == ()
    errors = found.draws[0]
    # A few roundings one after the other.
    assert all(
        0.0 < errors[name].gradient < 2.0**-20 for name in ("eager float32", "amp_ir float32")
    )
    # AdamW's first step is the sign of the gradient, which forgives little.
    assert errors["amp_ir float32"].update < 1e-3
    ours = errors["amp_ir low" if amp_dtype != "float32" else "amp_ir float32"]
    assert unit / 16 < ours.gradient < unit * 16
    assert "torch.autocast" in errors or amp_dtype == "float32"
    # The bias before a BatchNorm has no gradient.
    assert set(ours.gradients) == {"0.weight", "1.weight", "1.bias", "4.weight", "4.bias"}
    assert len(found.worst) == 5
    assert all(one.line.startswith(f"{__file__}:") for one in found.worst)


def state_of(training: Training) -> Any:
    generators = torch.get_rng_state()
    scaler = None if training.scaler is None else training.scaler.state_dict()
    gradients = [one.grad for one in training.model.parameters()]
    parts = training.model.state_dict(), training.optimizer.state_dict(), scaler, generators
    return copy.deepcopy((*parts, gradients))


@pytest.mark.parametrize("has_run", [False, True])
def test_nothing_of_the_users_changes(has_run):
    training = Training.make(dropout=0.3, is_scaled=True)
    if has_run:
        training.step(*training.batch)
    before = state_of(training)
    held = [id(one) for one in training.model.parameters()]
    training.verify(amp_dtype="float16", check=False)
    torch.testing.assert_close(state_of(training), before, rtol=0, atol=0)
    assert [id(one) for one in training.model.parameters()] == held
    assert training.model[3].p == 0.3


def test_dropout_is_off_and_it_says_so():
    found = Training.make(dropout=0.3).verify(check=False)
    assert found.notes == ("dropout was off (p=0) in every variant",)
    assert found.is_good


def test_a_step_with_draws_of_its_own_is_not_compared_with_pytorch():
    training = Training.make()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(F.dropout(training.model(x), 0.5), y)
        loss.backward()
        return loss.detach()

    found = amp_ir.verify(step, training.batch, model=training.model)
    assert set(found.draws[0]) == {"amp_ir float32", "amp_ir low", "amp_ir low, strict"}
    assert found.ratios == ()
    assert found.draws[0]["amp_ir float32"].gradient < 1e-5
    assert "draws random numbers of its own" in found.notes[0]
    assert found.is_good


@pytest.mark.parametrize("amp_dtype", ["float32", "bfloat16"])
def test_a_wrong_kernel_is_found_by_the_plan_check(amp_dtype, monkeypatch):
    training = Training.make()
    monkeypatch.setitem(LOWERINGS, "relax.tanh", LOWERINGS["relax.sigmoid"])
    found = training.verify(amp_dtype=amp_dtype)
    wrong = found.plan.mismatches
    assert [(one.op, one.module, one.phase) for one in wrong] == [("relax.tanh", "2", "forward")]
    assert not found.is_good
    assert found.failures[0].startswith(
        "a kernel differs from the plan, which is a fault of amp_ir: relax.tanh -> "
    )


def test_means_around_zero_may_differ_as_the_rounding_of_their_terms():
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 32, 7, 2, 3, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    model = nn.Sequential(convolution, nn.BatchNorm2d(32))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).abs().mean()
        loss.backward()
        return loss.detach()

    found = amp_ir.verify(step, (torch.randn(8, 3, 96, 96),), model=model)
    assert found.plan.mismatches == ()


def test_a_wrong_rule_is_found_by_the_ratio():
    weight = nn.Parameter(torch.rand(12) + 20.0)
    holder = nn.ParameterDict({"weight": weight})

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sums = torch.cumsum(x * holder["weight"], 1)
        # Differences of sums, which float32 keeps and a low dtype does not.
        loss = F.mse_loss(sums[:, 1:] - sums[:, :-1], y)
        loss.backward()
        return loss.detach()

    batch = torch.rand(16, 12), torch.rand(16, 11)
    low = [amp_ir.Override(op="relax.cumsum", to="low")]
    right = amp_ir.verify(step, batch, model=holder, check=False)
    wrong = amp_ir.verify(step, batch, model=holder, overrides=low, check=False)
    assert right.is_good
    assert wrong.failures == (
        f"in bfloat16 the gradient error is {wrong.ratios[0]:.2f} times that of torch.autocast, "
        "more than 1.5",
    )


def test_a_nan_weight_is_named_as_what_it_is():
    training = Training.make()
    with torch.no_grad():
        training.model[0].weight[0, 0] = math.nan
    found = training.verify()
    assert found.failures == (
        "float64's own results are not finite, so there is nothing to compare with; "
        "train.find_overflow(*batch) says where that comes from",
    )
    assert found.plan.mismatches == ()


def test_an_overflow_in_float16_fails():
    training = Training.make()
    with torch.no_grad():
        training.model[4].weight.fill_(3e4)
    found = training.verify(amp_dtype="float16", check=False)
    assert "a gradient is not finite where float64's is" in found.failures[-1]
    assert any(one.infinite > 0 and one.headroom_bits < 0 for one in found.ranges)


def large_loss(scaler: Any) -> tuple[Any, tuple[torch.Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum() * 50.0
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    owners = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return step, (torch.randn(32, 8),), owners


@pytest.mark.parametrize("kind", [amp_ir.GradScaler, torch.amp.GradScaler])
def test_a_step_that_is_skipped_is_compared_at_the_scale_that_training_gets_to(kind):
    scaler = kind("cpu")
    step, batch, owners = large_loss(scaler)
    found = amp_ir.verify(step, batch, amp_dtype="float16", **owners)
    assert found.failures == ()
    assert found.notes == (
        "at the loss scale 65536 gradients overflow (amp_ir low, amp_ir low, strict, "
        "torch.autocast) and the step is skipped: compared at 128, the largest power of two where "
        "all are finite",
    )
    assert scaler.get_scale() == 65536.0
    # amp_ir is finite at a larger scale already.
    train = amp_ir.jit(step, amp_dtype="float16", **owners)
    train(*batch)
    while train.skipped:
        train(*batch)
    assert scaler.get_scale() >= 128.0


@pytest.mark.parametrize("has_run", [False, True])
def test_the_scaler_of_scale_loss_is_lowered_and_put_back_too(has_run):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum() * 100.0
        with amp_ir.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    owners = {"model": model, "optimizer": optimizer}
    train = amp_ir.jit(step, amp_dtype="float16", **owners)
    batch = (torch.randn(16, 8),)
    if has_run:
        train(*batch)
    found = amp_ir.verify(step, batch, amp_dtype="float16", check=False, **owners)
    assert found.is_good
    assert found.notes[0].startswith(f"at the loss scale {32768 if has_run else 65536} gradients")
    train(*batch)
    assert train.last.step == has_run
    assert train.last.scale == (32768.0 if has_run else 65536.0)


def test_a_static_scale_is_not_lowered_and_the_failure_says_why():
    scaler = amp_ir.GradScaler("cpu", init_scale=65536.0, dynamic=False)
    step, batch, owners = large_loss(scaler)
    found = amp_ir.verify(step, batch, amp_dtype="float16", check=False, **owners)
    assert found.ratios == ()
    assert found.failures == (
        "a gradient is not finite where float64's is; train.find_overflow(*batch) says why",
    )
    assert found.notes == (
        "torch.autocast is not finite on a batch: there is no ratio to it there",
    )


def test_results_in_objects_are_compared():
    @dataclasses.dataclass
    class Out:
        loss: torch.Tensor

    model = nn.Linear(8, 2)

    def step(x: torch.Tensor) -> Out:
        return Out(model(x).square().mean())

    batch = (torch.randn(4, 8),)
    found = amp_ir.verify(step, batch, model=model, check=False)
    assert 1e-5 < found.draws[0]["amp_ir low"].result < 1e-2
    report = amp_ir.error_report(step, batch, model=model)
    assert report.error == pytest.approx(found.draws[0]["amp_ir low, strict"].result, rel=0.01)


def test_autocast_sees_weights_after_the_step_of_their_optimizer():
    torch.manual_seed(0)
    made, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    of_made = torch.optim.SGD(made.parameters(), lr=0.5)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.5)

    def judged(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(-judge(x)).mean() + F.softplus(judge(made(z).detach())).mean()

    def fooled(z: torch.Tensor) -> torch.Tensor:
        return F.softplus(-judge(made(z))).mean()

    def step(z: torch.Tensor, x: torch.Tensor) -> None:
        judged(z, x).backward()
        of_judge.step()
        of_judge.zero_grad()
        fooled(z).backward()
        of_made.step()
        of_made.zero_grad()
        of_judge.zero_grad()

    z, x = torch.randn(8, 4), torch.randn(8, 4)
    owners = {"model": [made, judge], "optimizer": [of_made, of_judge]}
    found = amp_ir.verify(step, (z, x), check=False, **owners)

    # The same with a region of autocast around each forward pass, and in float64.
    gradients = {}
    for dtype in (torch.bfloat16, torch.float64):
        networks = copy.deepcopy([made, judge])
        if dtype == torch.float64:
            networks = [one.double() for one in networks]
        own_made, own_judge = networks
        wide = (z, x) if dtype == torch.bfloat16 else (z.double(), x.double())
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = F.softplus(-own_judge(wide[1])).mean()
            loss = loss + F.softplus(own_judge(own_made(wide[0]).detach())).mean()
        loss.backward()
        torch.optim.SGD(own_judge.parameters(), lr=0.5).step()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = F.softplus(-own_judge(own_made(wide[0]))).mean()
        loss.backward()
        gradients[dtype] = own_made.weight.grad.double()
    exact = gradients[torch.float64]
    expected = float((gradients[torch.bfloat16] - exact).norm() / exact.norm())
    assert found.draws[0]["torch.autocast"].gradients["weight"] == pytest.approx(expected, rel=1e-3)


def test_ranges_count_what_rounding_loses():
    training = Training.make()
    x = torch.full((16, 12), 2.0**-26)
    x[:8] = 2.0**-15
    found = amp_ir.verify(
        training.step,
        (x, training.batch[1]),
        model=training.model,
        optimizer=training.optimizer,
        amp_dtype="float16",
        check=False,
    )
    (batch,) = (one for one in found.ranges if one.variable == "batch0_low")
    assert (batch.flushed, batch.subnormal, batch.infinite) == (0.5, 0.5, 0.0)
    assert batch.largest == 2.0**-15
    assert batch.headroom_bits == pytest.approx(math.log2(65504 * 2.0**15))


def test_ranges_are_of_results_of_ops_with_several_too():
    model = nn.LSTM(6, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x)[0].square().mean()
        loss.backward()
        return loss.detach()

    x = torch.randn(4, 3, 6)
    found = amp_ir.verify(step, (x,), model=model, check=False)
    largest = float(model(x)[0].detach().abs().max())
    of_lstm = [one for one in found.ranges if one.op == "amp_ir.lstm"]
    assert of_lstm[0].largest == pytest.approx(largest, rel=2.0**-7)
    assert {"amp_ir.lstm_backward"} <= {one.op for one in found.ranges}


def test_more_batches_are_more_draws():
    training = Training.make()
    more = (torch.randn(16, 12), training.batch[1])
    found = training.verify(batches=[more], check=False)
    assert len(found.draws) == len(found.ratios) == 2
    assert found.ratios[0] != found.ratios[1]


def test_a_step_without_gradients_is_compared_by_its_results():
    model = nn.Linear(4, 4)
    found = amp_ir.verify(lambda x: model(x), (torch.randn(3, 4),), model=model)
    assert found.is_good
    assert found.measure == "result"
    errors = found.draws[0]
    assert found.ratios == (
        pytest.approx(errors["amp_ir low"].result / errors["torch.autocast"].result, rel=0.01),
    )
    assert "times the result error of torch.autocast" in str(found)
    assert "The parameters whose" not in str(found)


def test_what_torch_autocast_cannot_run_is_said(monkeypatch):
    training = Training.make()
    real = torch.autocast.__enter__

    def refuse(self: Any) -> Any:
        if self._enabled:
            raise RuntimeError("no such kernel\nTriggered internally")
        return real(self)

    monkeypatch.setattr(torch.autocast, "__enter__", refuse)
    found = training.verify(check=False)
    assert found.notes == ("torch.autocast cannot run the step in bfloat16 here: no such kernel",)
    assert found.ratios == ()
    assert "torch.autocast" not in found.draws[0]


def test_an_unknown_dtype_is_refused():
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        Training.make().verify(amp_dtype="float8")
    assert str(caught.value) == (
        "amp_dtype='float8' is not known; expected one of 'bfloat16', 'float16', 'float32'"
    )


FILE = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = (torch.randn(32, 8), torch.randn(32, 4))


def step(x, y):
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
"""


def test_the_command_verifies_a_file_of_the_users(tmp_path, capsys):
    file, out, page = (tmp_path / name for name in ("train.py", "found.json", "found.html"))
    file.write_text(FILE)
    options = ["--seeds", "2", "--json", str(out), "--html", str(page)]
    assert main(["verify", str(file), *options]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step in bfloat16, errors relative to float64, 2 draws (medians)\n")
    assert "Plan check: " in text
    assert "The numbers are right." in text
    data = json.loads(out.read_text())
    assert data["is_good"] is True
    assert len(data["draws"]) == 2
    assert data["draws"][0]["amp_ir low"]["gradients"]["0.weight"] > 0
    assert "<h2>Low tensors nearest to the ends of bfloat16</h2>" in page.read_text()
    assert "0.0%" not in page.read_text()


def test_the_command_fails_and_says_so(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(FILE)
    assert main(["verify", str(file), "--max-ratio", "0.01"]) == 1
    assert "FAILED: in bfloat16 the gradient error is " in capsys.readouterr().out


def test_a_file_with_a_seed_of_its_own_is_one_draw(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(FILE.replace("import torch\n", "import torch\n\ntorch.manual_seed(3)\n", 1))
    assert main(["verify", str(file), "--seeds", "3"]) == 0
    assert "train.py sets its own seed, so there is one draw" in capsys.readouterr().out
