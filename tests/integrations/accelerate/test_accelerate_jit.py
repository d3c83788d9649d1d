# SPDX-License-Identifier: Apache-2.0
"""A loop of Accelerate whose body is compiled trains what the loop trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import amp_ir
from amp_ir.errors import CaptureError, OptionError
from tool_loops import ProbedNet, are_equal, assert_alike, batches

pytest.importorskip("accelerate", reason="the package accelerate is not installed")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402

from amp_ir.integrations.accelerate import jit  # noqa: E402


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """Accelerate keeps the first Accelerator's precision for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Loop:
    """A script with an Accelerator; `compiled` compiles the body of its loop."""

    def __init__(
        self, *, compiled: bool, dropout: float = 0.0, reads_count: bool = False, **options: Any
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        is_half = options.get("mixed_precision") == "fp16"
        if is_half:
            options["mixed_precision"] = "no"
        accelerator = self.accelerator = Accelerator(cpu=True, **options)
        if is_half:
            # Accelerate offers it on GPUs alone; nothing of it depends on one.
            accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=6)
        net = ProbedNet(dropout, refuses_autocast=compiled)
        adamw = torch.optim.AdamW(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(adamw, 5, 0.9)
        prepared: Any = accelerator.prepare(net, adamw, schedule)
        model, optimizer, self.schedule = prepared
        self.model, self.optimizer = model, optimizer

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            if reads_count and accelerator.step % 2:
                loss = loss * 2
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        self.step = self.train = step
        if compiled:
            self.train = jit(step, accelerator=accelerator, model=model, optimizer=optimizer)

    def run(self, given: Any) -> Any:
        rows = []
        for x, y in given:
            with self.accelerator.accumulate(self.model):
                loss = self.train(x, y)
                self.schedule.step()
            rate = self.optimizer.param_groups[0]["lr"]
            rows.append((loss.item(), rate, self.accelerator.optimizer_step_was_skipped))
        return rows, self.model


@pytest.mark.parametrize(
    ("precision", "accumulated", "tolerance"),
    # Float32 rounding of sums in another order, over 30 steps of Adam; bfloat16 has 8 significant
    # bits, 2^-8 a rounding.
    [("no", 1, 1e-4), ("no", 2, 1e-4), ("bf16", 2, 2e-2)],
)
def test_losses_rates_and_parameters_are_accelerates(
    precision: str, accumulated: int, tolerance: float
) -> None:
    options = {"mixed_precision": precision, "gradient_accumulation_steps": accumulated}
    theirs = Loop(compiled=False, **options).run(batches(30 * accumulated))
    loop = Loop(compiled=True, **options)
    forward = vars(loop.model).get("forward")
    assert (forward is None) == (precision == "no")
    assert_alike(loop.run(batches(30 * accumulated)), theirs, tolerance)
    # A batch that accumulates and one that updates are a program each.
    assert len(loop.train.compiled_step.recompiles) == accumulated - 1
    assert loop.accelerator.step == 30 * accumulated
    # An evaluation is Accelerate's own, under its autocast.
    assert vars(loop.model).get("forward") is forward


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loss_scale_skips_steps_and_the_schedule_as_accelerates(accumulated: int) -> None:
    def batches_with_overflows() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for k, (x, y) in enumerate(batches(30 * accumulated)):
            # Beyond the largest number of float16.
            yield (x * 1e6 if k in (9, 20, 21) else x), y

    options = {"mixed_precision": "fp16", "gradient_accumulation_steps": accumulated}
    theirs = Loop(compiled=False, **options)
    wanted = theirs.run(batches_with_overflows())
    loop = Loop(compiled=True, **options)
    found = loop.run(batches_with_overflows())
    # The losses of the batches that overflow are infinite, or not, as each rounds.
    rates_and_skips = [row[1:] for row in found[0]]
    assert rates_and_skips == [row[1:] for row in wanted[0]]
    assert sum(is_skipped for _, is_skipped in rates_and_skips) >= 2
    assert loop.accelerator.scaler.state_dict() == theirs.accelerator.scaler.state_dict()
    for one, other in zip(loop.model.parameters(), theirs.model.parameters(), strict=True):
        # Float16 has 11 significant bits; 30 steps of Adam.
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert "step" not in vars(loop.optimizer)


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    def made() -> Loop:
        return Loop(compiled=True, dropout=0.3, mixed_precision="bf16")

    whole = made()
    whole.run(batches(6))
    half, (*first, four, five, six) = made(), list(batches(6))
    half.run(first)
    half.accelerator.save_state(str(tmp_path))
    again = made()
    again.accelerator.load_state(str(tmp_path))
    again.run([four, five, six])
    # Bit for bit, dropout included.
    assert are_equal(again.model, whole.model)
    assert again.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_a_step_that_computes_with_the_count_of_batches_is_refused() -> None:
    loop = Loop(compiled=True, reads_count=True)
    with pytest.raises(OptionError) as caught:
        loop.run(batches(1))
    assert str(caught.value) == (
        "the step computes with accelerator.step, the number of the batch, which changes at every "
        "call, as accelerator.accumulate(model) does too: call the step inside of `with "
        "accelerator.accumulate(model):`, and pass what else depends on the number to the step as "
        "an argument"
    )
    assert loop.accelerator.step == 1


def test_what_one_step_on_one_device_cannot_do_is_refused() -> None:
    loop = Loop(compiled=False)
    loop.accelerator.state._mixed_precision = "fp8"
    with pytest.raises(OptionError) as caught:
        jit(loop.step, accelerator=loop.accelerator, model=loop.model, optimizer=loop.optimizer)
    assert str(caught.value) == (
        "amp_ir.integrations.accelerate.jit compiles the whole step, for one device of one "
        "process, in 'no', 'bf16', 'fp16'; it cannot do mixed_precision='fp8'. Compile the model "
        'where that is enough: torch.compile(model, backend="amp_ir")'
    )


def test_what_a_loss_scale_cannot_do_is_refused() -> None:
    loop = Loop(compiled=False, mixed_precision="fp16")
    with pytest.raises(OptionError) as caught:
        jit(
            loop.step,
            accelerator=loop.accelerator,
            model=loop.model,
            optimizer=[loop.optimizer] * 2,
        )
    assert str(caught.value) == (
        "amp_ir.integrations.accelerate.jit compiles the whole step, for one device of one "
        "process, in 'no', 'bf16', 'fp16'; it cannot do several optimizers under one loss scale. "
        'Compile the model where that is enough: torch.compile(model, backend="amp_ir")'
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loop.accelerator.backward(F.cross_entropy(loop.model(x), y))
        loop.optimizer.step(lambda: 0.0)

    train = jit(step, accelerator=loop.accelerator, model=loop.model, optimizer=loop.optimizer)
    with pytest.raises(OptionError, match="^optimizer.step takes no closure under a loss scale$"):
        train(*next(batches(1)))
    assert "step" not in vars(loop.optimizer)


def test_a_capture_leaves_the_class_of_a_wrapper_as_it_was() -> None:
    loop, before = Loop(compiled=False), AcceleratedOptimizer.step
    train = amp_ir.jit(loop.step, model=loop.model, optimizer=[])
    with pytest.raises(CaptureError, match="AcceleratedOptimizer.step of an optimizer that was"):
        train(*next(batches(1)))
    assert AcceleratedOptimizer.step is before
    loop.step(*next(batches(1)))
    train = amp_ir.jit(loop.step, model=loop.model, optimizer=loop.optimizer.optimizer)
    train(*next(batches(1)))
    assert AcceleratedOptimizer.step is before
