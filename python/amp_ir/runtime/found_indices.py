# SPDX-License-Identifier: Apache-2.0
"""Index checks of steps on a GPU: results are read when they have arrived, without waiting."""

from __future__ import annotations

import collections

import torch

from amp_ir.ir.planned_checks import PlannedChecks

# What a step found, on the host, and the event after which it is there; None: on a CPU.
_Sent = tuple[torch.Tensor, "torch.cuda.Event | None"]
# A step's extremes are waited for when so many later ones are under way; a queue is never longer.
_MOST_PENDING = 64


class FoundIndices:
    """The extremes of indices that steps return, in transfer from a GPU to the host.

    A step with an index out of range has rolled itself back on the GPU, so the host need not wait.
    """

    def __init__(self, checks: PlannedChecks) -> None:
        self._checks = checks
        self._pending: collections.deque[_Sent] = collections.deque()
        # Pinned memory and events take the host longer to make than a small step's launch.
        self._free: list[_Sent] = []

    def add(self, extremes: torch.Tensor) -> None:
        """Send the extremes of the step that was just launched, int64[2 * checks], to the host."""
        copy, event = self._free.pop() if self._free else _place_for(extremes)
        copy.copy_(extremes, non_blocking=True)
        if event is not None:
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
            self._take_first()

    def _take_first(self) -> None:
        sent = self._pending.popleft()
        self._free.append(sent)
        self._check_arrived(*sent)

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
            self._take_first()


def _place_for(extremes: torch.Tensor) -> _Sent:
    is_on_gpu = extremes.device.type == "cuda"
    copy = torch.empty(extremes.shape, dtype=extremes.dtype, pin_memory=is_on_gpu)
    return copy, torch.cuda.Event() if is_on_gpu else None
