# SPDX-License-Identifier: Apache-2.0
"""Loop values: tensors described by how one element of them is computed.

An op is lowered by saying what an element is, in terms of elements of its arguments:

    @lowers("amp_ir.softmax_backward")
    def softmax_backward(op, grad, y, *, axis):
        dot = reduce("sum", grad.shape, (axis,), lambda *i: grad[i] * y[i])
        return pointwise(y.shape, op.results[0].dtype, lambda *i: (grad[i] - dot[i]) * y[i])

Nothing is computed or stored when a lowering runs. Which values get memory, which share a kernel
and how its loops run is decided later, by `grouping.py` and the emitter of the device.

Elements are read in their compute dtype: bfloat16 and float16 are widened to float32 at the read
and rounded once, at the store.

Two rules for bodies. Every index they read must be in range, on every path: a body that pads reads
at a clamped index and selects afterwards (`math.clamp`), because reads are not guarded by a
`select`. And an expression that is used more than once goes through `bind`, which gives it a name
in the kernel; otherwise the text of the kernel grows with every use.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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
    """The dtype in which elements of a tensor of `dtype` take part in arithmetic."""
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
        """The index of this value that an index of a broadcast result stands for."""
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
    """A scalar known when compiling; never in memory. `number` is a Python number."""

    number: float | int | bool = 0


@attrs.define(eq=False)
class Pointwise(Value):
    """Each element from elements at computed places; `body(*index)` gives it.

    `is_view`: only moves elements (transpose, slice, broadcast); never worth memory by itself.
    `is_reshape`: a view that keeps the flat order. `rounds`: the user wrote this cast, so its
    rounding happens even where the value never reaches memory. `last`: the same tensor with its
    channels last, of which this is a view; see `channels_last`. `parts`: the values that it is,
    one after the other in each of `part_rows` rows. `one_hot`: an axis along which at most one
    element is not 0, and the value, without that axis, of these elements.
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

    `is_gate`: what reads the same tensor waits for the result (an update for its gradient's
    check), so in one kernel with it would have to be stored for later. `divisor`: what a sum is
    divided by before it is rounded; 1 where nothing asks for a mean.
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
    """That a value's body reads `value`.

    `place` says where: "same" (the reader's own index, equal shapes), "broadcast" (the reader's
    index with some dimensions dropped or 0), "flat" (a reshape: the same flat position) or "other".
    """

    value: Value
    place: Literal["same", "broadcast", "flat", "other"]


Access = Callable[[Value, Index], Any]
_access_stack: list[Access] = []


def current_access() -> Access:
    """What `value[index]` does at this moment."""
    if not _access_stack:
        raise BuildError("an element is read outside of the body of a loop value")
    return _access_stack[-1]


@contextlib.contextmanager
def reading(access: Access) -> Iterator[None]:
    """Let `value[index]` mean `access(value, index)` inside the block."""
    _access_stack.append(access)
    try:
        yield
    finally:
        _access_stack.pop()


Bind = Callable[[Any], Any]
_bind_stack: list[Bind] = []


def bind(element: Any) -> Any:
    """Name an element expression in the kernel being written, so that it is computed once."""
    return _bind_stack[-1](element) if _bind_stack else element


@contextlib.contextmanager
def binding(bind_element: Bind, needs_scalar_loop: Callable[[], None]) -> Iterator[None]:
    """Let `bind(x)` mean `bind_element(x)`, and `scalar_loop` call the other, inside the block."""
    _bind_stack.append(bind_element)
    _scalar_stack.append(needs_scalar_loop)
    try:
        yield
    finally:
        _bind_stack.pop()
        _scalar_stack.pop()


_scalar_stack: list[Callable[[], None]] = []


def scalar_loop() -> None:
    """Say that the element being written uses a function that cannot be vectorised.

    TVM's vectoriser takes such a statement apart lane by lane and loses the names bound before it.
    """
    if _scalar_stack:
        _scalar_stack[-1]()


@attrs.define(eq=False)
class Distance:
    """How far on a view reads: a number that kernels which are otherwise alike may differ in."""

    number: int

    def here(self) -> Any:
        """The number; a variable while a kernel is written that is told the number later."""
        return _distance_stack[-1](self) if _distance_stack and self.number else self.number


_distance_stack: list[Callable[[Distance], Any]] = []


@contextlib.contextmanager
def distances_as(stand_in: Callable[[Distance], Any]) -> Iterator[None]:
    """Let `stand_in(distance)` be what distances other than 0 are, inside the block."""
    _distance_stack.append(stand_in)
    try:
        yield
    finally:
        _distance_stack.pop()


def channels_last(value: Value) -> Value | None:
    """The tensor in memory of which `value` is the view with channels first, or None.

    What is computed from such a view has its channels last in memory too (`pointwise`, `reduce`),
    so that chains between convolutions never change their layout.
    """
    return value.last if isinstance(value, Pointwise) else None


def channels_first(value: Value) -> Value:
    """A tensor whose channels are last in memory, as the step sees it; never costs a kernel."""
    spec = TensorSpec(moved(value.shape, TO_FIRST), value.dtype)

    def body(*index: Any) -> Any:
        return value[moved(index, TO_LAST)]

    return Pointwise(spec, [Read(value, "other")], body=body, is_view=True, last=value)


def pointwise(shape: Sequence[int], dtype: str, body: Element, **flags: Any) -> Pointwise:
    """A value of `shape` whose element at `i` is `body(*i)`, rounded to `dtype` when stored."""
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
    """As `pointwise`, for a body that reads each of `arguments` at its own index and nothing else.

    What it reads follows from the shapes then, and the body, whose arithmetic may be long, is not
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
    """`kind` of `body(*i)` over `axes` of an index space of `source_shape`; extents stay as 1.

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
    """The same elements in the same order under another shape; never costs a kernel by itself."""
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
    """The results of a kernel written out as TIR; see `OpaqueKernel`.

    Its buffers widen what they load, so an input that only widens another value is that one.
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
    """Row-major flat position of `index` in a tensor of `shape`."""
    flat: Any = 0
    for i, n in zip(index, shape, strict=True):
        flat = i if isinstance(flat, int) and flat == 0 else flat * n + i
    return flat


def unflatten(flat: Any, shape: Sequence[int]) -> Index:
    """The index whose row-major flat position in a tensor of `shape` is `flat`."""
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
    """Run `body` once on fresh index variables and note what it reads, and where.

    Also whether it reads images whose channels are last in memory, and makes one.
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
    """An expression of the compute dtype of `value`, for runs of a body that only look."""
    if isinstance(value, Constant):
        return tirx.const(value.number, compute_dtype(value.dtype))
    return tirx.Var("element", compute_dtype(value.dtype))


@attrs.frozen
class Lowering:
    """What a lowering is told about its call: the declared results and the call itself."""

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
