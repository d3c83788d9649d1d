# SPDX-License-Identifier: Apache-2.0
"""Writer of the elements that one GPU thread computes, with 16-byte loads and stores."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.sym import Analyzer, detect_linear_equation
from tvm.tirx.analysis import undefined_vars

from amp_ir.ir.tensor_layout import dtype_nbytes, physical_dtype
from amp_ir.loops import math as m
from amp_ir.loops.choices import Element, choosing
from amp_ir.loops.codegen.element_writer import ElementWriter
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer, narrow, widen
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cuda.launch import guarded, local_buffer
from amp_ir.loops.cuda.part_loads import VECTOR_NBYTES, Branch, Choice, vector
from amp_ir.loops.ir import Index, Value


@attrs.define
class ThreadWriter(ElementWriter):
    """Elements of `width` neighbouring positions, of which `lane` is one.

    Where the lanes of a load are contiguous and aligned, one load serves all, before the lanes; all
    stores follow them. So every load precedes every store, as in-place outputs need.
    """

    width: int = 1
    before: list[tirx.Stmt] = attrs.field(factory=list)
    after: list[tirx.Stmt] = attrs.field(factory=list)
    _registers: dict[int, list[tuple[Any, tirx.Var]]] = attrs.field(factory=dict)
    _analyzer: Analyzer = attrs.field(factory=Analyzer)
    _here: Any = None
    _branch: Branch | None = None
    _of_lane: set[tirx.Var] = attrs.field(factory=set)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Direct reads, `let` and choices of a part to this writer inside the block."""
        with super().active(), choosing(self._choose):
            yield

    def statements(self) -> list[tirx.Stmt]:
        """Return all statements: loads, lanes, stores."""
        lanes = list(self.body)
        if self.width > 1:
            loop = tirx.For(self.lane, 0, self.width, tirx.ForKind.UNROLLED, sequence(lanes))
            lanes = [loop] if lanes else []
        return [*self.allocations, *self.before, *lanes, *self.after]

    def let(self, element: Any) -> Any:
        """Name an expression: before the lanes, if it is the same for all of them."""
        if self.lane is None or not isinstance(element, tvm.ir.Expr):
            return super().let(element)
        if self._is_of_lane(element):
            named = super().let(element)
            self._of_lane.update(undefined_vars(named))
            return named
        lanes, self.body = self.body, self.before
        try:
            return super().let(element)
        finally:
            self.body = lanes

    def _is_of_lane(self, element: Any) -> bool:
        if not isinstance(element, tvm.ir.Expr):
            return False
        return any(v.same_as(self.lane) or v in self._of_lane for v in undefined_vars(element))

    def store(self, buffer: FlatBuffer, element: Any) -> None:
        """Store the element of a FULL value; `element` is in compute dtype."""
        if self.width == 1:
            self.body.append(buffer.store(self.here(), element))
            return
        dtype = physical_dtype(buffer.spec.dtype)
        register = local_buffer(self.width, dtype, "stored")
        self.before.append(tirx.AllocBuffer(register))
        kept = narrow(element, buffer.spec.dtype)
        self.body.append(tirx.BufferStore(register, kept, [self.lane]))
        base = self._base_of(self.here())
        assert base is not None, "a FULL value's own place is one vector by construction"
        self.after += _moves(register, buffer.buffer, self.width, dtype, None, base)

    def here(self) -> Any:
        """Return the flat position of the element in a FULL value; cached."""
        if self._here is None:
            self._here = self.position.flat()
        return self._here

    def _flat(self, shape: tuple[int, ...], index: Index) -> Any:
        if self.position.column is not None and math.prod(shape) == self.position.domain.size:
            here = self.position.index(shape)
            if all(a is b for a, b in zip(here, index, strict=True)):
                return self.here()
        return super()._flat(shape, index)

    def _load(self, value: Value, flat: Any) -> Any:
        buffer = self.buffers.get(id(value))
        if buffer is not None and self._branch is not None and value.size > 1:
            return self._load_of_part(self._branch, buffer, flat)
        base = self._base_of(flat) if buffer is not None and self.width > 1 else None
        if buffer is None or base is None:
            return super()._load(value, flat)
        register = self._register(buffer, base)
        return self.let(widen(tirx.BufferLoad(register, [self.lane]), value.dtype))

    def _register(self, buffer: FlatBuffer, base: Any) -> tirx.Var:
        """Return registers that hold `width` elements from `base` on, loaded once."""
        known = self._registers.setdefault(id(buffer), [])
        for other, register in known:
            if tvm_ffi.structural_equal(other, base):
                return register
        dtype = physical_dtype(buffer.spec.dtype)
        register = local_buffer(self.width, dtype, "loaded")
        known.append((base, register))
        self.before.append(tirx.AllocBuffer(register))
        self.before += _moves(buffer.buffer, register, self.width, dtype, base, None)
        return register

    def _base_of(self, flat: Any, granule: int | None = None) -> Any:
        """Return the position of lane 0 if lanes are contiguous there and aligned; else None.

        Aligned: it is a multiple of `granule`, of the width by default.
        """
        granule = self.width if granule is None else granule
        linear = self._linear(flat)
        if linear is None or not granule or not _is_number(linear[0], 1):
            return None
        steps = self._analyzer.modular_set(linear[1])
        aligned = int(steps.coeff) % granule == 0 and int(steps.base) % granule == 0
        return linear[1] if aligned else None

    def _linear(self, at: Any) -> tuple[Any, Any] | None:
        """Return how much `at` grows from lane to lane, and what it is for lane 0; or None."""
        if self.lane is None or not isinstance(at, tvm.ir.Expr):
            return None
        if any(variable in self._of_lane for variable in undefined_vars(at)):
            return None
        self._analyzer.bind(self.lane, ir.Range(0, self.width))
        parts = detect_linear_equation(self._analyzer.simplify(at), [self.lane])
        return (parts[0], parts[1]) if len(parts) == 2 else None

    def _choose(self, at: Any, ends: Sequence[int], element: Element) -> Any:
        """Return the element of the part that `at` is in; see `element_of_part`."""
        if len(ends) == 1:
            return element(0, at)
        choice = Choice(*self._along(at, ends), ends, self.width, self._branch)
        chosen = None
        for k in reversed(range(len(ends))):
            with self._in_branch(Branch(choice, k)):
                one = element(k, at - ends[k - 1] if k else at)
            if chosen is None or one is chosen:  # parts that are only loaded share the load
                chosen = one
                continue
            place = choice.first if choice.granule == self.width else at
            chosen = m.select(place >= tirx.const(ends[k], "int32"), chosen, one)
        self.before += choice.statements()
        return chosen

    def _along(self, at: Any, ends: Sequence[int]) -> tuple[Any, int]:
        """Return the position of lane 0, and how many lanes are in one part; or `at`, and 0."""
        linear = self._linear(at)
        if linear is not None and _is_number(linear[0], 0):
            return linear[1], self.width
        base = self._base_of(at)
        return (at, 0) if base is None else (base, math.gcd(self.width, *ends[:-1]))

    @contextlib.contextmanager
    def _in_branch(self, branch: Branch) -> Iterator[None]:
        """Load only what lanes of a part need; nothing outside may use what depends on that."""
        known = self._branch, self._elements, self.row_elements
        self._branch = branch
        self._elements, self.row_elements = dict(self._elements), dict(self.row_elements)
        try:
            yield
        finally:
            self._branch, self._elements, self.row_elements = known

    def _load_of_part(self, branch: Branch, buffer: FlatBuffer, flat: Any) -> Any:
        """Load the element of this lane in a part, with those of the lanes beside it."""
        base = self._base_of(flat, branch.granule)
        if base is None:
            return self._load_of_lane(branch, buffer, flat)
        load, stored = branch.load(buffer.buffer, base), buffer.spec.dtype
        if len(load.sources) == 1 and not load.names:
            self.allocations.append(tirx.AllocBuffer(load.register))
        if stored not in load.names:
            element = tirx.BufferLoad(load.register, [self.lane])
            load.names[stored] = self.let(widen(element, stored))
        return load.names[stored]

    def _load_of_lane(self, branch: Branch, buffer: FlatBuffer, flat: Any) -> Any:
        """Load the element of this lane, if it is in the part."""
        of_all = self.lane is None or branch.granule == self.width
        is_of_lane = self.lane is not None and (not of_all or self._is_of_lane(flat))
        word = local_buffer(1, physical_dtype(buffer.spec.dtype), "of_part")
        self.allocations.append(tirx.AllocBuffer(word))
        load = tirx.BufferStore(word, tirx.BufferLoad(buffer.buffer, [flat]), [0])
        statements = self.before if self.lane is not None and not is_of_lane else self.body
        statements += guarded(branch.holds(0 if of_all else self.lane), [load])
        if is_of_lane:
            self._of_lane.add(word)
        return self.let(widen(tirx.BufferLoad(word, [0]), buffer.spec.dtype))

    def _hold(self, element: Any, dtype: str) -> Any:
        # One word serves all lanes: each is done with it before the next one starts.
        word = local_buffer(1, dtype, "word")
        self.allocations.append(tirx.AllocBuffer(word))
        if self.lane is not None and self._is_of_lane(element):
            self._of_lane.add(word)
        self.body.append(tirx.BufferStore(word, element, [0]))
        return tirx.BufferLoad(word, [0])


def _moves(
    source: tirx.Var, target: tirx.Var, width: int, dtype: str, source_base: Any, target_base: Any
) -> list[tirx.Stmt]:
    """Copy `width` elements in vectors; a base of None is the start of a register array."""
    count = min(width, VECTOR_NBYTES // dtype_nbytes(dtype))
    moves: list[tirx.Stmt] = []
    for start in range(0, width, count):
        at_source = vector(0 if source_base is None else source_base, start, count)
        at_target = vector(0 if target_base is None else target_base, start, count)
        moves.append(tirx.BufferStore(target, tirx.BufferLoad(source, [at_source]), [at_target]))
    return moves


def _is_number(expr: Any, number: int) -> bool:
    return isinstance(expr, tirx.IntImm) and int(expr) == number
