# SPDX-License-Identifier: Apache-2.0
"""Log of the last steps: a ring buffer in the step's own state, written inside the step.

Training reads nothing back: `StepLog` reads the tensors on demand.
"""

from __future__ import annotations

import attrs
import torch

# Steps that the ring remembers; a power of two.
LENGTH = 1024
# The columns of the ring and the entries of the counts.
SKIPPED, SCALE, GRADIENT_NORM, CONSECUTIVE_SKIPS = range(4)
STEPS, SKIPS, SKIPS_IN_A_ROW = range(3)


@attrs.frozen
class StepRecord:
    """One step under a loss scale.

    Attributes:
        step: its number, from 0, counted since the scaler was first compiled into a step.
        skipped: whether a gradient was not finite, so that `scaler.step` did not step an optimizer
            and nothing of that optimizer changed. One that the step stepped by its own
            `optimizer.step()` is not skipped, as in PyTorch.
        scale: the loss scale that the step used.
        gradient_norm: the 2-norm of all unscaled gradients before clipping; not finite in a
            skipped step.
        consecutive_skips: skipped steps in a row, this one included.
    """

    step: int
    skipped: bool
    scale: float
    gradient_norm: float
    consecutive_skips: int


@attrs.frozen(eq=False)
class StepLog:
    """The ring f32[1024, 4] and the counts i64[3] (steps, skips, skips in a row) of one scaler."""

    ring: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device) -> StepLog:
        """Return a log of no steps."""
        ring = torch.zeros(LENGTH, 4, device=device)
        return cls(ring, torch.zeros(3, dtype=torch.int64, device=device))

    def write(
        self, skipped: torch.Tensor, scale: torch.Tensor, gradient_norm: torch.Tensor
    ) -> None:
        """Append one step, in place: bool[], f32[] before its update, f32[]. May be traced."""
        steps, skips, in_a_row = self.counts.unbind()
        in_a_row = torch.where(skipped, in_a_row + 1, torch.zeros_like(in_a_row))
        row = torch.stack([skipped.float(), scale, gradient_norm, in_a_row.float()])
        is_row = torch.arange(LENGTH, device=self.ring.device) == (steps & (LENGTH - 1))
        self.ring.copy_(torch.where(is_row[:, None], row[None, :], self.ring))
        self.counts.copy_(torch.stack([steps + 1, skips + skipped.long(), in_a_row]))

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return int(self.counts[STEPS])

    @property
    def skips(self) -> int:
        """Return the number of skipped steps."""
        return int(self.counts[SKIPS])

    @property
    def consecutive_skips(self) -> int:
        """Return the current number of skipped steps in a row."""
        return int(self.counts[SKIPS_IN_A_ROW])

    def set_consecutive_skips(self, count: int) -> None:
        """Set the count of skips in a row from a checkpoint."""
        self.counts[SKIPS_IN_A_ROW] = count

    def last(self) -> StepRecord | None:
        """Return the last step; None before the first."""
        steps = self.steps
        return self._record(steps - 1, self.ring[(steps - 1) % LENGTH].tolist()) if steps else None

    def history(self) -> list[StepRecord]:
        """Return the last steps, at most 1024, oldest first."""
        steps, rows = self.steps, self.ring.tolist()
        numbers = range(max(0, steps - LENGTH), steps)
        return [self._record(number, rows[number % LENGTH]) for number in numbers]

    def _record(self, step: int, row: list[float]) -> StepRecord:
        return StepRecord(
            step=step,
            skipped=bool(row[SKIPPED]),
            scale=row[SCALE],
            gradient_norm=row[GRADIENT_NORM],
            consecutive_skips=int(row[CONSECUTIVE_SKIPS]),
        )
