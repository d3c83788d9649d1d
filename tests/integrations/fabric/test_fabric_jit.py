# SPDX-License-Identifier: Apache-2.0
"""A loop of Lightning Fabric whose body is compiled trains what the loop trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from amp_ir.errors import OptionError
from tool_loops import ProbedNet, are_equal, assert_alike, batches

pytest.importorskip("lightning", reason="the package lightning is not installed")

from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.plugins import MixedPrecision  # noqa: E402

from amp_ir.integrations.fabric import jit  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Loop:
    """A script with a Fabric; `compiled` compiles the body of its loop."""

    def __init__(self, *, compiled: bool, dropout: float = 0.0, **options: Any) -> None:
        self.fabric = Fabric(accelerator="cpu", **options)
        net = ProbedNet(dropout, refuses_autocast=compiled)
        adamw = torch.optim.AdamW(net.parameters(), lr=0.01)
        self.model, self.optimizer = self.fabric.setup(net, adamw)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9)
        fabric, model, optimizer = self.fabric, self.model, self.optimizer

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), norm

        self.train: Any = step
        if compiled:
            self.train = jit(step, fabric=fabric, model=model, optimizer=optimizer)

    def run(self, given: Any) -> Any:
        rows = []
        for x, y in given:
            loss, norm = self.train(x, y)
            self.schedule.step()
            rows.append((loss.item(), norm.item(), self.optimizer.param_groups[0]["lr"]))
        return rows, self.model


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    # Float32 rounding of sums in another order, over 30 steps of Adam; bfloat16 has 8 significant
    # bits, 2^-8 a rounding, and Fabric rounds the batch, too.
    [("32-true", 1e-4), ("bf16-mixed", 2e-2)],
)
def test_losses_norms_rates_and_parameters_are_fabrics(precision: str, tolerance: float) -> None:
    ours = Loop(compiled=True, precision=precision)
    theirs = Loop(compiled=False, precision=precision)
    assert_alike(ours.run(batches(30)), theirs.run(batches(30)), tolerance)
    assert not ours.train.compiled_step.recompiles
    plan = ours.train.compiled_step.compiled.module.plan
    assert precision == "32-true" or plan.amp_dtype == "bfloat16"
    # An evaluation is Fabric's own, under its autocast.
    assert type(ours.fabric.strategy.precision) is type(theirs.fabric.strategy.precision)


def test_float16_trains_under_the_fabrics_own_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=1000)
    ours = Loop(compiled=True, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    rows, model = ours.run(batches(30))
    skipped = [not math.isfinite(norm) for _, norm, _ in rows]
    assert 0 < sum(skipped) < 15
    assert scaler.get_scale() == 2.0 ** (26 - sum(skipped))
    assert all(torch.isfinite(one).all() for one in model.parameters())


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    def made() -> Loop:
        return Loop(compiled=True, dropout=0.3, precision="bf16-mixed")

    whole = made()
    whole.run(batches(6))
    half, (*first, four, five, six) = made(), list(batches(6))
    half.run(first)
    state = {"model": half.model, "optimizer": half.optimizer}
    own = {"train": half.train.state_dict(), "schedule": half.schedule.state_dict()}
    half.fabric.save(tmp_path / "half.ckpt", {**state, **own})
    again = made()
    left = again.fabric.load(
        tmp_path / "half.ckpt", {"model": again.model, "optimizer": again.optimizer}
    )
    again.train.load_state_dict(left["train"])
    again.schedule.load_state_dict(left["schedule"])
    again.run([four, five, six])
    # Bit for bit, dropout included.
    assert are_equal(again.model, whole.model)


def test_what_one_step_on_one_device_cannot_do_is_refused() -> None:
    with pytest.raises(OptionError) as caught:
        Loop(compiled=True, precision="bf16-true")
    assert str(caught.value) == (
        "amp_ir.integrations.fabric.jit compiles the whole step, for one device of one process, "
        "in '32-true', 'bf16-mixed', '16-mixed'; it cannot do precision='bf16-true'. Compile the "
        'model where that is enough: torch.compile(model, backend="amp_ir")'
    )
