# SPDX-License-Identifier: Apache-2.0
"""Find which rows of its arguments some rows of an op's result need.

Rows are along one axis of a tensor. A rule describes one op: for rows along `axis` of the result,
the axis of each argument along which the same rows are needed, None for an argument that is needed
whole; or that there is no such axis. An op without a rule has none, and is not split.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax

from amp_ir.dialect.activations import ACTIVATIONS
from amp_ir.dialect.losses import LOSSES, class_axis
from amp_ir.dialect.registry import options_of
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.strided_view import permutation

Axes = tuple[int | None, ...]
Rule = Callable[[relax.Call, int, int], "Axes | None"]

_UNARY = (
    "abs negative exp log sqrt rsqrt sin cos tan asin acos atan sinh cosh asinh acosh atanh tanh "
    "sigmoid erf floor ceil round trunc sign square logical_not bitwise_not isfinite isinf isnan "
    "nn.relu nn.silu nn.gelu nn.gelu_tanh nn.leakyrelu astype broadcast_to where"
)
_BINARY = (
    "add subtract multiply divide floor_divide mod floor_mod power maximum minimum equal not_equal "
    "less less_equal greater greater_equal logical_and logical_or logical_xor bitwise_and "
    "bitwise_or bitwise_xor left_shift right_shift"
)
_GENERATORS = ("relax.full", "relax.zeros", "relax.ones")
_REDUCTIONS = ("relax.sum", "relax.mean", "relax.max", "relax.min", "relax.prod")


def is_tensor(expr: relax.Expr) -> bool:
    """Return whether an argument is a tensor: not a shape, a number, or a tuple of tensors."""
    return isinstance(expr.ty, relax.TensorType)


def row_axes(call: relax.Call, axis: int, units: int) -> Axes | None:
    """Return the axes of the arguments for rows along `axis` of a result that is one tensor.

    `units` is the number of equal parts that rows divide into: a reshape keeps what it can.
    """
    rule = RULES.get(call.op.name)
    return rule(call, axis, units) if rule is not None and is_tensor(call) else None


def summed_axes(call: relax.Call, given: Axes) -> Axes | None:
    """Return the axes of the arguments whose rows the op adds up; `given` are those known.

    The op of all rows is then the sum of the op's results for some rows each; a mean is that sum
    divided by the number of elements.
    """
    rule = _SUMS.get(call.op.name)
    if rule is None:
        return None
    axes = rule(call, given)
    agrees = axes is not None and all(
        one is None or one == need for one, need in zip(given, axes, strict=True)
    )
    return axes if agrees else None


def _elementwise(call: relax.Call, axis: int, _units: int) -> Axes | None:
    rank, extent = len(shape_of(call)), shape_of(call)[axis]
    axes: list[int | None] = []
    for argument in call.args:
        shape = shape_of(argument) if is_tensor(argument) else ()
        at = axis - (rank - len(shape))
        axes.append(at if at >= 0 and shape[at] == extent else None)
    return tuple(axes)


def _reshape(call: relax.Call, axis: int, units: int) -> Axes | None:
    """Keep rows where as many elements precede them and their parts remain distinguishable."""
    before = math.prod(shape_of(call)[:axis])
    source = shape_of(call.args[0])
    found = [d for d in range(len(source)) if math.prod(source[:d]) == before]
    if not found:
        return None
    return (max(found, key=lambda d: math.gcd(source[d], units)), None)


def _permute_dims(call: relax.Call, axis: int, _units: int) -> Axes | None:
    return (permutation(call)[axis],)


def _strided_slice(call: relax.Call, axis: int, _units: int) -> Axes | None:
    rank = len(shape_of(call))
    sliced = [int(field.value) % rank for field in call.args[1].fields]
    return None if axis in sliced else (axis, *(None for _ in call.args[1:]))


def _concat(call: relax.Call, axis: int, _units: int) -> Axes | None:
    is_along = int(call.attrs.axis) % len(shape_of(call)) == axis
    return None if is_along or not isinstance(call.args[0], relax.Tuple) else (axis,)


def _row_wise(call: relax.Call, axis: int, _units: int) -> Axes | None:
    """Keep the rows of all arguments, of the shape of the result; an axis is treated as a whole."""
    options = options_of(call)
    along = int(options["axis"] if options else call.attrs.axis) % len(shape_of(call))
    return None if along == axis else tuple(axis for _ in call.args)


def _indexed(call: relax.Call, axis: int, units: int) -> Axes | None:
    """Keep rows of gathers and scatters along another axis, where the rows of all correspond."""
    axes = _row_wise(call, axis, units)
    same = len({shape_of(one)[axis] for one in call.args}) == 1
    return axes if same else None


def _reduced_axes(call: relax.Call) -> list[int]:
    rank = len(shape_of(call.args[0]))
    axes = call.attrs.axis
    if axes is None:
        return list(range(rank))
    return sorted(int(a) % rank for a in (axes if hasattr(axes, "__len__") else [axes]))


def _reduction(call: relax.Call, axis: int, _units: int) -> Axes | None:
    reduced = _reduced_axes(call)
    if call.attrs.keepdims:
        return None if axis in reduced else (axis,)
    left = [d for d in range(len(shape_of(call.args[0]))) if d not in reduced]
    return (left[axis],)


def _matmul(call: relax.Call, axis: int, _units: int) -> Axes | None:
    """Split rows of the first operand, or columns of a second one that is a matrix."""
    a, b = (len(shape_of(one)) for one in call.args)
    if a < 2 or b != 2:
        return None
    return (axis, None) if axis < a - 1 else (None, 1)


def _generator(call: relax.Call, _axis: int, _units: int) -> Axes | None:
    return tuple(None for _ in call.args)


def _nll_loss_backward(call: relax.Call, axis: int, _units: int) -> Axes | None:
    if axis != 0 or class_axis(shape_of(call)) == 0:
        return None
    grad = 0 if options_of(call)["reduction"] == "none" else None
    return (grad, 0, None, *(None for _ in call.args[3:]))


def _pointwise_loss(call: relax.Call, axis: int, units: int) -> Axes | None:
    is_whole = options_of(call)["reduction"] != "none"
    return None if is_whole else _elementwise(call, axis, units)


RULES: dict[str, Rule] = {
    **{f"relax.{name}": _elementwise for name in f"{_UNARY} {_BINARY}".split()},
    "amp_ir.cast": _elementwise,
    **{f"amp_ir.{name}": _elementwise for name in ACTIVATIONS},
    "relax.reshape": _reshape,
    "relax.permute_dims": _permute_dims,
    "relax.strided_slice": _strided_slice,
    "relax.concat": _concat,
    "relax.nn.softmax": _row_wise,
    "relax.nn.log_softmax": _row_wise,
    "amp_ir.softmax_backward": _row_wise,
    "amp_ir.log_softmax_backward": _row_wise,
    "relax.gather_elements": _indexed,
    "relax.scatter_elements": _indexed,
    "amp_ir.scatter_add": _indexed,
    **{name: _reduction for name in (*_REDUCTIONS, "relax.argmax", "relax.argmin")},
    "relax.matmul": _matmul,
    **{name: _generator for name in _GENERATORS},
    "amp_ir.nll_loss_backward": _nll_loss_backward,
    **{f"amp_ir.{name}": _pointwise_loss for name in LOSSES},
    # The gradient of a loss that is reduced is a number, of one that is not a tensor.
    **{f"amp_ir.{name}_backward": _elementwise for name in LOSSES},
}


def _summed_matmul(call: relax.Call, _given: Axes) -> Axes | None:
    return (1, 0) if all(len(shape_of(one)) == 2 for one in call.args) else None


def _summed_reduction(call: relax.Call, given: Axes) -> Axes | None:
    return given if given[0] in _reduced_axes(call) else None


def _summed_nll_loss(call: relax.Call, _given: Axes) -> Axes | None:
    if class_axis(shape_of(call.args[0])) == 0:
        return None
    return (0, 0, *(None for _ in call.args[2:]))


def _summed_loss(call: relax.Call, given: Axes) -> Axes | None:
    """Split rows of prediction and target along one axis, since they have one shape."""
    known = [axis for axis in given if axis is not None]
    is_summed = options_of(call)["reduction"] != "none"
    return (known[0],) * len(call.args) if is_summed else None


_SUMS: dict[str, Callable[[relax.Call, Axes], Axes | None]] = {
    "relax.matmul": _summed_matmul,
    "relax.sum": _summed_reduction,
    "relax.mean": _summed_reduction,
    "amp_ir.nll_loss": _summed_nll_loss,
    **{f"amp_ir.{name}": _summed_loss for name in LOSSES},
}
