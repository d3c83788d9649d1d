# SPDX-License-Identifier: Apache-2.0
"""Compute some rows of everything in a region: each op again, on fewer rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tvm import relax

from amp_ir.dialect.losses import LOSSES
from amp_ir.dialect.registry import call_op, options_of
from amp_ir.ir.static_shape import shape_of
from amp_ir.memory.chunking.row_region import RowRegion
from amp_ir.memory.chunking.row_rules import is_tensor

LOW_DTYPES = ("bfloat16", "float16")
# Ops with an argument that is the shape of the result.
_SHAPE_ARGUMENT = {
    "relax.reshape": 1, "relax.broadcast_to": 1, "relax.full": 0, "relax.zeros": 0, "relax.ones": 0,
}  # fmt: skip
_LOSS_GRADIENTS = tuple(f"amp_ir.{name}_backward" for name in LOSSES)


class Bindings:
    """Bindings in the order in which they are written, with their types."""

    def __init__(self) -> None:
        self.all: list[relax.VarBinding] = []
        self._builder = relax.BlockBuilder()

    def bind(self, variable: relax.Var, value: relax.Expr, origin: relax.Call) -> None:
        """Bind `variable` to a call, with the location of the op `origin` that it replaces."""
        self.all.append(relax.VarBinding(variable, self._typed(value, origin)))

    def emit(self, value: relax.Expr, origin: relax.Call, name: str) -> relax.Var:
        """Bind a new variable to a call."""
        typed = self._typed(value, origin)
        variable = relax.DataflowVar(name, typed.ty)
        self.all.append(relax.VarBinding(variable, typed))
        return variable

    def _typed(self, value: relax.Expr, origin: relax.Call) -> relax.Expr:
        if isinstance(value, relax.Call):
            args = [
                self.emit(one, origin, "inner") if isinstance(one, relax.Call) else one
                for one in value.args
            ]
            value = relax.Call(value.op, args, value.attrs, value.ty_args, origin.span)
        return self._builder.normalize(value)


def rows_of_call(
    call: relax.Call, arguments: Sequence[relax.Expr], axis: int, extent: int
) -> relax.Call:
    """Return the op on `extent` rows: `arguments` by row_axes, rows along `axis` of the result."""
    shape = shape_of(call)
    fewer = (*shape[:axis], extent, *shape[axis + 1 :])
    given, name, options = list(arguments), call.op.name, options_of(call)
    if name in _SHAPE_ARGUMENT:
        given[_SHAPE_ARGUMENT[name]] = relax.ShapeExpr(fewer)
    if "input_shape" in options:
        return call_op(name, given, **{**options, "input_shape": fewer})
    if name in _LOSS_GRADIENTS and options["reduction"] == "mean":
        # The op would divide by the number of elements that it sees.
        count = relax.const(float(math.prod(shape)), str(given[0].ty.dtype))
        shares = [relax.op.divide(given[0], count), *given[1:]]
        return call_op(name, shares, **{**options, "reduction": "sum"})
    return relax.Call(call.op, given, call.attrs, call.ty_args)


def part_of_sum(call: relax.Call, arguments: Sequence[relax.Expr]) -> relax.Call:
    """Return some rows' part of the op: a sum, also of a mean; float32 for low values."""
    options, given = options_of(call), list(arguments)
    if call.op.name == "relax.matmul":
        is_low = str(call.ty.dtype) in LOW_DTYPES
        return relax.op.matmul(*given, out_dtype="float32" if is_low else call.attrs.out_dtype)
    given = [
        call_op("amp_ir.cast", [one], dtype="float32")
        if is_tensor(one) and str(one.ty.dtype) in LOW_DTYPES
        else one
        for one in given
    ]
    if call.op.name == "relax.mean":
        return relax.op.sum(given[0], call.attrs.axis, call.attrs.keepdims)
    if options.get("reduction") == "mean":
        return call_op(call.op.name, given, **{**options, "reduction": "sum"})
    return relax.Call(call.op, given, call.attrs, call.ty_args)


class Chunk:
    """The rows of chunk `number` of `count`; chunks differ by one unit of rows at most."""

    def __init__(
        self,
        region: RowRegion,
        values: Mapping[relax.Var, relax.Expr],
        bindings: Bindings,
        number: int,
        count: int,
    ) -> None:
        self._region = region
        self._values = values
        self._bindings = bindings
        self._number = number
        self._first = region.units * number // count
        self._end = region.units * (number + 1) // count
        self._made: dict[relax.Var, relax.Var] = {}
        self._cut: dict[tuple[relax.Expr, int], relax.Var] = {}

    def add(self, variable: relax.Var) -> relax.Var:
        """Compute a variable of the region for these rows and return it."""
        value, region = self._values[variable], self._region
        if isinstance(value, relax.TupleGetItem):
            call = self._values[value.tuple_value]
            new: relax.Expr = relax.TupleGetItem(self._made[value.tuple_value], value.index)
        else:
            call = value
            axes = zip(call.args, region.axes[variable], strict=True)
            arguments = [self._rows(one, axis, call) for one, axis in axes]
            axis = region.sunk.get(variable, region.axis.get(variable))
            if axis is None:
                new = part_of_sum(call, arguments)
            else:
                begin, end = self._bounds(shape_of(call)[axis])
                new = rows_of_call(call, arguments, axis, end - begin)
        self._made[variable] = self._bindings.emit(new, call, self._name(variable.name))
        return self._made[variable]

    def _name(self, name: str) -> str:
        return f"{name}_rows{self._number}"

    def _rows(self, argument: relax.Expr, axis: int | None, call: relax.Call) -> relax.Expr:
        """Return these rows of an argument; all of it where `axis` is None."""
        if axis is None:
            return argument
        if isinstance(argument, relax.Tuple):
            return relax.Tuple([self._rows(field, axis, call) for field in argument.fields])
        if isinstance(argument, relax.Var) and argument in self._made:
            return self._made[argument]
        key = (argument, axis)
        if key not in self._cut:
            begin, end = self._bounds(shape_of(argument)[axis])
            rows = relax.op.strided_slice(argument, [axis], [begin], [end])
            name = argument.name if isinstance(argument, relax.Var) else "constant"
            self._cut[key] = self._bindings.emit(rows, call, self._name(name))
        return self._cut[key]

    def _bounds(self, extent: int) -> tuple[int, int]:
        each = extent // self._region.units
        return each * self._first, each * self._end
