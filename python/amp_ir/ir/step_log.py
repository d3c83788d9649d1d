# SPDX-License-Identifier: Apache-2.0
"""What became of the last steps: a ring in the step's own state, written inside the step.

Nothing is read back while training goes on: `StepLog` reads the tensors when it is asked.
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
        """A log of no steps."""
        ring = torch.zeros(LENGTH, 4, device=device)
        return cls(ring, torch.zeros(3, dtype=torch.int64, device=device))

    def write(
        self, skipped: torch.Tensor, scale: torch.Tensor, gradient_norm: torch.Tensor
    ) -> None:
        """Add one step, in place: bool[], f32[] before its update, f32[]. May be traced."""
        steps, skips, in_a_row = self.counts.unbind()
        in_a_row = torch.where(skipped, in_a_row + 1, torch.zeros_like(in_a_row))
        row = torch.stack([skipped.float(), scale, gradient_norm, in_a_row.float()])
        is_row = torch.arange(LENGTH, device=self.ring.device) == (steps & (LENGTH - 1))
        self.ring.copy_(torch.where(is_row[:, None], row[None, :], self.ring))
        self.counts.copy_(torch.stack([steps + 1, skips + skipped.long(), in_a_row]))

    @property
    def steps(self) -> int:
        """How many steps there were."""
        return int(self.counts[STEPS])

    @property
    def skips(self) -> int:
        """How many of them were skipped."""
        return int(self.counts[SKIPS])

    @property
    def consecutive_skips(self) -> int:
        """How many were skipped in a row, up to now."""
        return int(self.counts[SKIPS_IN_A_ROW])

    def set_consecutive_skips(self, count: int) -> None:
        """Go on from a checkpoint's count."""
        self.counts[SKIPS_IN_A_ROW] = count

    def last(self) -> StepRecord | None:
        """The last step; None before the first."""
        steps = self.steps
        return self._record(steps - 1, self.ring[(steps - 1) % LENGTH].tolist()) if steps else None

    def history(self) -> list[StepRecord]:
        """The last steps, at most 1024, oldest first."""
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
