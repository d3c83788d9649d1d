# SPDX-License-Identifier: Apache-2.0
"""The ranks of a process group as threads of one process, for the interpreter of collectives.

Each thread evaluates the program of one rank; the reference implementations of collectives meet
here. Outside of `run_ranks` a collective behaves as if all ranks held the same values.
"""

from __future__ import annotations

import collections
import contextvars
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import attrs
import torch

T = TypeVar("T")
_SECONDS = 60.0


class _Meeting:
    """What each rank has sent, by the collective and how often it ran before."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._sent: dict[Hashable, dict[int, Sequence[torch.Tensor]]] = {}
        self._changed = threading.Condition()

    def send(self, key: Hashable, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        with self._changed:
            self._sent.setdefault(key, {})[rank] = [one.clone() for one in tensors]
            self._changed.notify_all()

    def receive(self, key: Hashable) -> list[Sequence[torch.Tensor]]:
        """Return what the ranks sent, in their order, once all have."""
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: len(self._sent.get(key, ())) == self.count, _SECONDS
            )
            if not is_there:
                raise TimeoutError(f"not all of {self.count} ranks began {key}")
            return [self._sent[key][rank] for rank in range(self.count)]


@attrs.define(eq=False)
class _Rank:
    number: int
    meeting: _Meeting
    begun: collections.Counter[Hashable] = attrs.field(factory=collections.Counter)
    ended: collections.Counter[Hashable] = attrs.field(factory=collections.Counter)


_rank: contextvars.ContextVar[_Rank | None] = contextvars.ContextVar("amp_ir_rank", default=None)


def run_ranks(count: int, function: Callable[[int], T]) -> list[T]:
    """Call `function(rank)` in a thread for each rank; return what each returned, in order."""
    meeting = _Meeting(count)

    def of_rank(number: int) -> T:
        _rank.set(_Rank(number, meeting))
        return function(number)

    with ThreadPoolExecutor(count) as pool:
        contexts = [contextvars.copy_context() for _ in range(count)]
        tasks = [pool.submit(contexts[k].run, of_rank, k) for k in range(count)]
        return [task.result() for task in tasks]


def send(key: Hashable, tensors: Sequence[torch.Tensor]) -> None:
    """Send this rank's tensors; outside of `run_ranks` nothing happens."""
    rank = _rank.get()
    if rank is not None:
        rank.meeting.send((key, rank.begun[key]), rank.number, tensors)
        rank.begun[key] += 1


def receive(
    key: Hashable, tensors: Sequence[torch.Tensor], ranks: int
) -> list[Sequence[torch.Tensor]]:
    """Return what all ranks sent, in order; outside of `run_ranks` each sent `tensors`."""
    rank = _rank.get()
    if rank is None:
        return [tensors] * ranks
    found = rank.meeting.receive((key, rank.ended[key]))
    rank.ended[key] += 1
    return found
