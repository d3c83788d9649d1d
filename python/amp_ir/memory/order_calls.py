# SPDX-License-Identifier: Apache-2.0
"""Move calls to where the least memory is held."""

from __future__ import annotations

from collections.abc import Sequence

from amp_ir.ir.step_module import OutputSpec
from amp_ir.memory.buffers import Buffer, BufferizedStep, Call
from amp_ir.memory.live_bytes import LiveBytes, updates_of

# Each round enables the next one's moves; training steps need two or three.
_MAX_ROUNDS = 8


def order_calls(
    program: BufferizedStep, outputs: Sequence[OutputSpec], *, together: bool = False
) -> None:
    """Reorder `program.calls` so that less memory is held.

    Before:  a = big(x); ...; b = use(a)             g = gradient(); ...; p = update(p, g)
    After:   ...; a = big(x); b = use(a)             g = gradient(); p = update(p, g); ...

    A call whose results are larger than what it would keep alive moves down to their first reader;
    one that frees more than it makes moves up to its last argument. A move lowers the bytes held
    during every call that it passes, and is not made where the moved call itself would need more
    than the peak. `together` also moves up calls that free an argument only if its other readers
    move, too: what is large and read twice then goes before the next such thing comes. For most
    steps that is not better, so use it where every byte counts.

    Requires: `program` as read; nothing is placed.
    Ensures:  values are written before they are read; a call that reads the old value of a state
              input runs before the call that makes the new one; the peak does not grow.
    """
    before, most = list(program.calls), LiveBytes(program, outputs).most
    moves = _Moves(program, outputs, together=together)
    for _ in range(_MAX_ROUNDS):
        if not moves.round():
            break
    program.calls[:] = [program.calls[index] for index in moves.order]
    if LiveBytes(program, outputs).most > most:
        program.calls[:] = before


class _Moves:
    """The order as numbers of calls, and the bytes held during each position.

    Bytes that a result takes over from an argument are counted twice here: no move depends on them.
    """

    def __init__(
        self, program: BufferizedStep, outputs: Sequence[OutputSpec], *, together: bool
    ) -> None:
        self.calls = program.calls
        self.together = together
        live = LiveBytes(program, outputs)
        self.outside = live.outside
        self.order = list(range(len(self.calls)))
        self.place = list(self.order)
        self.writer = {id(s): k for k, call in enumerate(self.calls) for s in call.results}
        self.readers: dict[int, list[int]] = {}
        for index, call in enumerate(self.calls):
            for key in {id(buffer) for buffer in call.reads}:
                self.readers.setdefault(key, []).append(index)
        self.kept_until_the_end = {id(buffer) for buffer in program.results}
        self.made = [sum(map(self._nbytes, call.results)) for call in self.calls]
        self.may_die = [self._read_from_arena(call) for call in self.calls]
        self.before, self.after = self._dependencies(updates_of(program, outputs))
        self.live = [int(nbytes) for nbytes in live.at]
        for index, call in enumerate(self.calls):
            self.live[index] += sum(buffer.nbytes for buffer in live.taken_over(call, index))

    def _dependencies(self, updates: dict[int, int]) -> tuple[list[set[int]], list[set[int]]]:
        """Return, for each call, the calls that must come before it and those that come after."""
        before: list[set[int]] = [set() for _ in self.calls]
        for index, call in enumerate(self.calls):
            before[index] = {self.writer[id(s)] for s in call.reads if id(s) in self.writer}
        for key, update in updates.items():
            # Where a reader already comes later, the planner copies; that need not get better.
            before[update] |= {r for r in self.readers.get(key, ()) if r < update}
        after: list[set[int]] = [set() for _ in self.calls]
        for index, earlier in enumerate(before):
            for other in earlier:
                after[other].add(index)
        return before, after

    def round(self) -> bool:
        """Try every call once in each direction; return whether anything moved."""
        downwards = [self._sink(self.order[p]) for p in reversed(range(len(self.order)))]
        upwards = [self._hoist(self.order[p]) for p in range(len(self.order))]
        return any(downwards) or any(upwards)

    def _nbytes(self, buffer: Buffer) -> int:
        return 0 if id(buffer) in self.outside or not buffer.is_in_arena else buffer.nbytes

    def _read_from_arena(self, call: Call) -> list[Buffer]:
        """Return what another call makes in the arena and this one reads, each once."""
        reads = {id(buffer): buffer for buffer in call.reads}
        return [
            buffer for key, buffer in reads.items() if key in self.writer and self._nbytes(buffer)
        ]

    def _other_uses(self, buffer: Buffer, index: int) -> int:
        """Return the last place where another call writes or reads the buffer; -1 for none."""
        if id(buffer) in self.kept_until_the_end:
            return len(self.order)
        places = [self.place[one] for one in self.readers.get(id(buffer), ()) if one != index]
        writer = self.writer.get(id(buffer))
        if writer is not None and writer != index:
            places.append(self.place[writer])
        return max(places, default=-1)

    def _dying(self, index: int) -> list[tuple[Buffer, int]]:
        """Return arena arguments that nothing uses after the call, with their use before it."""
        uses = ((buffer, self._other_uses(buffer, index)) for buffer in self.may_die[index])
        return [(buffer, other) for buffer, other in uses if other < self.place[index]]

    def _sink(self, index: int) -> bool:
        start = self.place[index]
        end = min((self.place[one] for one in self.after[index]), default=start + 1) - 1
        made = self.made[index]
        if end <= start or not made:
            return False
        kept = sum(buffer.nbytes for buffer, _ in self._dying(index))
        if made <= kept:
            return False
        # What the last call that is passed does not outlive, the moved call does not see.
        passed = self.order[end]
        gone = sum(buffer.nbytes for buffer, _ in self._dying(passed))
        gone += sum(
            self._nbytes(buffer)
            for buffer in self.calls[passed].results
            if self._other_uses(buffer, passed) < end
        )
        needed = self.live[end] - gone - _workspace_nbytes(self.calls[passed]) + kept
        needed += _workspace_nbytes(self.calls[index])
        if needed > max(self.live):
            return False
        self.live[start : end + 1] = [
            *(nbytes - made + kept for nbytes in self.live[start + 1 : end + 1]),
            needed,
        ]
        self._move(start, end)
        return True

    def _hoist(self, index: int) -> bool:
        start = self.place[index]
        end = max((self.place[one] for one in self.before[index]), default=start - 1) + 1
        if end >= start or not self.may_die[index]:
            return False
        made, dying = self.made[index], self._dying(index)
        freed = sum(buffer.nbytes for buffer, other in dying if other < end)
        if self.together:
            freed = max(freed, self._share(index, end))
        if freed <= made:
            return False
        pushed = self.order[end]
        needed = self.live[end] - self.made[pushed] - _workspace_nbytes(self.calls[pushed]) + made
        needed += _workspace_nbytes(self.calls[index])
        if needed > max(self.live):
            return False
        shifted = [nbytes + made for nbytes in self.live[end:start]]
        for buffer, other in dying:
            for k in range(max(other + 1, end) - end, len(shifted)):
                shifted[k] -= buffer.nbytes
        self.live[end : start + 1] = [needed, *shifted]
        self._move(start, end)
        return True

    def _share(self, index: int, end: int) -> int:
        """Return bytes of arguments, each divided among its readers that come at `end` or later.

        Where all of them move there, one after the other, the argument dies.
        """
        total = 0
        for buffer in self.may_die[index]:
            if id(buffer) not in self.kept_until_the_end:
                later = sum(self.place[one] >= end for one in self.readers[id(buffer)])
                total += buffer.nbytes // later
        return total

    def _move(self, start: int, end: int) -> None:
        self.order.insert(end, self.order.pop(start))
        for place in range(min(start, end), max(start, end) + 1):
            self.place[self.order[place]] = place


def _workspace_nbytes(call: Call) -> int:
    return 0 if call.workspace is None else call.workspace.nbytes
