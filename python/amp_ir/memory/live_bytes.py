# SPDX-License-Identifier: Apache-2.0
"""Count the arena bytes that a step holds during each call, before anything is placed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from amp_ir.ir.step_module import OutputSpec
from amp_ir.memory.buffers import Slot, Step, StepSlots
from amp_ir.memory.overwritten_state import overwrites_of


@attrs.define(eq=False)
class Uses:
    """Where a buffer is written and read, as positions of calls in one order.

    `written` is -1 for what is held before the step. `ends` is the last position at which it must
    be held; len(steps) for what must be held afterwards.
    """

    slot: Slot
    written: int
    reads: list[int]
    ends: int


class LiveBytes:
    """The live intervals of all values in the present order, and the bytes they add up to.

    Values that are written straight to where they belong (a state input, a result) count nothing,
    and a kernel's result that may take over the bytes of a dying argument counts once: as in
    plan_memory, whose lower bound is `most`.
    """

    def __init__(self, program: StepSlots, outputs: Sequence[OutputSpec]) -> None:
        self.steps = program.steps
        self.uses: dict[int, Uses] = {}
        self._read(program)
        self.outside = set(overwrites_of(program, outputs).output_of)
        self.at = self._count()

    @property
    def most(self) -> int:
        """Return the largest number of bytes alive at once."""
        return int(self.at.max(initial=0))

    def nbytes(self, slot: Slot) -> int:
        """Return the bytes that the buffer takes in the arena."""
        is_outside = id(slot) in self.outside or not slot.is_in_arena
        return 0 if is_outside else slot.nbytes

    def _read(self, program: StepSlots) -> None:
        for slot in program.inputs:
            self.uses[id(slot)] = Uses(slot, -1, [], -1)
        for position, step in enumerate(self.steps):
            for slot in _each(step.reads):
                known = self.uses.setdefault(id(slot), Uses(slot, -1, [], -1))
                known.reads.append(position)
                known.ends = position
            for slot in step.results:
                self.uses[id(slot)] = Uses(slot, position, [], position)
        for slot in program.results:
            if id(slot) in self.uses:
                self.uses[id(slot)].ends = len(self.steps)

    def _count(self) -> np.ndarray:
        changes = np.zeros(len(self.steps) + 2, dtype=np.int64)
        for known in self.uses.values():
            nbytes = self.nbytes(known.slot)
            if nbytes:
                changes[known.written] += nbytes
                changes[known.ends + 1] -= nbytes
        live = np.cumsum(changes)[: len(self.steps)]
        for position, step in enumerate(self.steps):
            if step.scratch is not None:
                live[position] += step.scratch.nbytes
            live[position] -= sum(slot.nbytes for slot in self.taken_over(step, position))
        return live

    def taken_over(self, step: Step, position: int) -> list[Slot]:
        """Return the arguments whose bytes results of the call take over."""
        taken: list[Slot] = []
        filled: set[int] = set()
        for output, source in step.inplace_pairs():
            old, new = step.arguments[source], step.results[output]
            if not isinstance(old, Slot) or output in filled or any(old is one for one in taken):
                continue
            nbytes = self.nbytes(old)
            if nbytes and nbytes == self.nbytes(new) and self.uses[id(old)].ends == position:
                taken.append(old)
                filled.add(output)
        return taken


def updates_of(program: StepSlots, outputs: Sequence[OutputSpec]) -> dict[int, int]:
    """Map each input that the step overwrites, by id of its buffer, to the first such call."""
    return overwrites_of(program, outputs).since


def _each(slots: Iterable[Slot]) -> list[Slot]:
    return list({id(slot): slot for slot in slots}.values())
