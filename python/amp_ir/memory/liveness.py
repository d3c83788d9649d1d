# SPDX-License-Identifier: Apache-2.0
"""Hold the live interval of every value of a step, and the arena bytes alive at each call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from amp_ir.ir.step_module import OutputSpec
from amp_ir.memory.buffers import Buffer, BufferizedStep, Call
from amp_ir.memory.overwritten_state import Overwrites, overwrites_of


class Liveness:
    """The calls that write and read each value, its arena bytes, and their sum at each call.

    Computed once a step and updated as calls move. It owns the order: `program.calls` and the
    arguments of a call change only by its methods.

    Values written straight to where they belong (a state input, a result) take no arena bytes. A
    result that may take over the bytes of a dying argument counts once.

    Invariants, after every method; positions are those of calls in `program.calls`:
      - `position[id(call)]` is the position of the call, for each call of the program alone;
      - `writer[id(buffer)]` is the call with that result, `readers[id(buffer)]` the calls with that
        argument, each once;
      - a value is alive from its writer to its last reader, or past the end if it is a result;
      - `gross[k]` is the sum of the bytes of the values alive at call k and of its workspace;
      - `at[k]` is `gross[k]` less the bytes that results of call k take over.
    Whether a value is in the arena, and so its bytes, is as `find_destinations` last found it.
    """

    def __init__(self, program: BufferizedStep, outputs: Sequence[OutputSpec]) -> None:
        self.program = program
        self.outputs = outputs
        self.writer: dict[int, Call] = {}
        self.readers: dict[int, list[Call]] = {}
        self.position: dict[int, int] = {}
        self.overwrites = Overwrites()
        self._held = {id(buffer) for buffer in program.results}
        self._nbytes: dict[int, int] = {}
        # Bytes of the values whose first or last use is call k; those of results of the step end
        # past the last call.
        self._rows = np.zeros((4, 1), dtype=np.int64)
        self._begins, self._ends, self._workspace, self._taken = self._rows
        # Calls whose entry of `_taken` is not computed.
        self._stale: dict[int, Call] = {}
        self.gross = self._workspace[:-1]
        calls, program.calls[:] = list(program.calls), []
        self.splice({0: calls})
        self.find_destinations()

    @property
    def at(self) -> np.ndarray:
        """Return the bytes alive at each call; i64[calls]."""
        for call in self._stale.values():
            taken = sum(old.nbytes for _, old in self.taken_over(call))
            self._taken[self.position[id(call)]] = taken
        self._stale.clear()
        return self.gross - self._taken[:-1]

    @property
    def most(self) -> int:
        """Return the largest number of bytes alive at once."""
        return int(self.at.max(initial=0))

    def nbytes(self, buffer: Buffer) -> int:
        """Return the bytes that the buffer takes in the arena."""
        return self._nbytes.get(id(buffer), 0)

    def reads(self, buffer: Buffer) -> list[int]:
        """Return the positions of the calls that read the buffer, in order."""
        return sorted(self.position[id(call)] for call in self.readers.get(id(buffer), ()))

    def written(self, buffer: Buffer) -> int:
        """Return the position of the call that writes the buffer; -1 for none."""
        writer = self.writer.get(id(buffer))
        return -1 if writer is None else self.position[id(writer)]

    def last_read(self, buffer: Buffer, besides: Call | None = None) -> int:
        """Return the last position at which a call reads it, other than `besides`; -1 for none."""
        readers = self.readers.get(id(buffer), ())
        if besides is not None:
            readers = [one for one in readers if one is not besides]
        # Asked a hundred thousand times for a deep model: the loop runs in C.
        return max(map(self.position.__getitem__, map(id, readers)), default=-1)

    def ends(self, buffer: Buffer) -> int:
        """Return the last position at which it is alive; len(calls) for a result of the step."""
        if id(buffer) in self._held:
            return len(self.program.calls)
        return max(self.written(buffer), self.last_read(buffer))

    def is_held_at_end(self, buffer: Buffer) -> bool:
        """Return whether it is a result of the step."""
        return id(buffer) in self._held

    def taken_over(self, call: Call) -> list[tuple[Buffer, Buffer]]:
        """Return the results of the call that take over the bytes of an argument, as (new, old)."""
        taken: dict[int, tuple[Buffer, Buffer]] = {}
        olds: set[int] = set()
        for output, source in call.inplace_pairs():
            old, new = call.arguments[source], call.results[output]
            if not isinstance(old, Buffer) or output in taken or id(old) in olds:
                continue
            if not self._is_in_arena(old) or not self._is_in_arena(new):
                continue
            if old.nbytes == new.nbytes and self.ends(old) == self.position[id(call)]:
                taken[output] = new, old
                olds.add(id(old))
        return list(taken.values())

    def move(self, start: int, end: int) -> None:
        """Move the call at position `start` to position `end`."""
        calls = self.program.calls
        call = calls[start]
        touched = _each([*call.reads, *call.results])
        self._count(touched, -1)
        calls.insert(end, calls.pop(start))
        moved = self._rows[:, start].copy()
        if start < end:
            self._rows[:, start:end] = self._rows[:, start + 1 : end + 1]
        else:
            self._rows[:, end + 1 : start + 1] = self._rows[:, end:start]
        self._rows[:, end] = moved
        for place in range(min(start, end), max(start, end) + 1):
            self.position[id(calls[place])] = place
        self._count(touched, 1)
        self._sum()

    def splice(self, inserted: Mapping[int, Sequence[Call]], removed: Iterable[int] = ()) -> None:
        """Remove calls by position, and insert calls before those at the positions of `inserted`.

        A buffer that a removed call wrote may be a result of an inserted one.
        """
        gone = [self.program.calls[position] for position in sorted(set(removed))]
        new = [call for position in sorted(inserted) for call in inserted[position]]
        touched = _each(b for call in [*gone, *new] for b in [*call.reads, *call.results])
        self._count([one for one in touched if id(one) in self.writer], -1)
        for call in gone:
            self._forget(call)
        calls: list[Call] = []
        kept: list[int] = []
        for position, call in enumerate(self.program.calls):
            calls += inserted.get(position, ())
            if id(call) in self.position:
                calls.append(call)
                kept.append(position)
        calls += inserted.get(len(self.program.calls), ())
        self._respace(calls, kept)
        self.program.calls[:] = calls
        for call in new:
            self._learn(call)
        for buffer in (one for call in new for one in call.results):
            self._nbytes[id(buffer)] = buffer.nbytes if self._is_in_arena(buffer) else 0
        self._count([one for one in touched if id(one) in self.writer], 1)
        self._sum()

    def replace_arguments(self, call: Call, replaced: Mapping[int, Buffer]) -> None:
        """Let the call read other buffers: `replaced` has them by the id of the present ones."""
        touched = _each([*call.reads, *replaced.values()])
        self._count(touched, -1)
        for buffer in _each(call.reads):
            self.readers[id(buffer)].remove(call)
        call.arguments = [replaced.get(id(one), one) for one in call.arguments]
        for buffer in _each(call.reads):
            self.readers.setdefault(id(buffer), []).append(call)
        self._count(touched, 1)
        self._sum()

    def find_destinations(self) -> None:
        """Find again which values the present order allows outside of the arena."""
        self.overwrites = overwrites_of(self)
        changed = []
        for call in self.program.calls:
            for buffer in call.results:
                nbytes = buffer.nbytes if self._is_in_arena(buffer) else 0
                if nbytes != self._nbytes[id(buffer)]:
                    changed.append((buffer, nbytes))
        for buffer, nbytes in changed:
            self._count([buffer], -1)
            self._nbytes[id(buffer)] = nbytes
            self._count([buffer], 1)
        if changed:
            self._sum()

    def _is_in_arena(self, buffer: Buffer) -> bool:
        return buffer.is_in_arena and id(buffer) not in self.overwrites.output_of

    def _count(self, buffers: Iterable[Buffer], sign: int) -> None:
        """Add the bytes of values to their first and last call, or subtract them."""
        for buffer in buffers:
            writer = self.writer.get(id(buffer))
            if writer is None:
                continue  # an input, whose bytes no result takes over
            self._stale[id(writer)] = writer
            for call in self.readers.get(id(buffer), ()):
                self._stale[id(call)] = call
            nbytes = self._nbytes[id(buffer)]
            if nbytes:
                self._begins[self.position[id(writer)]] += sign * nbytes
                self._ends[self.ends(buffer)] += sign * nbytes

    def _sum(self) -> None:
        changes = self._begins[:-1].copy()
        changes[1:] -= self._ends[:-2]
        self.gross = changes.cumsum() + self._workspace[:-1]

    def _respace(self, calls: Sequence[Call], kept: Sequence[int]) -> None:
        """Give the arrays a place for each of `calls`; `kept` are the old positions that stay."""
        places = [k for k, call in enumerate(calls) if id(call) in self.position]
        old = [*kept, len(self.program.calls)]
        spaced = np.zeros((4, len(calls) + 1), dtype=np.int64)
        spaced[:, [*places, len(calls)]] = self._rows[:, old]
        self._rows = spaced
        self._begins, self._ends, self._workspace, self._taken = spaced
        for place, call in enumerate(calls):
            self.position[id(call)] = place

    def _learn(self, call: Call) -> None:
        for buffer in _each(call.reads):
            self.readers.setdefault(id(buffer), []).append(call)
        for buffer in call.results:
            self.writer[id(buffer)] = call
        if call.workspace is not None:
            self._workspace[self.position[id(call)]] = call.workspace.nbytes
        self._stale[id(call)] = call

    def _forget(self, call: Call) -> None:
        for buffer in _each(call.reads):
            self.readers[id(buffer)].remove(call)
        for buffer in call.results:
            del self.writer[id(buffer)]
        del self.position[id(call)]
        self._stale.pop(id(call), None)


def _each(buffers: Iterable[Buffer]) -> list[Buffer]:
    return list({id(buffer): buffer for buffer in buffers}.values())
