# SPDX-License-Identifier: Apache-2.0
"""Write a convolution or one of its gradients as a library call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from tvm import relax

from amp_ir.dialect.registry import options_of
from amp_ir.ir.image_layout import TO_FIRST, TO_LAST, moved
from amp_ir.ir.library_call import Layout, LibraryConvolution, write
from amp_ir.ir.strided_view import StridedView, dense_strides, without_idle_strides

# Which of the two operands and the result are the data and the window.
_DATA_AND_WINDOW = {
    "conv": (0, 1),
    "conv_backward_input": (2, 1),
    "conv_backward_weight": (1, 2),
}
# The operands of the ops by the names of the library call.
_OPERANDS = {
    "conv": ("x", "w"),
    "conv_backward_input": ("grad", "w"),
    "conv_backward_weight": ("grad", "x"),
}
# Images with fewer channels than this are left unchanged: a library would pad them.
_FEW_CHANNELS = 8


@attrs.frozen
class ChannelsLast:
    """A convolution's call and its surrounding bindings: images with their channels last.

    `before` are the bindings of operands, `result` is bound instead of the op.
    """

    before: tuple[relax.Binding, ...]
    result: relax.Expr


def write_convolution(
    library: str,
    verb: str,
    variable: relax.Var,
    call: relax.Call,
    view: Callable[[relax.Expr], StridedView],
    *,
    is_moved: bool = False,
) -> ChannelsLast:
    """Return the library's `verb`: two operands, a dense result, the options of `call`.

    The gradient of a weight is written with its channels last where it `is_moved` to them.

    Before:  y = conv(x, w)
    After:   x_last = permute_dims(x, [0, 2, 3, 1])
             y_last = LibraryConvolution("onednn", x=x_last, w=w)
             y = permute_dims(y_last, [0, 3, 1, 2])

    The loops stage computes the ops between two convolutions with channels last in memory, so
    that the transposes cost nothing there.
    """
    before: list[relax.Binding] = []
    views = []
    for k, operand in enumerate(call.args[:2]):
        is_image = k == 0 or verb == "conv_backward_weight"
        views.append(_operand(operand, view, before) if is_image else view(operand))
    out = tuple(int(n) for n in call.ty.shape)
    is_last = is_moved if verb == "conv_backward_weight" else _is_worth_it(out)
    strides = _last_strides(out) if is_last else dense_strides(out)
    options = options_of(call)
    type_ = _permuted_type(call.ty, TO_LAST) if is_last else call.ty
    typed = LibraryConvolution(
        library=library,
        type_=type_,
        span=call.span,
        out=Layout(out, strides),
        strides=_strides_taken(verb, call, options),
        padding=tuple(int(n) for n in options["padding"]),
        dilation=tuple(int(n) for n in options["dilation"]),
        groups=int(options["groups"]),
        **dict(zip(_OPERANDS[verb], views, strict=True)),
    )
    new = write(typed)
    if not is_last:
        return ChannelsLast(tuple(before), new)
    last = relax.DataflowVar(f"{variable.name}_last", type_, variable.span)
    before.append(relax.VarBinding(last, new))
    return ChannelsLast(tuple(before), _permute(last, TO_FIRST, call.ty))


def _is_worth_it(shape: tuple[int, ...]) -> bool:
    """Return whether an image of this shape is read with its channels last."""
    return len(shape) == len(TO_LAST) and shape[1] >= _FEW_CHANNELS


def _last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of an image [n, channels, height, width] with channels last in memory."""
    inner = dense_strides(moved(shape, TO_LAST))
    return without_idle_strides(shape, moved(inner, TO_FIRST))


def _operand(
    operand: relax.Expr,
    view: Callable[[relax.Expr], StridedView],
    before: list[relax.Binding],
) -> StridedView:
    """Return the image that the library reads; adds a binding of its transpose where needed."""
    seen = view(operand)
    strides = _last_strides(seen.shape) if _is_worth_it(seen.shape) else seen.strides
    if seen.strides == strides:
        return seen
    type_ = _permuted_type(operand.ty, TO_LAST)
    last = relax.DataflowVar(f"{_name_of(operand)}_last", type_)
    before.append(relax.VarBinding(last, _permute(operand, TO_LAST, type_)))
    return StridedView(last, seen.shape, strides)


def _permute(operand: relax.Expr, order: Sequence[int], type_: relax.Type) -> relax.Call:
    call = relax.op.permute_dims(operand, list(order))
    relax.expr._update_type(call, type_)
    return call


def _permuted_type(type_: relax.TensorType, order: Sequence[int]) -> relax.TensorType:
    return relax.TensorType([int(type_.shape[d]) for d in order], type_.dtype)


def _name_of(operand: relax.Expr) -> str:
    return operand.name if isinstance(operand, relax.Var) else "constant"


def _strides_taken(verb: str, call: relax.Call, options: dict[str, Any]) -> tuple[int, ...]:
    """Return the strides of a convolution, 1 where the window has a single place along a dim.

    oneDNN 2023.2's bfloat16 gradient of the weights reads memory that is not its own where an input
    of 1 x 1 pixels, padded by 1, meets a window of 3 x 3 with stride 2; with stride 1 it does not.
    """
    shapes = [[int(n) for n in one.ty.shape] for one in (call.args[0], call.args[1], call)]
    data, window = _DATA_AND_WINDOW[verb]
    strides = [int(n) for n in options["strides"]]
    for k, padding in enumerate(options["padding"]):
        reach = int(options["dilation"][k]) * (shapes[window][2 + k] - 1) + 1
        if shapes[data][2 + k] + 2 * int(padding) == reach:
            strides[k] = 1
    return tuple(strides)
