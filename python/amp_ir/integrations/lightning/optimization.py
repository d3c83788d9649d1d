# SPDX-License-Identifier: Apache-2.0
"""The part of Lightning's loop that runs a batch, with one compiled step in it."""

from __future__ import annotations

import functools
from typing import Any

import lightning
from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)

from amp_ir.errors import VersionError

# The parts of Lightning's loop that are replaced or called; 2.6 has them under these names.
_USED = ("_make_closure", "_on_before_zero_grad", "_optimizer_step")
if not all(hasattr(_AutomaticOptimization, name) for name in _USED):
    raise VersionError(
        f"AmpIrPrecision is written for the loop of Lightning 2.6, and lightning "
        f"{lightning.__version__} has another one; install 'lightning>=2.6,<2.7', or compile the "
        'module: torch.compile(module, backend="amp_ir")'
    )


class CompiledOptimization(_AutomaticOptimization):
    """Automatic optimization whose closure is forward, backward, clipping and optimizer at once.

    What is around it stays Lightning's: `optimizer_step` of the module, counters, schedules, hooks
    of the batch.
    """

    def __init__(self, trainer: Any, run_step: Any) -> None:
        super().__init__(trainer)
        # The counters that a checkpoint has, and those of a fit before.
        self.optim_progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        self._run_step = run_step

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        if self._skip_backward:
            # StochasticWeightAveraging runs one more epoch for statistics, and updates nothing.
            return super()._make_closure(kwargs, optimizer, batch_idx)
        return Closure(functools.partial(self._run, kwargs, optimizer, batch_idx))

    def _run(self, kwargs: Any, optimizer: Any, batch_idx: int) -> ClosureResult:
        trainer = self.trainer
        count = trainer.accumulate_grad_batches
        if batch_idx % count == 0:
            # The gradients were cleared behind the last update; hooks and counters are left.
            self._on_before_zero_grad(optimizer)
            self.optim_progress.optimizer.zero_grad.increment_completed()
        phase = "accumulate" if trainer.fit_loop._should_accumulate() else "update"
        output = self._run_step(tuple(kwargs.values()), phase, count)
        return ClosureResult.from_training_step_output(output, count)
