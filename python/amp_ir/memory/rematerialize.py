# SPDX-License-Identifier: Apache-2.0
"""Compute values again instead of holding them, so that a step fits into less memory."""

from __future__ import annotations

import attrs
import numpy as np

from amp_ir.ir.external_call import SYMBOL as EXTERNAL
from amp_ir.ir.loop_call import SYMBOL as LOOP
from amp_ir.memory.buffers import Buffer, Call
from amp_ir.memory.liveness import Liveness
from amp_ir.memory.rerun_cost import rerun_milliseconds

# Each round computes the live intervals again; the loop ends when nothing is gained. The bound
# guards against surprises.
_MAX_ROUNDS = 400
_MAX_STUCK = 40
# The peak is lowered in stages, so that its calls are looked at before those below it; where a
# stage cannot be reached, a shorter one is tried.
_STAGES = (0.97, 0.995)
# How many calls one value may need; a longer chain is better cut in parts, from held values.
_MAX_CHAIN = 12

# The new value of a state input may wait in the arena, and be copied at the end, up to this size:
# running statistics of a batch normalization do, so that it can be run again.
_WAITING_BYTES = 1 << 16


class Rematerialization:
    """The rematerialization of a program: calls run again instead of their results being held.

    Before:  a = gelu(x); ...; g = backward(a)
    After:   a = gelu(x); ...; a2 = gelu(x); g = backward(a2)      # a is not held in between

    Of the values that are held over a call which needs too much and are not used by it, those go
    first whose second computation takes the least time for the bytes that it saves: casts and
    elementwise kernels before matmuls. A call is run again right before the first reader; what it
    reads must still be there, be kept for it, or be computed again too.

    Requires: the calls are in their final order.
    Ensures:  results are bit-identical: kernels are deterministic, random ops depend on their
              counter alone, and a call that reads a state input finds it as it was before the step.
              What is done does not depend on the bytes asked for, only how far it goes: what one
              request reaches, a request for that much reaches too.
    Source:   after Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", with a greedy
              choice by cost per byte.
    """

    def __init__(self, live: Liveness) -> None:
        self.live = live
        self._stage: int | None = None
        # Calls during which nothing can be given up; the others are still worth lowering.
        self._stuck: set[int] = set()

    def reach(self, arena_bytes: int) -> bool:
        """Go on until at most `arena_bytes` are alive at once; return whether they are."""
        self.live.find_destinations()
        for _ in range(_MAX_ROUNDS):
            if self.live.most <= arena_bytes:
                return True
            if not self.lower_peak():
                return False
        return False

    def lower_peak(self) -> bool:
        """Do what `lower` does if the highest call of all can be lowered; return whether it can."""
        return not self._stuck and self.lower() and not self._stuck

    def lower(self) -> bool:
        """Hold less during the highest call that can be lowered; return whether there was one.

        Requires: the live intervals have the destinations of now; they have, afterwards.
        """
        calls = self.live.program.calls
        while len(self._stuck) <= _MAX_STUCK:
            held = self.live.at
            held[np.array([id(call) in self._stuck for call in calls], dtype=bool)] = 0
            most = int(held.max(initial=0))
            if most == 0:
                return False
            if self._stage is not None and most > self._stage and self._round(self._stage):
                return True
            for share in _STAGES:
                self._stage = int(share * most)
                if self._round(self._stage):
                    return True
            self._stuck.add(id(calls[int(held.argmax())]))
        return False

    def _round(self, stage: int) -> bool:
        return _Round(self.live, stage, self._stuck).improve()


@attrs.define(eq=False)
class _Uses:
    """Where a buffer is written and read, as positions of calls at the start of a round."""

    buffer: Buffer
    written: int
    reads: list[int]
    ends: int


@attrs.define(eq=False)
class _Move:
    """One rematerialization: the results of a call are freed, and computed again for `reader`."""

    source: Call
    dropped: list[_Uses]
    reader: int
    chain: list[Call]
    extended: list[_Uses]
    milliseconds: float
    score: float = float("inf")


class _Round:
    """One round of the search: the live intervals at its start, and the moves made on them.

    A round makes several moves; each is weighed against what those before it leave.
    """

    def __init__(self, live: Liveness, arena_bytes: int, stuck: set[int]) -> None:
        self.live = live
        self.calls = live.program.calls
        self.budget = arena_bytes
        self.counts = np.array([id(call) not in stuck for call in self.calls], dtype=bool)
        self.held = self.live.at * self.counts
        self.excess = self._excess(self.held)
        self.touched: set[int] = set()
        self._uses: dict[int, _Uses] = {}
        self.inserted: dict[int, list[Call]] = {}
        self.replaced: list[tuple[Call, dict[int, Buffer]]] = []

    def improve(self) -> bool:
        """Make every move that gains; return whether there was one."""
        peak = int(self.held.argmax())
        moves = [move for move in self._moves(peak) if self._weigh(move) is not None]
        moves.sort(key=lambda move: move.score)
        made = 0
        for move in moves:
            if self.held.max() <= self.budget:
                break
            made += self._make(move)
        if made:
            self.live.splice(self.inserted)
            for call, replaced in self.replaced:
                self.live.replace_arguments(call, replaced)
            self.live.find_destinations()
        return made > 0

    def _moves(self, peak: int) -> list[_Move]:
        found = []
        for call in self.calls[:peak]:
            idle = [b for b in call.results if self.live.nbytes(b) and peak < self.live.ends(b)]
            # What is sent has its place in its bucket.
            idle = [b for b in idle if b.part_of is None]
            dropped = [self.uses(b) for b in idle if not self.live.is_held_at_end(b)]
            dropped = [one for one in dropped if peak not in one.reads]
            if dropped:
                reader = min(_next_read(one, peak) for one in dropped)
                found += self._alternatives(call, dropped, reader, peak)
        return found

    def uses(self, buffer: Buffer) -> _Uses:
        """Return where a buffer is used at the start of the round."""
        found = self._uses.get(id(buffer))
        if found is None:
            live = self.live
            found = _Uses(buffer, live.written(buffer), live.reads(buffer), live.ends(buffer))
            self._uses[id(buffer)] = found
        return found

    def _alternatives(
        self, call: Call, dropped: list[_Uses], reader: int, peak: int
    ) -> list[_Move]:
        """Return the moves to run `call` again before `reader`.

        One holds its arguments; another one, where that differs, runs more calls again.
        """
        found = []
        for keeps in (True, False):
            chain = _Chain(self, reader, peak, keeps)
            if chain.add(call):
                spent = sum(rerun_milliseconds(one) for one in chain.calls)
                extended = list(chain.extended.values())
                found.append(_Move(call, dropped, reader, chain.calls, extended, spent))
            if not chain.has_kept:
                break
        return found

    def _weigh(self, move: _Move) -> np.ndarray | None:
        """Return the bytes held after the move, and its score; None where it gains nothing.

        What counts is the excess over the budget, summed over all calls.
        """
        after = self.held.copy()
        for one in move.dropped:
            last = max([k for k in one.reads if k < move.reader], default=one.written)
            after[last + 1 : move.reader] -= one.buffer.nbytes
        for one in move.extended:
            after[one.ends + 1 : move.reader] += one.buffer.nbytes
        kept = {id(one.buffer) for one in move.dropped}
        besides = sum(
            buffer.nbytes for call in move.chain for buffer in call.results
            if id(buffer) not in kept
        )  # fmt: skip
        workspace = max((one.workspace_nbytes for one in move.chain), default=0)
        # While the chain runs, before its reader: the extended arguments are held, too.
        needed = int(after[move.reader]) + besides + workspace
        needed += sum(one.buffer.nbytes for one in move.extended)
        if needed > max(self.budget, int(self.held.max()) - 1):
            return None
        gain = self.excess - self._excess(after) - max(0, needed - self.budget)
        if gain <= 0:
            return None
        move.score = move.milliseconds / gain
        return after

    def _excess(self, held: np.ndarray) -> int:
        return int(np.maximum((held - self.budget) * self.counts, 0).sum())

    def _make(self, move: _Move) -> bool:
        buffers = [buffer for call in move.chain for buffer in [*call.reads, *call.results]]
        keys = {id(buffer) for buffer in buffers if id(buffer) in self.live.writer}
        if keys & self.touched:
            return False
        after = self._weigh(move)
        if after is None:
            return False
        self.held, self.excess = after, self._excess(after)
        self.touched |= keys
        replaced: dict[int, Buffer] = {}
        again = [_run_again(call, replaced) for call in move.chain]
        self.inserted.setdefault(move.reader, []).extend(again)
        for one in move.dropped:
            new = {id(one.buffer): replaced[id(one.buffer)]}
            late = [k for k in one.reads if k >= move.reader]
            self.replaced += [(self.calls[k], new) for k in late]
        return True


class _Chain:
    """The calls to run again before `reader`, arguments first, and the values kept for them."""

    def __init__(self, round_: _Round, reader: int, peak: int, keeps: bool) -> None:
        self.round = round_
        self.reader = reader
        self.peak = peak
        self.keeps = keeps
        self.calls: list[Call] = []
        self.extended: dict[int, _Uses] = {}
        # Whether the chain is another one where it does not prefer held arguments.
        self.has_kept = False

    def add(self, call: Call) -> bool:
        """Put a call after what it reads; return whether everything it reads can be had."""
        if any(call is one for one in self.calls):
            return True
        if call.collective:
            return False  # the other ranks would not
        if call.symbol == EXTERNAL:
            return False  # nobody promises that it returns the same again
        if call.symbol == LOOP:
            return False  # it costs as much as all of its steps
        if len(self.calls) >= _MAX_CHAIN:
            return False
        if not all(self._provide(buffer) for buffer in call.reads):
            return False
        self.calls.append(call)
        return True

    def _provide(self, buffer: Buffer) -> bool:
        if buffer.constant is not None:
            return True
        known = self.round.uses(buffer)
        if known.written < 0:
            # A state input: as it was before the step, unless it has been overwritten by then. A
            # small one is not, if it is read here: its new value waits for the end of the step.
            update = self.round.live.overwrites.since.get(id(buffer), self.reader)
            return update >= self.reader or buffer.nbytes <= _WAITING_BYTES
        if known.ends >= self.reader:
            return True
        costs_nothing = known.ends > self.peak or not self.round.live.nbytes(buffer)
        if costs_nothing or self.keeps:
            self.has_kept |= not costs_nothing
            if not self.round.live.nbytes(buffer):
                return False  # another value is written at its address
            self.extended[id(buffer)] = known
            return True
        return self.add(self.round.live.writer[id(buffer)])


def _next_read(one: _Uses, peak: int) -> int:
    return min(k for k in one.reads if k > peak)


def _run_again(call: Call, replaced: dict[int, Buffer]) -> Call:
    """Run a call again on what the chain before it made, with results of its own."""
    arguments = [replaced.get(id(one), one) for one in call.arguments]
    results = []
    for buffer in call.results:
        again = Buffer(buffer.dtype, buffer.size, f"{buffer.name}'", buffer.op, span=buffer.span)
        replaced[id(buffer)] = again
        results.append(again)
    workspace = None
    if call.workspace is not None:
        workspace = attrs.evolve(call.workspace, name=f"{call.workspace.name}'")
    return Call(call.expr, call.function, arguments, results, workspace, is_rerun=True)
