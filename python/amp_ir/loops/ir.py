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

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Literal

import attrs
from tvm import relax, tirx

from amp_ir.errors import BuildError
from amp_ir.ir.image_layout import TO_FIRST, TO_LAST, moved

Index = tuple[Any, ...]
Element = Callable[..., Any]
ReduceKind = Literal["sum", "max", "min", "prod", "any", "all"]
# Elements that a CPU kernel computes side by side: one AVX-512 register of float32. Narrower
# machines split it.
LANES = 16
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
        if len(index) < len(self.shape):
            raise BuildError(f"{len(index)} indices for a value of shape {self.shape}")
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


@attrs.define(eq=False)
class Pointwise(Value):
    """A value whose elements `body(*index)` computes from elements at computed positions.

    `is_view`: only moves elements (transpose, slice, broadcast); never worth memory by itself.
    `is_reshape`: a view that keeps the flat order. `rounds`: the user wrote this cast, so its
    rounding happens even where the value never reaches memory. `last`: the same tensor with its
    channels last, of which this is a view; see `channels_last`. `parts`: the values that it
    concatenates, one after the other in each of `part_rows` rows. `one_hot`: an axis along which
    at most one element is not 0, and the value, without that axis, of these elements.
    """

    body: Element = attrs.field(kw_only=True, repr=False)
    last: Value | None = attrs.field(default=None, kw_only=True, repr=False)
    parts: tuple[Value, ...] = attrs.field(default=(), kw_only=True, repr=False)
    part_rows: int = attrs.field(default=1, kw_only=True)
    one_hot: tuple[int, Value] | None = attrs.field(default=None, kw_only=True, repr=False)
    is_cast: bool = False
    is_reshape: bool = False
    is_view: bool = False
    rounds: bool = False


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
    "other".
    """

    value: Value
    place: Literal["same", "broadcast", "flat", "other"]


@contextlib.contextmanager
def assigned(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a variable inside the block, for this thread alone: steps may be lowered side by side."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


Access = Callable[[Value, Index], Any]
_access: ContextVar[Access | None] = ContextVar("access", default=None)


def current_access() -> Access:
    """Return the function that evaluates `value[index]` now."""
    access = _access.get()
    if access is None:
        raise BuildError("an element is read outside of the body of a loop value")
    return access


def reading(access: Access) -> AbstractContextManager[None]:
    """Evaluate `value[index]` as `access(value, index)` inside the block."""
    return assigned(_access, access)


Let = Callable[[Any], Any]
_let: ContextVar[Let | None] = ContextVar("let", default=None)
_scalar_loop: ContextVar[Callable[[], None] | None] = ContextVar("scalar_loop", default=None)


def let(element: Any) -> Any:
    """Name an element expression in the kernel being written, so that it is computed once."""
    name = _let.get()
    return element if name is None else name(element)


@contextlib.contextmanager
def let_as(let_element: Let, needs_scalar_loop: Callable[[], None]) -> Iterator[None]:
    """Make `let(x)` call `let_element(x)`, and `scalar_loop` the other, inside the block."""
    with assigned(_let, let_element), assigned(_scalar_loop, needs_scalar_loop):
        yield


def scalar_loop() -> None:
    """Declare that the element being written uses a function that cannot be vectorised.

    TVM's vectoriser splits such a statement lane by lane and loses the names bound before it.
    """
    declare = _scalar_loop.get()
    if declare is not None:
        declare()


def channels_last(value: Value) -> Value | None:
    """Return the tensor in memory of which `value` is the view with channels first, or None.

    A value computed from such a view has its channels last in memory too (`pointwise`, `reduce`),
    so that chains between convolutions never change their layout.
    """
    return value.last if isinstance(value, Pointwise) else None


def channels_first(value: Value) -> Value:
    """Return the channels-first view of a channels-last tensor; never costs a kernel."""
    spec = TensorSpec(moved(value.shape, TO_FIRST), value.dtype)

    def body(*index: Any) -> Any:
        return value[moved(index, TO_LAST)]

    return Pointwise(spec, [Read(value, "other")], body=body, is_view=True, last=value)


def pointwise(shape: Sequence[int], dtype: str, body: Element, **flags: Any) -> Pointwise:
    """Return a value of `shape` with element `body(*i)` at `i`, rounded to `dtype` when stored."""
    spec = TensorSpec(tuple(int(n) for n in shape), dtype)
    reads, reads_last = _reads_of(spec.shape, body, spec.shape)
    if not reads_last:
        return Pointwise(spec, reads, body=body, **flags)
    inner = TensorSpec(moved(spec.shape, TO_LAST), dtype)
    flags.pop("parts", None)  # Where channels are last, they are in another order.

    def body_of_last(*index: Any) -> Any:
        return body(*moved(index, TO_FIRST))

    reads, _ = _reads_of(inner.shape, body_of_last, inner.shape)
    first = channels_first(Pointwise(inner, reads, body=body_of_last, **flags))
    assert isinstance(first, Pointwise)
    return first


def elementwise(
    shape: Sequence[int], dtype: str, arguments: Sequence[Value], body: Element, **flags: Any
) -> Pointwise:
    """Return `pointwise` of a body that reads each of `arguments` at its own index only.

    The shapes then determine what it reads, and the body, whose arithmetic may be long, need not
    run to find out.
    """
    spec = TensorSpec(tuple(int(n) for n in shape), dtype)
    for one in arguments:
        if channels_last(one) is not None or len(one.shape) > len(spec.shape):
            return pointwise(shape, dtype, body, **flags)
    reads = {id(one): Read(one, _own_place(one, spec)) for one in arguments}
    return Pointwise(spec, list(reads.values()), body=body, **flags)


def _own_place(value: Value, spec: TensorSpec) -> Literal["same", "broadcast"]:
    return "same" if value.shape == spec.shape else "broadcast"


def reduce(
    kind: ReduceKind,
    source_shape: Sequence[int],
    axes: Sequence[int],
    body: Element,
    dtype: str,
    **flags: Any,
) -> Value:
    """Reduce `body(*i)` by `kind` over `axes` of the space `source_shape`; extents stay as 1.

    `flags` are `is_gate` and `divisor`: see `Reduction`.
    """
    source = tuple(int(n) for n in source_shape)
    kept = tuple(sorted(axis % len(source) for axis in axes)) if source else ()
    reads, reads_last = _reads_of(source, body, None)
    if not reads_last:
        return _reduction(kind, source, kept, (body, reads), dtype, flags)

    def body_of_last(*index: Any) -> Any:
        return body(*moved(index, TO_FIRST))

    source, kept = moved(source, TO_LAST), tuple(sorted(TO_FIRST[axis] for axis in kept))
    reads, _ = _reads_of(source, body_of_last, None)
    return channels_first(_reduction(kind, source, kept, (body_of_last, reads), dtype, flags))


def _reduction(
    kind: ReduceKind,
    source: tuple[int, ...],
    axes: tuple[int, ...],
    body: tuple[Element, list[Read]],
    dtype: str,
    flags: dict[str, Any],
) -> Reduction:
    shape = tuple(1 if d in axes else n for d, n in enumerate(source))
    return Reduction(
        TensorSpec(shape, dtype), body[1], kind=kind,
        source_shape=source, axes=axes, body=body[0], **flags,
    )  # fmt: skip


def reshape(source: Value, shape: Sequence[int]) -> Value:
    """Return the same elements in the same order under another shape; never costs a kernel."""
    spec = TensorSpec(tuple(int(n) for n in shape), source.dtype)
    if spec.size != source.size:
        raise BuildError(f"cannot reshape {source.shape} to {spec.shape}: the sizes differ")
    if spec.shape == source.shape:
        return source
    inner = channels_last(source)
    if inner is not None and 1 in (source.shape[1], math.prod(source.shape[2:])):
        # One channel, or one pixel: the flat order is the same.
        return reshape(inner, spec.shape)

    def body(*index: Any) -> Any:
        return source[unflatten(flatten(index, spec.shape), source.shape)]

    return Pointwise(spec, [Read(source, "flat")], body=body, is_reshape=True, is_view=True)


def squeeze(source: Value, shape: Sequence[int]) -> Value:
    """Drop extents of 1, as after a reduction without `keepdims`."""
    return reshape(source, shape)


def opaque(
    name: str,
    inputs: Sequence[Value],
    specs: Sequence[TensorSpec],
    emit: Callable[[list[Any], list[Any]], tirx.Stmt],
    inplace: tuple[tuple[int, int], ...] = (),
    emit_cuda: Callable[[list[Any], list[Any]], list[tirx.Stmt]] | None = None,
) -> tuple[Opaque, ...]:
    """Return the results of a kernel written out as TIR; see `OpaqueKernel`.

    Its buffers widen what they load, so an input that only widens another value is replaced by it.
    """
    inputs = [_before_widening(value) for value in inputs]
    kernel = OpaqueKernel(name, inputs, list(specs), emit, inplace, emit_cuda)
    reads = [Read(value, "other") for value in inputs]
    return tuple(
        Opaque(spec, list(reads), kernel=kernel, position=k) for k, spec in enumerate(specs)
    )


def _before_widening(value: Value) -> Value:
    while isinstance(value, Pointwise) and value.is_cast and value.is_view:
        value = value.reads[0].value
    return value


def flatten(index: Index, shape: Sequence[int]) -> Any:
    """Return the row-major flat position of `index` in a tensor of `shape`."""
    flat: Any = 0
    for i, n in zip(index, shape, strict=True):
        flat = i if isinstance(flat, int) and flat == 0 else flat * n + i
    return flat


def unflatten(flat: Any, shape: Sequence[int]) -> Index:
    """Return the index whose row-major flat position in a tensor of `shape` is `flat`."""
    index: list[Any] = []
    for d in reversed(range(len(shape))):
        if shape[d] == 1:
            index.append(0)
        elif d == 0 or all(n == 1 for n in shape[:d]):
            index.append(flat)
        else:
            index.append(tirx.floormod(flat, shape[d]) if not isinstance(flat, int) else 0)
            flat = tirx.floordiv(flat, shape[d]) if not isinstance(flat, int) else 0
    return tuple(reversed(index))


def _reads_of(
    shape: tuple[int, ...], body: Element, own_shape: tuple[int, ...] | None
) -> tuple[list[Read], bool]:
    """Run `body` once on fresh index variables and record what it reads, and where.

    Also record whether it reads images whose channels are last in memory, and makes one.
    """
    index = tuple(tirx.Var(f"i{d}", "int32") for d in range(len(shape)))
    reads: dict[int, Read] = {}
    reads_last = False

    def note(value: Value, at: Index) -> Any:
        nonlocal reads_last
        inner = channels_last(value)
        if inner is not None:
            reads_last = True
            return note(inner, moved(at, TO_LAST))
        place = _place(value, at, index, shape)
        known = reads.get(id(value))
        if known is None or (known.place in ("same", "broadcast") and known.place != place):
            reads[id(value)] = Read(value, place)
        return dummy_element(value)

    with reading(note):
        body(*index)
    return list(reads.values()), reads_last and len(shape) == len(TO_LAST)


def _place(
    value: Value, at: Index, index: Index, shape: tuple[int, ...]
) -> Literal["same", "broadcast", "other"]:
    offset = len(index) - len(value.shape)
    if offset < 0:
        return "other"
    for d, i in enumerate(at):
        if value.shape[d] == 1:
            continue
        if not (isinstance(i, tirx.Var) and i.same_as(index[offset + d])):
            return "other"
    return "same" if value.shape == shape else "broadcast"


def dummy_element(value: Value) -> Any:
    """Return an expression of the compute dtype of `value`, for dry runs of a body."""
    if isinstance(value, Constant):
        return tirx.const(value.number, compute_dtype(value.dtype))
    return tirx.Var("element", compute_dtype(value.dtype))


@attrs.frozen
class Lowering:
    """Arguments of a lowering: the declared results and the call itself."""

    name: str
    results: tuple[TensorSpec, ...]
    call: relax.Call


LOWERINGS: dict[str, Callable[..., Value | tuple[Value, ...]]] = {}


def lowers(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the lowering of one or more ops; a second registration is an error."""

    def register(lowering: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if name in LOWERINGS:
                raise ValueError(f"{name} has a lowering already: {LOWERINGS[name]}")
            LOWERINGS[name] = lowering
        return lowering

    return register
