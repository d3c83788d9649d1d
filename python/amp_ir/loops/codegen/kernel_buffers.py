# SPDX-License-Identifier: Apache-2.0
"""Flat buffers of a physical dtype: the layout of values in the memory of a kernel.

TVM's bfloat16 legalisation converts a cast of a let-bound bfloat16 load as if it were an integer
(0.27) and turns some NaN payloads into infinities, and bool buffers break its vectoriser. So
kernels see bfloat16 as uint16 and bool as uint8, and convert with the integer arithmetic below.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from tvm import tirx

from amp_ir.ir.tensor_layout import physical_dtype
from amp_ir.loops.body_context import let
from amp_ir.loops.elements import device_bfloat16_bits
from amp_ir.loops.ir import (
    Buffer,
    Constant,
    Index,
    Opaque,
    Pointwise,
    TensorSpec,
    Value,
    compute_dtype,
)

# "global" on a CPU: only then does TVM keep it on the stack, where LLVM makes it registers; "local"
# memory costs a call of its allocator each time there.
_scope: contextvars.ContextVar[str] = contextvars.ContextVar("scope", default="global")


@contextlib.contextmanager
def memory_scope(scope: str) -> Iterator[None]:
    """Make `task_buffer` allocate memory of this TVM scope inside the block."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


def task_buffer(count: int, dtype: str, name: str) -> tirx.Var:
    """Declare task-private memory: `count` elements of `dtype`, to allocate with `AllocBuffer`."""
    return tirx.decl_buffer((count,), dtype, name, scope=_scope.get())


def widen(element: Any, dtype: str) -> Any:
    """Convert a stored element of `dtype`, as loaded, to its compute dtype."""
    if dtype == "bfloat16":
        bits = tirx.shift_left(tirx.Cast("uint32", element), tirx.const(16, "uint32"))
        return tirx.reinterpret("float32", bits)
    if dtype == "bool":
        return tirx.NE(element, tirx.const(0, "uint8"))
    if dtype == "float16":
        return tirx.Cast("float32", element)
    return element


def narrow(element: Any, dtype: str) -> Any:
    """Round an element in compute dtype to nearest even, as it is stored for `dtype`."""
    if dtype == "bfloat16":
        return _bfloat16_bits(element)
    if dtype == "bool":
        one, zero = tirx.const(1, "uint8"), tirx.const(0, "uint8")
        return tirx.Select(element, one, zero)
    if dtype == "float16":
        return tirx.Cast("float16", element)
    return element


def _bfloat16_bits(element: Any) -> Any:
    """Convert float32 to bfloat16 bits: add half of the last place, ties to even; keep NaN."""
    if isinstance(element, tirx.FloatImm):
        # Bits of a literal are known here, and CUDA has no address of a literal to read them at.
        rounded = torch.tensor(float(element.value)).to(torch.bfloat16)
        return tirx.const(int(rounded.view(torch.int16)) & 0xFFFF, "uint16")
    of_device = device_bfloat16_bits(element)
    if of_device is not None:
        return of_device
    bits = tirx.reinterpret("uint32", element)
    sixteen = tirx.const(16, "uint32")
    odd = tirx.bitwise_and(tirx.shift_right(bits, sixteen), tirx.const(1, "uint32"))
    rounded = tirx.shift_right(bits + (odd + tirx.const(0x7FFF, "uint32")), sixteen)
    quiet = tirx.bitwise_or(tirx.shift_right(bits, sixteen), tirx.const(0x40, "uint32"))
    exponent = tirx.bitwise_and(bits, tirx.const(0x7FFFFFFF, "uint32"))
    is_nan = exponent > tirx.const(0x7F800000, "uint32")
    return tirx.Cast("uint16", tirx.Select(is_nan, quiet, rounded))


def round_to(element: Any, dtype: str) -> Any:
    """Round `element` to what `dtype` can hold; the result stays in its compute dtype."""
    return widen(narrow(element, dtype), dtype) if compute_dtype(dtype) != dtype else element


def stored_element(value: Value, index: Index) -> Any:
    """Return an element with the rounding of its dtype, as if it had been stored and loaded.

    For comparisons: one side may come from memory and the other be recomputed unrounded. Otherwise
    no element would equal its maximum, and what is infinite in float16 would be finite.
    """
    element = value[index]
    # A low value that is only widened or moved is as low as before.
    while isinstance(value, Pointwise) and value.is_view and len(value.reads) == 1:
        value = value.reads[0].value
    if isinstance(value, (Buffer, Constant, Opaque)):
        return element
    return round_to(let(element), value.dtype)


@attrs.frozen(eq=False)
class FlatBuffer:
    """A value's memory inside a kernel, indexed by flat position."""

    spec: TensorSpec
    buffer: tirx.Var

    @classmethod
    def declare(cls, spec: TensorSpec, name: str) -> FlatBuffer:
        """Declare a kernel parameter for a value of `spec`."""
        size = max(spec.size, 1)
        return cls(spec, tirx.decl_buffer((size,), physical_dtype(spec.dtype), name))

    def load(self, flat: Any) -> Any:
        """Load the element at a flat position, in compute dtype."""
        return widen(tirx.BufferLoad(self.buffer, [flat]), self.spec.dtype)

    def store(self, flat: Any, element: Any) -> tirx.Stmt:
        """Store an element, given in compute dtype, at a flat position."""
        return tirx.BufferStore(self.buffer, narrow(element, self.spec.dtype), [flat])
