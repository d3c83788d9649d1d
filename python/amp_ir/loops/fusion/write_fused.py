# SPDX-License-Identifier: Apache-2.0
"""The module after fusion: `main` with calls of kernels, and the functions of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

from amp_ir.ir.dataflow import DPS_CALL, KERNEL_CALL
from amp_ir.ir.location import join_spans
from amp_ir.loops.codegen.kernel import Emitter, Kernel
from amp_ir.loops.fusion.kernel_cache import KernelCache
from amp_ir.loops.fusion.origins import Origins
from amp_ir.loops.group import Group, storage_of
from amp_ir.loops.ir import Buffer, Constant, TensorSpec, Value


@attrs.define(eq=False)
class LibraryCall:
    """A library call, which stays: its binding, the values it reads, the buffers it fills."""

    call: relax.Call
    unit: int
    arguments: dict[int, Value]
    results: list[Buffer]


class FusedWriter:
    """Writer of the new `main` and of the kernels it calls."""

    def __init__(
        self, main: relax.Function, origins: Origins, emitter: Emitter, groups: KernelCache
    ) -> None:
        self.main = main
        self.origins = origins
        self.emitter = emitter
        self.groups = groups
        self.bindings: list[relax.Binding] = []
        self.names = {str(one.name) for one in main.params}
        self.expressions: dict[int, relax.Expr] = {}
        self.functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        self.known: dict[int, list[tuple[tirx.PrimFunc, tvm.ir.GlobalVar]]] = {}
        self.named: dict[int, tuple[tirx.PrimFunc, tvm.ir.GlobalVar]] = {}

    def unit(self, unit: Any) -> None:
        """Write the bindings of a group, a library call or an opaque kernel."""
        if isinstance(unit, LibraryCall):
            self._library_call(unit)
        elif isinstance(unit, Group):
            self._kernel(self.groups.of(unit), list(group_values_of(unit)))
        else:
            self._kernel(self.emitter.emit_opaque(unit), unit)

    def _kernel(self, kernel: Kernel, members: list[Any]) -> None:
        """Call a kernel; the call records the ops it computes, and their locations."""
        variable = self._function(kernel.function)
        arguments = relax.Tuple([self.expression(value) for value in kernel.inputs])
        # Memory that a kernel needs while it runs is one more result, which nothing reads.
        workspace = [Buffer(spec) for spec in kernel.workspace]
        types = [tensor_type(value.spec) for value in [*kernel.outputs, *workspace]]
        span = join_spans(self.origins.span(value) for value in members)
        ops = ",".join(dict.fromkeys(self.origins.op(value) for value in members))
        results = ",".join(self.origins.op(value) for value in kernel.outputs)
        made = sorted(members, key=lambda value: value.serial)
        computes = ",".join(dict.fromkeys(self.origins.variable(value) for value in made))
        stores = ",".join(dict.fromkeys(self.origins.variable(one) for one in kernel.outputs))
        notes = tvm.ir.make_node(
            "ir.DictAttrs", ops=ops, result_ops=results, computes=computes, stores=stores
        )
        call = relax.Call(
            tvm.ir.Op.get(KERNEL_CALL), [variable, arguments], notes,
            types if len(types) == 1 else [relax.TupleType(types)], span,
        )  # fmt: skip
        self._bind_results(call, [*kernel.outputs, *workspace])

    def _function(self, function: tirx.PrimFunc) -> tvm.ir.GlobalVar:
        """Return the name of a function; functions that are structurally equal share one."""
        if id(function) not in self.named:
            self.named[id(function)] = (function, self._name_of(function))
        return self.named[id(function)][1]

    def _name_of(self, function: tirx.PrimFunc) -> tvm.ir.GlobalVar:
        key = tvm_ffi.structural_hash(function)
        for other, variable in self.known.get(key, []):
            if tvm_ffi.structural_equal(other, function):
                return variable
        name = f"kernel_{len(self.functions)}"
        variable = tvm.ir.GlobalVar(name)
        self.known.setdefault(key, []).append((function, variable))
        self.functions[variable] = function.with_attr("global_symbol", name)
        return variable

    def _library_call(self, unit: LibraryCall) -> None:
        old = unit.call
        fields = [
            self.expression(unit.arguments[k]) if k in unit.arguments else field
            for k, field in enumerate(old.args[1].fields)
        ]
        # A tuple of one result, as a collective of one tensor has, is that result.
        types = old.ty_args if len(unit.results) > 1 else [tensor_type(unit.results[0].spec)]
        call = relax.Call(old.op, [old.args[0], relax.Tuple(fields)], old.attrs, types, old.span)
        self._bind_results(call, list(unit.results))

    def _bind_results(self, call: relax.Call, values: list[Any]) -> None:
        type_ = call.ty_args[0] if len(values) > 1 else tensor_type(values[0].spec)
        is_kernel = call.op.name != DPS_CALL
        spans = [self.origins.span(value) if is_kernel else call.span for value in values]
        span = spans[0] if len(values) == 1 else None
        name = self._new_name(values[0] if len(values) == 1 else None)
        variable = relax.DataflowVar(name, type_, span)
        self.bindings.append(relax.VarBinding(variable, typed(call, type_)))
        if len(values) == 1:
            self.expressions[id(values[0])] = variable
            return
        for k, value in enumerate(values):
            field = relax.DataflowVar(self._new_name(value), tensor_type(value.spec), spans[k])
            item = typed(relax.TupleGetItem(variable, k), tensor_type(value.spec))
            self.bindings.append(relax.VarBinding(field, item))
            self.expressions[id(value)] = field

    def expression(self, value: Value) -> relax.Expr:
        """Return the expression whose memory a materialised value has; scalars get some."""
        owner = storage_of(value)
        known = self.expressions.get(id(owner))
        if known is not None:
            return known
        if isinstance(owner, Constant):
            return relax_constant(owner)
        assert isinstance(owner, Buffer) and owner.source is not None, owner
        return owner.source

    def finish(self, results: Any, old: tvm.IRModule) -> tvm.IRModule:
        """Return the module whose `main` returns `results`."""
        fields = []
        for value in flat_values(results):
            fields.append(self._result(value))
        body = relax.Tuple(fields)
        type_ = relax.TupleType([field.ty for field in fields])
        output = relax.Var("results", type_)
        self.bindings.append(relax.VarBinding(output, typed(body, type_)))
        block = relax.DataflowBlock(self.bindings)
        function = relax.Function(
            self.main.params, relax.SeqExpr([block], output), type_, is_pure=True,
            attrs=self.main.attrs,
        )  # fmt: skip
        functions = {**self.functions, tvm.ir.GlobalVar("main"): function}
        return tvm.IRModule(functions, attrs=old.attrs)

    def _result(self, value: Value) -> relax.Expr:
        owner = storage_of(value)
        expression = self.expression(owner)
        type_ = tensor_type(value.spec)
        if tuple(owner.shape) == tuple(value.shape):
            return expression
        shape = relax.ShapeExpr(list(value.shape))
        call = typed(
            relax.Call(tvm.ir.Op.get("relax.reshape"), [expression, shape]), type_
        )  # fmt: skip
        variable = relax.DataflowVar(self._new_name(None), type_)
        self.bindings.append(relax.VarBinding(variable, call))
        return variable

    def _new_name(self, value: Value | None) -> str:
        """Return the name that a value had before fusion, or a new one, for it is written once."""
        name = "" if value is None else self.origins.result_of(value)
        if not name or name in self.names:
            name = f"v{len(self.bindings)}"
        self.names.add(name)
        return name


def group_values_of(group: Group) -> Iterator[Value]:
    """Return the values of a group: those it stores first, then the rest, each once."""
    yield from {id(value): value for value in [*group.stored, *group.members]}.values()


def tensor_type(spec: TensorSpec) -> relax.TensorType:
    """Return the Relax type of a spec."""
    return relax.TensorType(list(spec.shape), spec.dtype)


def typed(expr: relax.Expr, type_: relax.Type) -> relax.Expr:
    """Give the expression this type, unless it has one."""
    if expr.ty.is_missing():
        relax.expr._update_type(expr, type_)
    return expr


def flat_values(values: Any) -> list[Value]:
    """Return the values of nested tuples, in order."""
    if isinstance(values, tuple):
        return [leaf for value in values for leaf in flat_values(value)]
    return [values]


def relax_constant(value: Constant) -> relax.Expr:
    """Return the constant of Relax for a scalar constant."""
    return relax.const(np.full(value.shape, value.number), value.dtype)
