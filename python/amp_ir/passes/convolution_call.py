# SPDX-License-Identifier: Apache-2.0
"""A convolution or one of its gradients as a library is asked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

from amp_ir.dialect.registry import options_of
from amp_ir.passes.library_call import library_call, shape_argument
from amp_ir.passes.strided_view import StridedView, dense_strides

# Which of the two operands and the result are the data and the window.
_DATA_AND_WINDOW = {
    "conv": (0, 1),
    "conv_backward_input": (2, 1),
    "conv_backward_weight": (1, 2),
}


def write_convolution(
    library: str, verb: str, call: relax.Call, view: Callable[[relax.Expr], StridedView]
) -> relax.Call:
    """The call of the library's `verb`: two operands, a dense result, the options of `call`."""
    a, b = view(call.args[0]), view(call.args[1])
    out = tuple(int(n) for n in call.ty.shape)
    arguments = [a.base, b.base]
    for shape, strides in ((a.shape, a.strides), (b.shape, b.strides), (out, dense_strides(out))):
        arguments += [shape_argument(shape), shape_argument(strides)]
    options = options_of(call)
    arguments.append(shape_argument(_strides_taken(verb, call, options)))
    arguments += [shape_argument(options[key]) for key in ("padding", "dilation")]
    arguments.append(relax.prim_value(int(options["groups"])))
    return library_call(f"amp_ir.{library}.{verb}", arguments, call.ty, call.span)


def _strides_taken(verb: str, call: relax.Call, options: dict[str, Any]) -> list[int]:
    """The strides of a convolution, 1 where the window has a single place along a dim.

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
    return strides
