# SPDX-License-Identifier: Apache-2.0
"""Index checks of steps on a GPU: results are read when they have arrived, without waiting."""

from __future__ import annotations

import collections

import torch

from amp_ir.ir.planned_checks import PlannedChecks

# A step's extremes are waited for when so many later ones are under way; a queue is never longer.
_MOST_PENDING = 64


class FoundIndices:
    """The extremes of indices that steps return, in transfer from a GPU to the host.

    A step with an index out of range has rolled itself back on the GPU, so the host need not wait.
    """

    def __init__(self, checks: PlannedChecks) -> None:
        self._checks = checks
        self._pending: collections.deque[tuple[torch.Tensor, torch.cuda.Event | None]] = (
            collections.deque()
        )

    def add(self, extremes: torch.Tensor) -> None:
        """Send the extremes of the step that was just launched, int64[2 * checks], to the host."""
        is_on_gpu = extremes.device.type == "cuda"
        copy = torch.empty(extremes.shape, dtype=extremes.dtype, pin_memory=is_on_gpu)
        copy.copy_(extremes, non_blocking=True)
        event = None
        if is_on_gpu:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(extremes.device))
        self._pending.append((copy, event))

    def look_at_all(self) -> None:
        """Raise the errors of all steps, and leave them to be raised by a later call too.

        Raises:
            IndexOutOfRangeError: a step used an index out of range, and was rolled back.
        """
        for copy, event in self._pending:
            self._check_arrived(copy, event)

    def check_all_but_last(self) -> None:
        """Raise the errors of all steps but the last, which are waited for.

        So ranks that share what they found raise at the same call.

        Raises:
            IndexOutOfRangeError: a step used an index out of range, and was rolled back.
        """
        while len(self._pending) > 1:
            self._check_arrived(*self._pending.popleft())

    def _check_arrived(self, copy: torch.Tensor, event: torch.cuda.Event | None) -> None:
        """Wait for the extremes of a step, and check them."""
        if event is not None and not event.query():
            event.synchronize()
        self._checks.check_extremes(copy)

    def check(self, *, all_steps: bool = False) -> None:
        """Raise the errors of the steps that are done; with `all_steps`, wait for the others.

        Raises:
            IndexOutOfRangeError: a step used an index out of range, and was rolled back.
        """
        while self._pending:
            copy, event = self._pending[0]
            if event is not None and not event.query():
                if not all_steps and len(self._pending) <= _MOST_PENDING:
                    return
            self._pending.popleft()
            self._check_arrived(copy, event)
