# SPDX-License-Identifier: Apache-2.0
"""Typed calls of native library functions: fields by name, and one order of their arguments.

Dispatch makes a `LibraryMatmul`, `LibraryConvolution`, `LibraryAttention` or `LibraryRecurrence`
and writes it. A later pass reads a call, replaces fields by `attrs.evolve` and writes it again.
What is written is `call_dps_packed(function, arguments)`. Only this file and C++ know the order of
the arguments, which src/kernels/tensors/library_calls.h states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import tvm
from tvm import relax

from amp_ir.ir.dataflow import DPS_CALL, op_name
from amp_ir.ir.strided_view import StridedView

_TF32 = "tf32"

_VIEWS_OF_MATMUL = "a_dims a_strides b_dims b_strides out_dims out_strides epilogue"
_OF_CONVOLUTION = "out_dims out_strides strides padding dilation groups"
_VIEWS_OF_ATTENTION = "q_dims q_strides k_dims k_strides v_dims v_strides"
# The arguments of each function in order; its results follow. A strided view is its memory, and at
# another place its dims and strides; of a packed matrix, `packed` is the memory of `b`.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    name: tuple(arguments.split())
    for name, arguments in {
        "matmul": f"a b bias {_VIEWS_OF_MATMUL}",
        "matmul_accumulate": f"a b c bias alpha beta {_VIEWS_OF_MATMUL}",
        "matmul_packed": "a packed bias a_dims a_strides b_dims out_dims out_strides epilogue",
        "pack": "b b_dims b_strides",
        "conv": f"x w x_dims x_strides w_dims w_strides {_OF_CONVOLUTION}",
        "conv_backward_input": f"grad w grad_dims grad_strides w_dims w_strides {_OF_CONVOLUTION}",
        "conv_backward_weight": f"grad x grad_dims grad_strides x_dims x_strides {_OF_CONVOLUTION}",
        "attention": f"q k v {_VIEWS_OF_ATTENTION} is_causal scale",
        "attention_backward": f"grad q k v out lse grad_dims grad_strides {_VIEWS_OF_ATTENTION} "
        "out_dims out_strides is_causal scale",
        "lstm": "gates weight hidden cell dims reverse",
        "lstm_backward": "grad grad_hidden grad_cell activated cells weight dims reverse",
        "gru": "gates weight bias hidden dims reverse",
        "gru_backward": "grad grad_hidden activated states weight dims reverse",
        "rnn_tanh": "gates weight hidden dims reverse",
        "rnn_tanh_backward": "grad grad_hidden states weight dims reverse",
        "rnn_relu": "gates weight hidden dims reverse",
        "rnn_relu_backward": "grad grad_hidden states weight dims reverse",
    }.items()
}
# The position of the argument that a library function may write its result over.
WRITTEN_OVER = {
    f"amp_ir.{library}.matmul_accumulate": ARGUMENTS["matmul_accumulate"].index("c")
    for library in ("onednn", "torch")
}


@attrs.frozen
class Layout:
    """Dims and strides, in elements, of a result that has no memory yet."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@attrs.frozen(eq=False, kw_only=True)
class LibraryCall:
    """A call of a library: its prefix, the type of the results, and the location."""

    library: str
    type_: relax.Type
    span: tvm.ir.Span | None = None

    @property
    def verb(self) -> str:
        """What the library is asked for: a key of `ARGUMENTS`."""
        raise NotImplementedError

    @property
    def symbol(self) -> str:
        """The name of the native function."""
        return f"amp_ir.{self.library}.{self.verb}"

    def argument(self, name: str) -> Any:
        """Return the value of an argument: a view is its memory, None a tensor that is absent."""
        stem, _, part = name.rpartition("_")
        if stem and part in ("dims", "strides"):
            view = getattr(self, stem)
            return view.shape if part == "dims" else view.strides
        value = getattr(self, name)
        return value.base if isinstance(value, StridedView) else value


@attrs.frozen(eq=False, kw_only=True)
class LibraryMatmul(LibraryCall):
    """out = epilogue(a @ b + bias), or with `c`: out = beta * c + alpha * (a @ b + bias).

    `is_packed` says that `b` is laid out as the library's `pack` wrote it; strides say nothing.
    """

    a: StridedView
    b: StridedView
    out: Layout
    bias: relax.Expr | None = None
    c: relax.Expr | None = None
    alpha: relax.Expr | None = None
    beta: relax.Expr | None = None
    activation: str = "none"
    allow_tf32: bool = False
    is_packed: bool = False

    @property
    def verb(self) -> str:
        """One of three functions: packed, accumulating or plain."""
        if self.is_packed:
            return "matmul_packed"
        return "matmul" if self.c is None else "matmul_accumulate"

    @property
    def packed(self) -> relax.Expr:
        """The memory of `b` where it is packed."""
        return self.b.base

    @property
    def epilogue(self) -> str:
        """The activation, and whether TF32 is allowed, as the library function reads it."""
        return f"{self.activation}+{_TF32}" if self.allow_tf32 else self.activation


@attrs.frozen(eq=False, kw_only=True)
class LibraryPack(LibraryCall):
    """The matrix `b` in the library's own layout, as bytes."""

    b: StridedView
    verb = "pack"


@attrs.frozen(eq=False, kw_only=True)
class LibraryConvolution(LibraryCall):
    """A convolution of `x` by `w`, or the gradient to the one that is None, of `grad`."""

    out: Layout
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    x: StridedView | None = None
    w: StridedView | None = None
    grad: StridedView | None = None

    @property
    def verb(self) -> str:
        """The forward convolution, or one of its gradients."""
        if self.grad is None:
            return "conv"
        return "conv_backward_input" if self.x is None else "conv_backward_weight"


@attrs.frozen(eq=False, kw_only=True)
class LibraryAttention(LibraryCall):
    """Attention; with `grad`, `out` and `lse` its gradient to `q`, `k` and `v`."""

    q: StridedView
    k: StridedView
    v: StridedView
    is_causal: bool = attrs.field(converter=bool)
    scale: float
    grad: StridedView | None = None
    out: StridedView | None = None
    lse: relax.Expr | None = None

    @property
    def verb(self) -> str:
        """Attention or its gradient."""
        return "attention" if self.grad is None else "attention_backward"


@attrs.frozen(eq=False, kw_only=True)
class LibraryRecurrence(LibraryCall):
    """A layer of an LSTM, GRU or RNN, or its gradient; `operands` by the names in `ARGUMENTS`.

    `dims` are time steps, rows and the width of the hidden state.
    """

    verb: str
    operands: Mapping[str, relax.Expr]
    dims: tuple[int, ...]
    reverse: bool = attrs.field(converter=bool)

    def argument(self, name: str) -> Any:
        """Return the value of an argument: an operand or a field."""
        return self.operands[name] if name in self.operands else getattr(self, name)


def write(call: LibraryCall) -> relax.Call:
    """Return the call in the IR, which is given a buffer for each of its results."""
    arguments = [_as_expr(call.argument(name)) for name in ARGUMENTS[call.verb]]
    return library_call(call.symbol, arguments, call.type_, call.span)


def read(value: relax.Expr) -> LibraryCall | None:
    """Return the library call that an expression is, dispatched or planned; else None."""
    library, verb, arguments, _ = _taken_apart(value)
    if not library or verb not in ARGUMENTS:
        return None
    values = {"library": library, "type_": value.ty, "span": value.span}
    # The results of a planned call follow its arguments.
    values |= {n: _as_value(one) for n, one in zip(ARGUMENTS[verb], arguments, strict=False)}
    return _READERS[verb.partition("_")[0]](verb, _with_views(verb, values))


def written_by(value: relax.Expr) -> tuple[relax.Expr | None, list[relax.Expr]]:
    """Return the workspace of a planned library call, or None, and the buffers that it fills."""
    _, verb, arguments, workspace = _taken_apart(value)
    return workspace, arguments[len(ARGUMENTS[verb]) :]


def _taken_apart(value: Any) -> tuple[str, str, list[relax.Expr], relax.Expr | None]:
    """Return the library, the verb, the arguments and the workspace; "" for any other value."""
    name, workspace = op_name(value), None
    if name == DPS_CALL:
        symbol, arguments = str(value.args[0].global_symbol), value.args[1].fields[:]
    elif not name and isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc):
        symbol, arguments = str(value.op.global_symbol), value.args[:]
        if symbol.endswith(".with_scratch"):
            symbol, workspace, arguments = str(arguments[0].value), arguments[1], arguments[2:]
    else:
        return "", "", [], None
    library, _, verb = symbol.removeprefix("amp_ir.").rpartition(".")
    return library, verb, list(arguments), workspace


def _with_views(verb: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with memory, dims and strides of each view as one; no memory: a layout."""
    if "packed" in values:
        values["b"] = values.pop("packed")
    for name in ARGUMENTS[verb]:
        stem, is_dims, _ = name.partition("_dims")
        if is_dims:
            dims, strides = values.pop(name), values.pop(f"{stem}_strides", ())
            memory = values.get(stem)
            view = Layout(dims, strides) if memory is None else StridedView(memory, dims, strides)
            values[stem] = view
    return values


def _read_matmul(verb: str, values: dict[str, Any]) -> LibraryMatmul:
    activation, _, tf32 = values.pop("epilogue").partition("+")
    return LibraryMatmul(
        **values,
        activation=activation,
        allow_tf32=tf32 == _TF32,
        is_packed=verb == "matmul_packed",
    )


def _read_recurrence(verb: str, values: dict[str, Any]) -> LibraryRecurrence:
    operands = {name: values.pop(name) for name in operands_of(verb)}
    return LibraryRecurrence(**values, verb=verb, operands=operands)


# By the first word of the verb.
_READERS: dict[str, Callable[[str, dict[str, Any]], LibraryCall]] = {
    "matmul": _read_matmul,
    "pack": lambda _, values: LibraryPack(**values),
    "conv": lambda _, values: LibraryConvolution(**values),
    "attention": lambda _, values: LibraryAttention(**values),
    "lstm": _read_recurrence,
    "gru": _read_recurrence,
    "rnn": _read_recurrence,
}


def operands_of(verb: str) -> tuple[str, ...]:
    """Return the operand names of a recurrent layer's function, in the order of the op."""
    return tuple(name for name in ARGUMENTS[verb] if name not in ("dims", "reverse"))


def _as_expr(value: Any) -> relax.Expr:
    """Return an argument as the IR holds it."""
    if value is None:
        return relax.op.null_value()
    if isinstance(value, str):
        return tvm.ir.StringImm(value)
    if isinstance(value, (bool, int)):
        return relax.prim_value(int(value))
    if isinstance(value, float):
        return relax.prim_value(value)
    return shape_argument(value) if isinstance(value, tuple) else value


def _as_value(argument: Any) -> Any:
    """Return an argument as Python holds it; None: an absent tensor."""
    if isinstance(argument, relax.ShapeExpr):
        return tuple([int(one) for one in argument.values[:]])
    if isinstance(argument, (tvm.ir.StringImm, tvm.tirx.IntImm, tvm.tirx.FloatImm)):
        return argument.value
    return argument if isinstance(argument.ty, relax.TensorType) else None


def library_call(
    name: str, arguments: list[relax.Expr], type_: relax.Type, span: tvm.ir.Span | None
) -> relax.Call:
    """Return a call of `name` with `arguments`, followed by a buffer for each result of `type_`."""
    call = relax.Call(
        tvm.ir.Op.get(DPS_CALL),
        [relax.ExternFunc(name), relax.Tuple(arguments)],
        None,
        [type_],
        span,
    )
    relax.expr._update_type(call, type_)
    return call


def shape_argument(numbers: Sequence[int]) -> relax.ShapeExpr:
    """Return numbers in the form that a library function takes."""
    return relax.ShapeExpr([int(n) for n in numbers])
