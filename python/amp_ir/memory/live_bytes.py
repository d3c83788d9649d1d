# SPDX-License-Identifier: Apache-2.0
"""Count the arena bytes that a step holds during each call, before anything is placed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from amp_ir.ir.step_module import OutputSpec
from amp_ir.memory.buffers import Buffer, BufferizedStep, Call
from amp_ir.memory.overwritten_state import overwrites_of


@attrs.define(eq=False)
class Uses:
    """Where a buffer is written and read, as positions of calls in one order.

    `written` is -1 for what is held before the step. `ends` is the last position at which it must
    be held; len(calls) for what must be held afterwards.
    """

    buffer: Buffer
    written: int
    reads: list[int]
    ends: int


class LiveBytes:
    """The live intervals of all values in the present order, and the bytes they add up to.

    Values that are written straight to where they belong (a state input, a result) count nothing,
    and a kernel's result that may take over the bytes of a dying argument counts once: as in
    plan_memory, whose lower bound is `most`.
    """

    def __init__(self, program: BufferizedStep, outputs: Sequence[OutputSpec]) -> None:
        self.calls = program.calls
        self.uses: dict[int, Uses] = {}
        self._read(program)
        self.outside = set(overwrites_of(program, outputs).output_of)
        self.at = self._count()

    @property
    def most(self) -> int:
        """Return the largest number of bytes alive at once."""
        return int(self.at.max(initial=0))

    def nbytes(self, buffer: Buffer) -> int:
        """Return the bytes that the buffer takes in the arena."""
        is_outside = id(buffer) in self.outside or not buffer.is_in_arena
        return 0 if is_outside else buffer.nbytes

    def _read(self, program: BufferizedStep) -> None:
        for buffer in program.inputs:
            self.uses[id(buffer)] = Uses(buffer, -1, [], -1)
        for position, call in enumerate(self.calls):
            for buffer in _each(call.reads):
                known = self.uses.setdefault(id(buffer), Uses(buffer, -1, [], -1))
                known.reads.append(position)
                known.ends = position
            for buffer in call.results:
                self.uses[id(buffer)] = Uses(buffer, position, [], position)
        for buffer in program.results:
            if id(buffer) in self.uses:
                self.uses[id(buffer)].ends = len(self.calls)

    def _count(self) -> np.ndarray:
        changes = np.zeros(len(self.calls) + 2, dtype=np.int64)
        for known in self.uses.values():
            nbytes = self.nbytes(known.buffer)
            if nbytes:
                changes[known.written] += nbytes
                changes[known.ends + 1] -= nbytes
        live = np.cumsum(changes)[: len(self.calls)]
        for position, call in enumerate(self.calls):
            if call.workspace is not None:
                live[position] += call.workspace.nbytes
            live[position] -= sum(buffer.nbytes for buffer in self.taken_over(call, position))
        return live

    def taken_over(self, call: Call, position: int) -> list[Buffer]:
        """Return the arguments whose bytes results of the call take over."""
        taken: list[Buffer] = []
        filled: set[int] = set()
        for output, source in call.inplace_pairs():
            old, new = call.arguments[source], call.results[output]
            if not isinstance(old, Buffer) or output in filled or any(old is one for one in taken):
                continue
            nbytes = self.nbytes(old)
            if nbytes and nbytes == self.nbytes(new) and self.uses[id(old)].ends == position:
                taken.append(old)
                filled.add(output)
        return taken


def updates_of(program: BufferizedStep, outputs: Sequence[OutputSpec]) -> dict[int, int]:
    """Map each input that the step overwrites, by id of its buffer, to the first such call."""
    return overwrites_of(program, outputs).since


def _each(buffers: Iterable[Buffer]) -> list[Buffer]:
    return list({id(buffer): buffer for buffer in buffers}.values())
