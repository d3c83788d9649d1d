# SPDX-License-Identifier: Apache-2.0
"""The loads of a concatenation's element by a thread: of the part that it is in, and no other.

Loads from every part, of which a `Select` keeps one, would be as many scalar loads for an element
as there are parts: a position in another part is clamped, so that lanes are not contiguous. Here
the parts' loads are one: a choice of an address, and registers that all parts share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import tvm_ffi
from tvm import tirx

from amp_ir.ir.tensor_layout import dtype_nbytes
from amp_ir.loops.cuda.launch import guarded, local_buffer, unrolled

# What one load or store instruction of a GPU moves at most.
VECTOR_NBYTES = 16


@attrs.define(eq=False)
class SharedLoad:
    """One load that several parts share: where each of them has the elements that lane 0 begins."""

    register: tirx.Var
    dtype: str
    sources: list[tuple[Branch, tirx.Var, Any]] = attrs.field(factory=list)
    names: dict[str, Any] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Choice:
    """A choice between parts that end at `ends`, for `width` lanes, inside of the part `outer`.

    Each run of `granule` lanes is in one part, and `first` is the position of lane 0; 0: only each
    lane can tell, by its position `first`.
    """

    first: Any
    granule: int
    ends: Sequence[int]
    width: int
    outer: Branch | None
    loads: list[SharedLoad] = attrs.field(factory=list)

    def at(self, lane: Any) -> Any:
        """Return the position of a lane that begins a run, or of this one."""
        is_first = not self.granule or (isinstance(lane, int) and lane == 0)
        return self.first if is_first else self.first + lane

    def statements(self) -> list[tirx.Stmt]:
        """Return all loads that are shared."""
        return [statement for load in self.loads for statement in self._statements_of(load)]

    def _statements_of(self, load: SharedLoad) -> list[tirx.Stmt]:
        granule = min(branch.granule for branch, _, _ in load.sources)
        count = min(granule, VECTOR_NBYTES // dtype_nbytes(load.dtype))

        def run(number: Any) -> list[tirx.Stmt]:
            lane = number * granule if granule < self.width else 0
            tests = [] if self.outer is None else [self.outer.holds(lane)]
            if len(load.sources) < len(self.ends):
                tests.append(tirx.any(*(branch.is_here(lane) for branch, _, _ in load.sources)))
            moves = [self._move(load, lane, start, count) for start in range(0, granule, count)]
            return guarded(tirx.all(*tests) if tests else None, moves)

        return unrolled(self.width // granule, "run", run)

    def _move(self, load: SharedLoad, lane: Any, start: int, count: int) -> tirx.Stmt:
        moved: Any = None
        for branch, buffer, base in sorted(load.sources, key=lambda one: -one[0].number):
            one = tirx.BufferLoad(buffer, [vector(base + lane, start, count)])
            is_before_end = self.at(lane) < tirx.const(self.ends[branch.number], "int32")
            moved = one if moved is None else tirx.if_then_else(is_before_end, one, moved)
        return tirx.BufferStore(load.register, moved, [vector(lane, start, count)])


@attrs.define(eq=False)
class Branch:
    """The part `number` of a choice: only its own lanes may load what is read for it."""

    choice: Choice
    number: int
    _loaded: list[tuple[tirx.Var, Any, SharedLoad]] = attrs.field(factory=list)

    @property
    def granule(self) -> int:
        """Return how many neighbouring lanes load or do not load together; 0: each by itself."""
        own, outer = self.choice.granule, self.choice.outer
        if outer is None:
            return own
        return math.gcd(own, outer.granule) if own and outer.granule else 0

    def holds(self, lane: Any) -> Any:
        """Return whether the run that a lane begins, or this lane, is in the part."""
        outer = self.choice.outer
        is_here = self.is_here(lane)
        return is_here if outer is None else tirx.all(outer.holds(lane), is_here)

    def is_here(self, lane: Any) -> Any:
        """Return whether it is in the part, if it is in the one around the choice."""
        at, ends = self.choice.at(lane), self.choice.ends
        tests = [at >= tirx.const(ends[self.number - 1], "int32")] if self.number else []
        if self.number + 1 < len(ends):
            tests.append(at < tirx.const(ends[self.number], "int32"))
        return tirx.all(*tests)

    def load(self, buffer: tirx.Var, base: Any) -> SharedLoad:
        """Return the load of the elements that lane 0 begins at `base`."""
        for other, at, load in self._loaded:
            if other is buffer and tvm_ffi.structural_equal(at, base):
                return load
        dtype = str(buffer.ty.dtype)
        taken = {id(load) for _, _, load in self._loaded}
        free = [one for one in self.choice.loads if one.dtype == dtype and id(one) not in taken]
        if free:
            load = free[0]
        else:
            load = SharedLoad(local_buffer(self.choice.width, dtype, "of_part"), dtype)
            self.choice.loads.append(load)
        load.sources.append((self, buffer, base))
        self._loaded.append((buffer, base, load))
        return load


def vector(base: Any, start: int, count: int) -> Any:
    """Return the index of `count` neighbours, the first one `start` behind `base`."""
    at = base + start if start else base
    at = tirx.const(at, "int32") if isinstance(at, int) else at
    return tirx.Ramp(at, 1, count) if count > 1 else at
