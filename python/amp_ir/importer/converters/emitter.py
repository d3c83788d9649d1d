# SPDX-License-Identifier: Apache-2.0
"""The emitter: a converter adds ops to `main` with it, one FX node at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
import tvm
from tvm import relax

from amp_ir.dialect import call_op
from amp_ir.importer.converters.promotion import (
    DTYPE_NAMES,
    LOW_DTYPES,
    Operand,
    Scalar,
    dtype_of,
    is_float,
    is_scalar,
    promoted_dtype,
    shape_of,
)
from amp_ir.importer.converters.registry import ConversionError

RANDOM_STATE = "random_state"


class Emitter:
    """A builder that adds Relax ops to the function under construction.

    `state_words` is the extent of the random state: 2, or 3 in the body of a loop.
    Every emitted op carries `span`, the location of the FX node being converted. `result` is that
    node's `meta["val"]`: one fake tensor, or a tuple of them.
    """

    def __init__(self, builder: relax.BlockBuilder, *, state_words: int = 2) -> None:
        self._builder = builder
        self._state_words = state_words
        self._constants: dict[tuple[type, Any, str], relax.Expr] = {}
        self._fills: dict[relax.Expr, Scalar] = {}
        self._reshaped: dict[relax.Expr, relax.Expr] = {}
        self._reshapes: dict[tuple[relax.Expr, tuple[int, ...]], relax.Expr] = {}
        self._cast: dict[tuple[relax.Expr, str], relax.Expr] = {}
        self._permuted: dict[relax.Expr, tuple[relax.Expr, list[int]]] = {}
        self._permutes: dict[tuple[relax.Expr, tuple[int, ...]], relax.Expr] = {}
        self._random_state: relax.Var | None = None
        # The index of what the node's op draws; None where it draws nothing.
        self.draw_index: int | None = None
        # Whether each update of a loss scale found an overflow: bool[].
        self.skips: list[relax.Expr] = []
        self.span: tvm.ir.Span | None = None
        self.result: Any = None

    # The type that the node's conversion must have.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the node's single result."""
        return tuple(int(extent) for extent in self.result.shape)

    @property
    def dtype(self) -> str:
        """The dtype name of the node's single result."""
        return dtype_name(self.result.dtype)

    def reject(self, reason: str) -> NoReturn:
        """Reject this call; the importer reports every rejected call at once."""
        raise ConversionError(reason)

    # Emitting.

    def emit(self, call: relax.Call) -> relax.Var:
        """Emit a call of a Relax op, with the node's location."""
        located = relax.Call(call.op, call.args, call.attrs, call.ty_args, self.span)
        return self._builder.emit(located)

    def call(self, name: str, *args: relax.Expr, **options: Any) -> Any:
        """Emit a call of an `amp_ir.*` op; return a tuple of expressions for several results."""
        for option, value in options.items():
            if isinstance(value, relax.Expr):
                self.reject(f"takes {option} as a constant, and it is computed at each call")
        bound = self._builder.emit(call_op(name, list(args), self.span, **options))
        return self.fields(bound) if isinstance(bound.ty, relax.TupleType) else bound

    def fields(self, bound: relax.Expr) -> tuple[relax.Var, ...]:
        """Emit a variable for each field of a tuple."""
        return tuple(
            self._builder.emit(relax.TupleGetItem(bound, i, self.span))
            for i in range(len(bound.ty.fields))
        )

    # Constants.

    def constant(self, value: Scalar, dtype: str) -> relax.Expr:
        """Return a 0-d constant, created once per value and dtype."""
        # repr distinguishes 0.0 from -0.0, and makes NaN equal to itself.
        key = (type(value), repr(value), dtype)
        if key not in self._constants:
            made = relax.const(_as_numpy(value, dtype), dtype)
            self._constants[key] = made
            self._fills[made] = value
        return self._constants[key]

    def tensor(self, value: torch.Tensor) -> relax.Expr:
        """Return a tensor constant, copied from the value."""
        if value.dtype not in DTYPE_NAMES:
            self.reject(f"a constant of dtype {value.dtype}")
        if value.ndim == 0:
            return self.constant(value.item(), DTYPE_NAMES[value.dtype])
        owned = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return relax.const(tvm.runtime.from_dlpack(owned))

    def full(self, shape: Sequence[int], value: Operand, dtype: str) -> relax.Expr:
        """Return a tensor with one value everywhere."""
        if not is_scalar(value):
            return self.broadcast(self.cast(value, dtype), shape)
        if len(shape) == 0:
            return self.constant(value, dtype)
        filled = self.emit(relax.op.full(tuple(shape), self.constant(value, dtype), dtype))
        self._fills[filled] = value
        return filled

    # Types and shapes; each emits nothing where nothing changes.

    def cast(self, x: Operand, dtype: str) -> relax.Expr:
        """Return the operand in another dtype, converted as in PyTorch (to bool: nonzero)."""
        if is_scalar(x):
            return self.constant(x, dtype)
        source = dtype_of(x)
        if source == dtype:
            return x
        if x in self._fills:
            return self.full(shape_of(x), self._fills[x], dtype)
        if (x, dtype) not in self._cast:
            made = relax.op.not_equal(x, self.constant(0, source))
            self._cast[x, dtype] = self.emit(made if dtype == "bool" else relax.op.astype(x, dtype))
        return self._cast[x, dtype]

    def reshape(self, x: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """Return the elements in row-major order under another shape (all extents given)."""
        if shape_of(x) == tuple(shape):
            return x
        if x in self._fills:
            return self.full(shape, self._fills[x], dtype_of(x))
        source = self._reshaped.get(x, x)
        if shape_of(source) == tuple(shape):
            return source
        key = source, tuple(shape)
        if key not in self._reshapes:
            self._reshapes[key] = self.emit(relax.op.reshape(source, tuple(shape)))
            self._reshaped[self._reshapes[key]] = source
        return self._reshapes[key]

    def broadcast(self, x: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """Return x repeated along its extents of 1 and along new leading axes."""
        if shape_of(x) == tuple(shape):
            return x
        if x in self._fills:
            return self.full(shape, self._fills[x], dtype_of(x))
        return self.emit(relax.op.broadcast_to(x, tuple(shape)))

    def permute(self, x: relax.Expr, axes: Sequence[int]) -> relax.Expr:
        """Return x with its axes in another order; axes may be negative."""
        order = [axis % len(axes) for axis in axes]
        source, before = self._permuted.get(x, (x, list(range(len(axes)))))
        order = [before[axis] for axis in order]
        if order == sorted(order):
            return source
        key = source, tuple(order)
        if key not in self._permutes:
            self._permutes[key] = self.emit(relax.op.permute_dims(source, order))
            self._permuted[self._permutes[key]] = (source, order)
        return self._permutes[key]

    def slice(self, x: relax.Expr, axis: int, begin: int, end: int, *, step: int = 1) -> relax.Expr:
        """Return elements begin, begin + step, ... of one axis; 0 <= begin <= end <= extent.

        `end` is exclusive.
        """
        shape = shape_of(x)
        if (begin, end, step) == (0, shape[axis], 1):
            return x
        if x in self._fills:
            length = -(-(end - begin) // step)
            return self.full(
                [*shape[:axis], length, *shape[axis + 1 :]], self._fills[x], dtype_of(x)
            )
        return self.emit(relax.op.strided_slice(x, [axis], [begin], [end], [step]))

    def concat(self, parts: Sequence[relax.Expr], axis: int) -> relax.Expr:
        """Return the concatenation of parts of one dtype, without those that have no elements."""
        kept = [part for part in parts if 0 not in shape_of(part)] or list(parts[:1])
        return kept[0] if len(kept) == 1 else self.emit(relax.op.concat(kept, axis))

    # Arithmetic with PyTorch's promotion.

    def binary(
        self, op: Callable[[relax.Expr, relax.Expr], relax.Expr], x: Operand, y: Operand
    ) -> relax.Var:
        """Return `op(x, y)` in the dtype that PyTorch computes in."""
        dtype = promoted_dtype(x, y)
        return self.emit(op(self.cast(x, dtype), self.cast(y, dtype)))

    def _scale(
        self, op: Callable[[relax.Expr, relax.Expr], relax.Expr], x: Operand, y: Operand
    ) -> relax.Expr:
        """Return `op(x, y)`, using float32 for a number that the low dtype cannot represent.

        PyTorch's multiply and divide (and only these) read a Python number or 0-d tensor combined
        with a float16 or bfloat16 tensor at float32 precision and round the result once.
        """
        dtype = promoted_dtype(x, y)
        if dtype in LOW_DTYPES and (_is_inexact(x, dtype) or _is_inexact(y, dtype)):
            wide = self.emit(op(self.cast(x, "float32"), self.cast(y, "float32")))
            return self.cast(wide, dtype)
        return self.emit(op(self.cast(x, dtype), self.cast(y, dtype)))

    def add(self, x: Operand, y: Operand) -> relax.Expr:
        """Return x + y."""
        return self.binary(relax.op.add, x, y)

    def subtract(self, x: Operand, y: Operand) -> relax.Expr:
        """Return x - y."""
        return self.binary(relax.op.subtract, x, y)

    def multiply(self, x: Operand, y: Operand) -> relax.Expr:
        """Return x * y."""
        return self._scale(relax.op.multiply, x, y)

    def divide(self, x: Operand, y: Operand) -> relax.Expr:
        """Return x / y; two integers give the default float dtype."""
        if not is_float(promoted_dtype(x, y)):
            x = self.cast(x, dtype_name(torch.get_default_dtype()))
        return self._scale(relax.op.divide, x, y)

    def where(self, condition: relax.Expr, x: Operand, y: Operand) -> relax.Var:
        """Return x where the condition holds, else y."""
        dtype = promoted_dtype(x, y)
        return self.emit(
            relax.op.where(self.cast(condition, "bool"), self.cast(x, dtype), self.cast(y, dtype))
        )

    # Random numbers.

    @property
    def random_state(self) -> relax.Var | None:
        """The input that holds seed and step counter, or None when no op has drawn from it."""
        return self._random_state

    def draw(self) -> tuple[relax.Var, int]:
        """Return the random state, and the index of what the node's op draws."""
        if self.draw_index is None:
            self.reject("draws random numbers that no random op of this step has the index of")
        return self.state_to_draw_from(), self.draw_index

    def state_to_draw_from(self) -> relax.Var:
        """Return the random state, which the function then has as an input."""
        if self._random_state is None:
            words = relax.TensorType([self._state_words], "int64")
            self._random_state = relax.Var(RANDOM_STATE, words)
        return self._random_state

    def next_random_state(self) -> relax.Var:
        """Return the random state of the next step: the same seed, the counter plus one.

        It does not change when every update of a loss scale found an overflow: a skipped step
        changes nothing.
        """
        assert self._random_state is not None, "no op drew a random number"
        step = relax.const(np.array([0, 1], "int64"), "int64")
        advanced = self.emit(relax.op.add(self._random_state, step))
        if not self.skips:
            return advanced
        skipped = self.skips[0]
        for other in self.skips[1:]:
            skipped = self.emit(relax.op.logical_and(skipped, other))
        return self.where(skipped, self._random_state, advanced)

    def finish(self) -> tvm.IRModule:
        """Return the module with the finished function, without ops whose results are unused."""
        return relax.transform.DeadCodeElimination()(self._builder.get())


def dtype_name(dtype: torch.dtype) -> str:
    """Return TVM's name of a torch dtype.

    Raises:
        ConversionError: amp_ir has no such dtype (complex, quantized, 8-bit floats).
    """
    if dtype not in DTYPE_NAMES:
        raise ConversionError(f"dtype {dtype}")
    return DTYPE_NAMES[dtype]


def _is_inexact(x: Operand, dtype: str) -> bool:
    """Return whether rounding to the low dtype changes a number."""
    if is_scalar(x):
        return float(torch.tensor(float(x), dtype=getattr(torch, dtype))) != float(x)
    return not shape_of(x) and dtype_of(x) != dtype


def _as_numpy(value: Scalar, dtype: str) -> Any:
    """Return the number as PyTorch stores it; out-of-range integers wrap as in C."""
    if dtype in LOW_DTYPES:
        # Converted by torch, which rounds once, from the double.
        return torch.tensor(value, dtype=getattr(torch, dtype)).float().numpy()
    if isinstance(value, float) and not is_float(dtype):
        return np.array(int(value)) if dtype != "bool" else np.array(value != 0)
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(dtype)
