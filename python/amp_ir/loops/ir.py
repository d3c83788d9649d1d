# SPDX-License-Identifier: Apache-2.0
"""Loop values: tensors described by the computation of one element.

A lowering gives one element of the result in terms of elements of the arguments:

    @lowers("amp_ir.softmax_backward")
    def softmax_backward(op, grad, y, *, axis):
        dot = reduce("sum", grad.shape, (axis,), lambda *i: grad[i] * y[i])
        return pointwise(y.shape, op.results[0].dtype, lambda *i: (grad[i] - dot[i]) * y[i])

Nothing is computed or stored when a lowering runs. `grouping.py` and the emitter of the device
decide later which values get memory, which share a kernel and how its loops run.

Elements are read in their compute dtype: bfloat16 and float16 are widened to float32 at the read
and rounded once, at the store.

Two rules for bodies. Every index they read must be in range, on every path: a body that pads reads
at a clamped index and selects afterwards (`math.clamp`), because a `select` does not guard reads.
And an expression that is used more than once goes through `let`, which gives it a name in the
kernel; otherwise the text of the kernel grows with every use.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import attrs
from tvm import tirx

from amp_ir.loops.body_context import current_access

Index = tuple[Any, ...]
Element = Callable[..., Any]
# "largest" is a maximum that may be any number where an element is NaN, for readers that are NaN
# there anyway: it takes a CPU one instruction.
ReduceKind = Literal["sum", "max", "largest", "min", "prod", "any", "all"]
LOW_DTYPES = ("bfloat16", "float16")


def compute_dtype(dtype: str) -> str:
    """Return the dtype in which elements of a tensor of `dtype` take part in arithmetic."""
    return "float32" if dtype in LOW_DTYPES else dtype


@attrs.frozen
class TensorSpec:
    """Shape (extents) and dtype (TVM's name) of a value."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


_serial = itertools.count()


@attrs.define(eq=False)
class Value:
    """A tensor in the loop program.

    `value[index]`, inside the body of another value, reads one element in the compute dtype.
    Shapes broadcast as in NumPy: the index is aligned at the right, extents of 1 read index 0.
    `derived` are values made from this one that its readers share, by what they are.
    """

    spec: TensorSpec
    reads: list[Read] = attrs.field(factory=list, repr=False)
    derived: dict[str, Value] = attrs.field(factory=dict, init=False, repr=False)
    serial: int = attrs.field(factory=lambda: next(_serial))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the dimensions."""
        return self.spec.shape

    @property
    def dtype(self) -> str:
        """The dtype in which the value is stored."""
        return self.spec.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.size

    def __getitem__(self, index: Index | Any) -> Any:
        """Read one element; only inside the body of another value."""
        index = index if isinstance(index, tuple) else (index,)
        return current_access()(self, self.align(index))

    def align(self, index: Index) -> Index:
        """Return the index of this value for an index of a broadcast result."""
        assert len(index) >= len(self.shape), f"{len(index)} indices for {self.shape}"
        tail = index[len(index) - len(self.shape) :]
        return tuple(0 if n == 1 else i for n, i in zip(self.shape, tail, strict=True))


@attrs.define(eq=False)
class Buffer(Value):
    """A value that exists in memory before the loops run: an input, or a library call's result."""

    source: Any = None


@attrs.define(eq=False)
class Constant(Value):
    """A compile-time scalar; never in memory. `number` is a Python number."""

    number: float | int | bool = 0


@attrs.frozen(eq=False)
class LogSoftmax:
    """A log-softmax along `axis` is (scores - peak) - log_total; `softmax` is its exponential."""

    axis: int
    scores: Value
    peak: Value
    log_total: Value
    softmax: Value


@attrs.define(eq=False)
class Pointwise(Value):
    """A value whose elements `body(*index)` computes from elements at computed positions.

    `is_kept`: its readers never compute it again themselves. `is_held`: a CPU kernel that needs it
    in several passes over a row computes it in the first, for its arithmetic takes longer than a
    read. `is_view`: only moves elements (transpose, slice, broadcast); never worth memory by
    itself. `is_reshape`: a view that keeps the flat order. `rounds`: the user wrote this cast, so
    its rounding happens even where the value never reaches memory. `last`: the same tensor with its
    channels last, of which this is a view; see `channels_last`. `parts`: the values that it
    concatenates along `part_axis`. `one_hot`: an axis along which at most one element is not 0, and
    the value, without that axis, of these elements. `log_softmax`: the parts of a log-softmax that
    is not in memory so far.
    """

    body: Element = attrs.field(kw_only=True, repr=False)
    last: Value | None = attrs.field(default=None, kw_only=True, repr=False)
    parts: tuple[Value, ...] = attrs.field(default=(), kw_only=True, repr=False)
    part_axis: int = attrs.field(default=0, kw_only=True)
    one_hot: tuple[int, Value] | None = attrs.field(default=None, kw_only=True, repr=False)
    log_softmax: LogSoftmax | None = attrs.field(default=None, kw_only=True, repr=False)
    is_cast: bool = False
    is_held: bool = False
    is_kept: bool = False
    is_reshape: bool = False
    is_view: bool = False
    rounds: bool = False

    @property
    def part_rows(self) -> int:
        """In how many rows of memory the parts are one after the other."""
        return math.prod(self.shape[: self.part_axis])


@attrs.define(eq=False)
class Reduction(Value):
    """`kind` over `axes` of `source_shape`; the reduced dimensions stay, with extent 1.

    `is_gate`: readers of the same tensor wait for the result (an update for its gradient's check),
    so that a fused kernel would have to store the tensor. `divisor`: divides the sum before it is
    rounded, for a mean; 1 otherwise.
    """

    is_gate: bool = attrs.field(default=False, kw_only=True)
    divisor: int = attrs.field(default=1, kw_only=True)
    kind: ReduceKind = attrs.field(kw_only=True)
    source_shape: tuple[int, ...] = attrs.field(kw_only=True)
    axes: tuple[int, ...] = attrs.field(kw_only=True)
    body: Element = attrs.field(kw_only=True, repr=False)


@attrs.define(eq=False)
class Opaque(Value):
    """One result of a kernel that its lowering writes out as TIR (scatter, sort, ...)."""

    kernel: OpaqueKernel = attrs.field(kw_only=True)
    position: int = attrs.field(kw_only=True)


@attrs.define(eq=False)
class OpaqueKernel:
    """A hand-written kernel: `emit(inputs, outputs)` returns its statement.

    Inputs and outputs are `FlatBuffer`s (kernel_buffers.py): `.load(i)`, `.store(i, element)`.
    `inplace` are pairs (output, input) that may be the same memory: each element of that input is
    read before it is written. `emit_cuda` writes launches where the parallel loops of `emit`, one
    thread an iteration, would leave a GPU idle.
    """

    name: str
    inputs: list[Value]
    specs: list[TensorSpec]
    emit: Callable[[list[Any], list[Any]], tirx.Stmt]
    inplace: tuple[tuple[int, int], ...] = ()
    emit_cuda: Callable[[list[Any], list[Any]], list[tirx.Stmt]] | None = None


@attrs.frozen(eq=False)
class Read:
    """A read of `value` by a value's body.

    `place` says where: "same" (the reader's own index, equal shapes), "broadcast" (the reader's
    index with some dimensions dropped or 0), "flat" (a reshape: the same flat position) or
    "other". `is_scattered`: neighbours along the reader's last axis read elements that are none, or
    at indices that are read themselves.
    """

    value: Value
    place: Literal["same", "broadcast", "flat", "other"]
    is_scattered: bool = False
