# SPDX-License-Identifier: Apache-2.0
"""A workload in float32 and in mixed precision, beside PyTorch's own, measured in one run."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import attrs
import torch

import amp_ir
from amp_ir.demo.workloads import Training, Workload

COMPARED_STEPS = 10
# A turn takes at least this long, so that switching does not dominate a step of a millisecond.
_TURN_SECONDS = 0.02
# A variant for which the CPU lacks instructions may take minutes a step: PyTorch's bfloat16 without
# AVX-512, for example. It trains no longer than this, and takes no turns.
_TRAINING_SECONDS = 30.0


class Report(Protocol):
    """A callback that receives each stage as it begins, and the progress of a long one."""

    def __call__(self, stage: str, part: str = "") -> None:
        """Report a stage; `part` is "3 of 10", for example."""


def _silent(stage: str, part: str = "") -> None:
    """Report nothing."""


@attrs.frozen
class Variant:
    """One variant of the workload's step, and its measurements.

    `losses` are those of the first COMPARED_STEPS steps, or of fewer if the variant is too slow to
    train so many. What PyTorch does not report is None.
    """

    title: str
    dtype: str
    losses: tuple[float, ...]
    ms: float
    peak_mib: float | None = None
    casts: int | None = None
    kernels: int | None = None
    compile_seconds: float | None = None

    @property
    def is_slow(self) -> bool:
        """Whether it trained fewer steps than the others, and `ms` is the mean of these."""
        return len(self.losses) < COMPARED_STEPS

    def loss_difference(self, other: Variant) -> float:
        """Return the largest relative difference of the losses, over the steps of both."""
        pairs = zip(self.losses, other.losses, strict=False)
        return max(abs(mine - its) / abs(its) for mine, its in pairs)


@attrs.frozen
class Comparison:
    """The four variants of one workload, measured in turns."""

    workload: Workload
    parameters: int
    steps: int
    ours: Variant
    ours_low: Variant
    torch: Variant
    torch_low: Variant

    @property
    def variants(self) -> tuple[Variant, Variant, Variant, Variant]:
        """The four variants in the order of the table."""
        return self.ours, self.ours_low, self.torch, self.torch_low


@attrs.define
class _Runner:
    """A step ready to run, on a model of its own."""

    title: str
    dtype: str
    step: Callable[..., torch.Tensor]
    batch: tuple[torch.Tensor, ...]
    facts: dict[str, float] = attrs.field(factory=dict)
    losses: list[float] = attrs.field(factory=list)
    turns_ms: list[float] = attrs.field(factory=list)

    @property
    def is_trained(self) -> bool:
        """Whether it trained all the steps that are compared."""
        return len(self.losses) == COMPARED_STEPS

    def train(self) -> None:
        """Train COMPARED_STEPS steps, or for _TRAINING_SECONDS, and keep the losses."""
        started = time.perf_counter()
        seconds = 0.0
        while not self.is_trained and seconds < _TRAINING_SECONDS:
            self.losses.append(self.step(*self.batch).item())
            seconds = time.perf_counter() - started
        if not self.is_trained:
            self.turns_ms.append(seconds / len(self.losses) * 1e3)

    def take_turn(self) -> None:
        """Time a step, or the mean of several short ones."""
        count = 0
        started = time.perf_counter()
        while count == 0 or time.perf_counter() - started < _TURN_SECONDS:
            self.step(*self.batch)
            if self.batch[0].is_cuda:
                torch.cuda.synchronize()
            count += 1
        self.turns_ms.append((time.perf_counter() - started) / count * 1e3)

    def result(self) -> Variant:
        return Variant(
            self.title,
            self.dtype,
            tuple(self.losses),
            statistics.median(self.turns_ms),
            **self.facts,  # type: ignore[arg-type]
        )


def compare(
    workload: Workload,
    *,
    low_dtype: str,
    device: str = "cpu",
    small: bool = False,
    steps: int = 10,
    report: Report = _silent,
) -> Comparison:
    """Train the workload in four variants from the same weights, and measure them in turns.

    Args:
        workload: what to train.
        low_dtype: "bfloat16" or "float16".
        device: "cpu" or "cuda".
        small: shapes of a test, not of a measurement.
        steps: timed turns of each variant.
        report: receives the progress.

    Raises:
        MissingPackage, DeviceError.
    """
    report(f"building {workload.name}")
    make = functools.partial(workload.make, small=small, device=device)
    first = make()
    runners = [
        _compiled(make(), None, device, report),
        _compiled(make(), low_dtype, device, report),
        _eager(first, None),
        _eager(make(), low_dtype),
    ]
    for runner in runners:
        report(f"training {COMPARED_STEPS} steps: {runner.title} {runner.dtype}")
        runner.train()
    fast = [runner for runner in runners if runner.is_trained]
    for turn in range(steps):
        report("timing in turns", f"{turn + 1} of {steps}")
        for runner in fast:
            runner.take_turn()
    parameters = sum(one.numel() for one in first.model.parameters())
    return Comparison(workload, parameters, steps, *(runner.result() for runner in runners))


def _compiled(training: Training, low_dtype: str | None, device: str, report: Report) -> _Runner:
    dtype = low_dtype or "float32"
    started = time.perf_counter()
    report(f"capturing the step, {dtype}")
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    if low_dtype is not None:
        report(f"choosing casts, {dtype}")
        mod = amp_ir.autocast(mod, args, amp_dtype=low_dtype)
    report(f"compiling, {dtype}")
    step = amp_ir.compile(mod, device=device)
    facts = {
        "compile_seconds": time.perf_counter() - started,
        "peak_mib": step.report.plan.peak_bytes / 2**20,
        "casts": len(mod.plan.casts) if mod.plan is not None else 0,
        "kernels": step.report.kernel_count,
    }
    return _Runner("amp_ir", dtype, step, training.batch, facts)


def _eager(training: Training, low_dtype: str | None) -> _Runner:
    if low_dtype is None:
        return _Runner("PyTorch", "float32", training.step, training.batch)
    step = functools.partial(training.autocast_step, dtype=getattr(torch, low_dtype))
    return _Runner("PyTorch", low_dtype, step, training.batch)
