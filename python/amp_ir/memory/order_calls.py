# SPDX-License-Identifier: Apache-2.0
"""Move calls to where the least memory is held."""

from __future__ import annotations

from amp_ir.memory.buffers import Buffer, Call
from amp_ir.memory.liveness import Liveness
from amp_ir.memory.order_collectives import collective_order

# Each round enables the next one's moves. After two or three, some calls move back and forth.
_MAX_ROUNDS = 8


def order_calls(live: Liveness, *, together: bool = False) -> None:
    """Reorder the calls so that less memory is held.

    Before:  a = big(x); ...; b = use(a)             g = gradient(); ...; p = update(p, g)
    After:   ...; a = big(x); b = use(a)             g = gradient(); p = update(p, g); ...

    A call whose results are larger than what it would keep alive moves down to their first reader;
    one that frees more than it makes moves up to its last argument. A move lowers the bytes held
    during every call that it passes, and is not made where the moved call itself would need more
    than the peak. `together` also moves up calls that free an argument only if its other readers
    move, too: what is large and read twice then goes before the next such thing comes. For most
    steps that is not better, so use it where every byte counts.

    Requires: nothing is placed.
    Ensures:  values are written before they are read; a call that reads the old value of a state
              input runs before the call that makes the new one; the peak does not grow.
    """
    most = live.most
    moves = _Moves(live, together=together)
    left = _MAX_ROUNDS
    left_at: dict[tuple[int, ...], int] = {}
    while left and moves.round():
        left -= 1
        order = tuple(map(id, live.program.calls))
        if order in left_at:
            # A round depends on the order alone: of those that repeat, only a part is left.
            left %= left_at[order] - left
        left_at[order] = left
    live.find_destinations()
    if live.most > most:
        moves.undo()
        live.find_destinations()


class _Moves:
    """The order of calls under construction, and the dependencies between them.

    Bytes that a result takes over from an argument are counted twice here: no move depends on them.
    """

    def __init__(self, live: Liveness, *, together: bool) -> None:
        self.live = live
        self.calls = live.program.calls
        self.together = together
        self.made_moves: list[tuple[int, int]] = []
        self.made = {id(c): sum(map(live.nbytes, c.results)) for c in self.calls}
        self.may_die = {id(c): self._read_from_arena(c) for c in self.calls}
        self.before: dict[int, dict[int, Call]] = {}
        self.after: dict[int, dict[int, Call]] = {id(call): {} for call in self.calls}
        self._find_dependencies()

    def _find_dependencies(self) -> None:
        """Find, for each call, the calls that must come before it and those that come after."""
        live = self.live
        for call in self.calls:
            writers = [live.writer[id(b)] for b in call.reads if id(b) in live.writer]
            self.before[id(call)] = {id(one): one for one in writers}
        for key, update in live.overwrites.since.items():
            # Where a reader already comes later, the planner copies; that need not get better.
            for reader in live.readers.get(key, ()):
                if live.position[id(reader)] < update:
                    self.before[id(self.calls[update])][id(reader)] = reader
        self._keep_collectives()
        for call in self.calls:
            for key in self.before[id(call)]:
                self.after[key][id(call)] = call

    def _keep_collectives(self) -> None:
        """Keep starts in their order, and every call that comes after a wait after it."""
        for key, needed in collective_order(self.live).items():
            self.before[key].update(needed)
        waits: dict[int, Call] = {}
        for call in self.calls:
            if call.collective == "wait":
                waits[id(call)] = call
            else:
                self.before[id(call)].update(waits)

    def round(self) -> bool:
        """Try every call once in each direction; return whether anything moved."""
        downwards = [self._sink(start) for start in reversed(range(len(self.calls)))]
        upwards = [self._hoist(start) for start in range(len(self.calls))]
        return any(downwards) or any(upwards)

    def undo(self) -> None:
        """Move every call back."""
        for start, end in reversed(self.made_moves):
            self.live.move(end, start)

    def _read_from_arena(self, call: Call) -> list[Buffer]:
        """Return what another call makes in the arena and this one reads, each once."""
        reads = {id(buffer): buffer for buffer in call.reads}
        return [buffer for buffer in reads.values() if self.live.nbytes(buffer)]

    def _other_uses(self, buffer: Buffer, call: Call) -> int:
        """Return the last position where another call writes or reads the buffer; -1 for none."""
        if self.live.is_held_at_end(buffer):
            return len(self.calls)
        is_written = self.live.writer[id(buffer)] is not call
        written = self.live.written(buffer) if is_written else -1
        return max(written, self.live.last_read(buffer, besides=call))

    def _dying(self, call: Call, position: int) -> list[tuple[Buffer, int]]:
        """Return arena arguments that nothing uses after the call, with their use before it."""
        uses = ((buffer, self._other_uses(buffer, call)) for buffer in self.may_die[id(call)])
        return [(buffer, other) for buffer, other in uses if other < position]

    def _sink(self, start: int) -> bool:
        call, position = self.calls[start], self.live.position
        if call.collective == "start":
            return False
        end = min((position[one] for one in self.after[id(call)]), default=start + 1) - 1
        made = self.made[id(call)]
        if end <= start or not made:
            return False
        kept = sum(buffer.nbytes for buffer, _ in self._dying(call, start))
        if made <= kept:
            return False
        # What the last call that is passed does not outlive, the moved call does not see.
        passed = self.calls[end]
        gone = sum(buffer.nbytes for buffer, _ in self._dying(passed, end))
        gone += sum(
            self.live.nbytes(buffer)
            for buffer in passed.results
            if self._other_uses(buffer, passed) < end
        )
        needed = self.live.gross[end] - gone - passed.workspace_nbytes + kept
        return self._move(start, end, needed + call.workspace_nbytes)

    def _hoist(self, start: int) -> bool:
        call, position = self.calls[start], self.live.position
        if call.collective == "wait":
            return False
        end = max((position[one] for one in self.before[id(call)]), default=start - 1) + 1
        if end >= start or not self.may_die[id(call)]:
            return False
        made = self.made[id(call)]
        freed = sum(b.nbytes for b, other in self._dying(call, start) if other < end)
        if self.together:
            freed = max(freed, self._share(call, end))
        if freed <= made:
            return False
        pushed = self.calls[end]
        needed = self.live.gross[end] - self.made[id(pushed)] - pushed.workspace_nbytes + made
        return self._move(start, end, needed + call.workspace_nbytes)

    def _move(self, start: int, end: int, needed: int) -> bool:
        """Move a call, unless it would need more than the peak there."""
        if needed > self.live.gross.max():
            return False
        self.live.move(start, end)
        self.made_moves.append((start, end))
        return True

    def _share(self, call: Call, end: int) -> int:
        """Return bytes of arguments, each divided among its readers that come at `end` or later.

        Where all of them move there, one after the other, the argument dies.
        """
        total = 0
        for buffer in self.may_die[id(call)]:
            if not self.live.is_held_at_end(buffer):
                later = sum(position >= end for position in self.live.reads(buffer))
                total += buffer.nbytes // later
        return total
