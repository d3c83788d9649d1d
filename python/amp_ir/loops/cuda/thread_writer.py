# SPDX-License-Identifier: Apache-2.0
"""Writer of the elements that one GPU thread computes, with 16-byte loads and stores."""

from __future__ import annotations

import math
from typing import Any

import attrs
import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.sym import Analyzer, detect_linear_equation
from tvm.tirx.analysis import undefined_vars

from amp_ir.ir.tensor_layout import dtype_nbytes, physical_dtype
from amp_ir.loops.codegen.element_writer import ElementWriter
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer, narrow, widen
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cuda.launch import local_buffer
from amp_ir.loops.ir import Index, Value

# What one load or store instruction of a GPU moves at most.
VECTOR_NBYTES = 16


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
    _of_lane: set[tirx.Var] = attrs.field(factory=set)

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

    def _base_of(self, flat: Any) -> Any:
        """Return the position of lane 0 if lanes are contiguous there and aligned; else None."""
        if self.lane is None or not isinstance(flat, tvm.ir.Expr):
            return None
        if any(variable in self._of_lane for variable in undefined_vars(flat)):
            return None
        self._analyzer.bind(self.lane, ir.Range(0, self.width))
        parts = detect_linear_equation(self._analyzer.simplify(flat), [self.lane])
        if len(parts) != 2 or not _is_number(parts[0], 1):
            return None
        base = parts[1]
        steps = self._analyzer.modular_set(base)
        aligned = int(steps.coeff) % self.width == 0 and int(steps.base) % self.width == 0
        return base if aligned else None

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
        at_source = _vector(source_base, start, count)
        at_target = _vector(target_base, start, count)
        moves.append(tirx.BufferStore(target, tirx.BufferLoad(source, [at_source]), [at_target]))
    return moves


def _vector(base: Any, start: int, count: int) -> Any:
    at = tirx.const(start, "int32") if base is None else base + start if start else base
    return tirx.Ramp(at, 1, count) if count > 1 else at


def _is_number(expr: Any, number: int) -> bool:
    return isinstance(expr, tirx.IntImm) and int(expr) == number
