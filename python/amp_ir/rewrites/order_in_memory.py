# SPDX-License-Identifier: Apache-2.0
"""Compute on the state in the order that its dimensions have in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import tvm
from tvm import relax

from amp_ir.ir.dataflow import Dataflow, op_name, replaced, with_arguments
from amp_ir.ir.elementwise_ops import is_elementwise
from amp_ir.ir.memory_order import extents_in_memory, inverse
from amp_ir.ir.static_shape import extents_of, shape_of
from amp_ir.ir.step_module import Signature
from amp_ir.ir.strided_view import permutation

Order = tuple[int, ...]


def order_in_memory(ir: tvm.IRModule, signature: Signature) -> tvm.IRModule:
    """Give inputs and outputs that are not contiguous the extents that they have in memory.

    Before:  main(w [o, i, 3, 3], lr): d = conv_backward_weight(...)         # w is in channels_last
             s = multiply(d, lr); w1 = subtract(w, s); return (w1,)
    After:   main(m [o, 3, 3, i], lr): d = conv_backward_weight(...)
             e = permute_dims(d, [0, 2, 3, 1]); s = multiply(e, lr)
             m1 = subtract(m, s); return (m1,)

    What reads `w` otherwise reads permute_dims(m, [0, 3, 1, 2]), which libraries read in place.

    Requires: one function `main`, one dataflow block that ends in the tuple of the outputs.
    Ensures:  the signature, whose extents are the user's, stays as it is. Elementwise ops that
              lead to such an output, or begin at such an input, are in its order.
    """
    orders = [one.order for one in signature.inputs]
    written = [
        one.order if one.updates is None else orders[one.updates] for one in signature.outputs
    ]
    return _Writer(Dataflow(ir), orders, written).run() if any((*orders, *written)) else ir


@attrs.frozen(eq=False)
class _Writer:
    """The program that is written: `forms` are the values that it has in memory's order."""

    flow: Dataflow
    orders: Sequence[Order]
    written: Sequence[Order]
    bindings: list[relax.Binding] = attrs.field(factory=list)
    forms: dict[relax.Var, tuple[relax.Var, Order]] = attrs.field(factory=dict)
    read: dict[relax.Var, relax.Expr] = attrs.field(factory=dict)

    def run(self) -> tvm.IRModule:
        parameters = []
        for parameter, order in zip(self.flow.main.params, self.orders, strict=True):
            if order:
                type_ = _type_in_memory(parameter.ty, order)
                parameters.append(relax.Var(parameter.name, type_, parameter.span))
                self._add_form(parameter, parameters[-1], order)
            else:
                parameters.append(parameter)
        wanted = self._wanted()
        for binding in self.flow.bindings:
            variable, value = binding.var, binding.value
            needed = self._order_of(variable, value, wanted)
            if needed is not None and is_elementwise(value):
                moved = self._bind(variable, self._elementwise(value, needed))
                self._add_form(variable, moved, needed)
                continue
            self.bindings.append(relax.VarBinding(variable, replaced(value, self.read)))
            if needed is not None:
                self._in_order(variable, needed)
        fields = [
            self._in_order(field, order) if order else replaced(field, self.read)
            for field, order in zip(self.flow.fields, self.written, strict=True)
        ]
        return self.flow.finish(self.bindings, relax.Tuple(fields), parameters=parameters)

    def _wanted(self) -> dict[relax.Var, Order]:
        """Return the orders of the values from which outputs are computed element by element."""
        wanted = {f: o for f, o in zip(self.flow.fields, self.written, strict=True) if o}
        for binding in reversed(self.flow.bindings):
            order = wanted.get(binding.var)
            if order is not None and is_elementwise(binding.value):
                for one in _of_shape(binding.value, shape_of(binding.var)):
                    wanted.setdefault(one, order)
        return wanted

    def _order_of(
        self, variable: relax.Var, value: relax.Expr, wanted: dict[relax.Var, Order]
    ) -> Order | None:
        """Return the order in which a value is computed, or is needed; None for the usual one."""
        if not is_elementwise(value):
            return wanted.get(variable)
        shape = shape_of(variable)
        if not all(_fits(one, shape) for one in value.args):
            return None
        known = [self.forms[one][1] for one in _of_shape(value, shape) if one in self.forms]
        return wanted.get(variable, next(iter(known), None))

    def _elementwise(self, call: relax.Call, order: Order) -> relax.Call:
        shape = shape_of(call)
        args = [
            self._in_order(one, order) if _is_of_shape(one, shape) else replaced(one, self.read)
            for one in call.args
        ]
        return with_arguments(call, args, _type_in_memory(call.ty, order))

    def _in_order(self, value: relax.Expr, order: Order) -> relax.Expr:
        """Return a value in an order, permuted where it is not known in it."""
        known = self.forms.get(value) if isinstance(value, relax.Var) else None
        if known is not None and known[1] == order:
            return known[0]
        type_ = _type_in_memory(value.ty, order)
        call = _permuted(replaced(value, self.read), order, type_)
        if not isinstance(value, relax.Var):
            return self._bind_as("constant", call)
        unmoved = self._unmoved(value, order)
        moved = self._bind(value, call) if unmoved is None else unmoved
        if known is None:
            self.forms[value] = moved, order
        return moved

    def _unmoved(self, value: relax.Var, order: Order) -> relax.Var | None:
        """Return the value that permuting this one gives back, as a matmul's before its `.t()`."""
        source = self.flow.values.get(value)
        if source is None or op_name(source) != "relax.permute_dims":
            return None
        axes, before = permutation(source), source.args[0]
        is_back = [axes[d] for d in order] == sorted(axes) and isinstance(before, relax.Var)
        return before if is_back and before not in self.read else None

    def _add_form(self, variable: relax.Var, moved: relax.Var, order: Order) -> None:
        """Record what a value is in memory, of which others read a view."""
        self.forms[variable] = moved, order
        view = self._bind_as(f"{variable.name}_view", _permuted(moved, inverse(order), variable.ty))
        self.read[variable] = view

    def _bind(self, variable: relax.Var, call: relax.Call) -> relax.Var:
        return self._bind_as(f"{variable.name}_moved", call)

    def _bind_as(self, name: str, call: relax.Call) -> relax.Var:
        new = relax.DataflowVar(name, call.ty, call.span)
        self.bindings.append(relax.VarBinding(new, call))
        return new


def _of_shape(call: relax.Call, shape: tuple[int, ...]) -> list[relax.Var]:
    return [one for one in call.args if isinstance(one, relax.Var) and _is_of_shape(one, shape)]


def _is_of_shape(value: relax.Expr, shape: tuple[int, ...]) -> bool:
    return isinstance(value.ty, relax.TensorType) and shape_of(value) == shape


def _fits(value: relax.Expr, shape: tuple[int, ...]) -> bool:
    """Return whether an argument is the same in every order, or can be put in one."""
    if not isinstance(value.ty, relax.TensorType):
        return not isinstance(value.ty, relax.TupleType)
    return math.prod(shape_of(value)) == 1 or shape_of(value) == shape


def _type_in_memory(type_: relax.TensorType, order: Order) -> relax.TensorType:
    return relax.TensorType(extents_in_memory(extents_of(type_), order), type_.dtype)


def _permuted(value: relax.Expr, order: Order, type_: relax.Type) -> relax.Call:
    call = relax.op.permute_dims(value, list(order))
    relax.expr._update_type(call, type_)
    return call
