# SPDX-License-Identifier: Apache-2.0
"""Find the values of a step that are stored at an output's address, and since which call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from amp_ir.memory.buffers import Buffer

if TYPE_CHECKING:
    from amp_ir.memory.liveness import Liveness


@attrs.define(eq=False)
class Overwrites:
    """The values outside of the arena, and the calls that overwrite the state.

    `output_of` has the position of the output, by the id of the buffer of a value stored there, and
    `buffers` those buffers. `since` has the position of the first call that writes over the old
    value of a state input, by the id of its buffer, or of the one that makes the new value, where
    that has to wait elsewhere.
    """

    output_of: dict[int, int] = attrs.field(factory=dict)
    buffers: list[Buffer] = attrs.field(factory=list)
    since: dict[int, int] = attrs.field(factory=dict)


def overwrites_of(live: Liveness) -> Overwrites:
    """Return what is written at its destination, by the present order of the calls.

    An output is written over the old state where nothing reads that later, other than the call
    itself at the same places. So is what such a call writes the output over: a momentum with a
    matmul added, to which the rows of a table's gradient are added. The bytes of a state are free
    from the last reader of its old value to the writer of its new one.
    """
    return _Finder(live).find()


class _Finder:
    def __init__(self, live: Liveness) -> None:
        self.live = live
        self.found = Overwrites()
        calls = enumerate(live.program.calls)
        self.last_wait = max((k for k, one in calls if one.collective == "wait"), default=-1)

    def find(self) -> Overwrites:
        program = self.live.program
        for index, (spec, buffer) in enumerate(
            zip(self.live.outputs, program.results, strict=True)
        ):
            target = None if spec.updates is None else program.inputs[spec.updates]
            written = self.live.written(buffer)
            if written < 0:
                continue
            if target is not None:
                self.found.since[id(target)] = written
            if id(buffer) not in self.found.output_of:
                self._put(buffer, target, index)
        return self.found

    def _put(self, buffer: Buffer, target: Buffer | None, index: int) -> None:
        """Put an output, and what is written over on the path to it, at its destination."""
        value: Buffer | None = buffer
        while value is not None and self._fits(value, target):
            self.found.output_of[id(value)] = index
            self.found.buffers.append(value)
            if target is not None:
                self.found.since[id(target)] = self.live.written(value)
            value = self._written_over(value)

    def _fits(self, value: Buffer, target: Buffer | None) -> bool:
        """Return whether nothing reads the target's old value once `value` is written there."""
        if target is None or not value.is_in_arena:
            return value.is_in_arena
        if value.nbytes != target.nbytes:
            return False
        if self.live.written(value) < self.last_wait:
            # If the exchange fails, the step has changed nothing: the value is copied at the end.
            return False
        last, written = self.live.last_read(target), self.live.written(value)
        if last != written:
            return last < written
        call = self.live.writer[id(value)]
        allowed = call.overwritten_by(value)
        return all(k in allowed for k, one in enumerate(call.arguments) if one is target)

    def _written_over(self, value: Buffer) -> Buffer | None:
        """Return the value that dies where `value` is written and whose bytes that may take."""
        call = self.live.writer[id(value)]
        if call.collective:
            # What is sent stays in its bucket; what is received may be copied out of it.
            return None
        for source in call.overwritten_by(value):
            old = call.arguments[source]
            if not isinstance(old, Buffer):
                continue
            is_known = self.live.is_held_at_end(old) or id(old) in self.found.output_of
            dies = self.live.written(old) >= 0 and self.live.ends(old) == self.live.written(value)
            if dies and not is_known and old.nbytes == value.nbytes:
                return old
        return None
