# SPDX-License-Identifier: Apache-2.0
"""Kernels that differ only by where they start to read become one that is told where.

An unrolled recurrence reads step t of a sequence in a kernel of its own, for every t: the same
code but for one number. Compiling it once takes LLVM a fraction of the time.
"""

from __future__ import annotations

from typing import Any

import attrs
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir.expr import TensorLoad

from amp_ir.ir.dataflow import Dataflow
from amp_ir.loops.fusion.fuse import typed

KERNEL_CALL = "relax.call_tir"


@attrs.frozen(eq=False)
class _Template:
    """A kernel with a variable for every distance that it adds to a place it reads.

    `function` takes them last; `distances` are what this kernel has for them.
    """

    function: tirx.PrimFunc
    variables: list[tirx.Var]
    distances: list[int]

    @classmethod
    def of(cls, function: tirx.PrimFunc) -> _Template:
        """The template of a kernel."""
        variables: list[tirx.Var] = []
        distances: list[int] = []

        def opened(index: Any, unit: int = 1) -> Any:
            """The index with a variable for each distance, in units of so many elements."""
            if isinstance(index, tirx.Ramp):
                # Vectors start at multiples of their length, and code generation must see that.
                lanes = int(index.lanes)
                return tirx.Ramp(opened(index.base, lanes), index.stride, lanes)
            if isinstance(index, tirx.Add):
                return tirx.Add(opened(index.a, unit), opened(index.b, unit))
            if isinstance(index, tirx.Mul):
                return tirx.Mul(opened(index.a), index.b)
            if isinstance(index, tirx.IntImm) and str(index.ty.dtype) == "int32":
                if int(index.value) % unit:
                    return index
                variables.append(tirx.Var(f"start{len(variables)}", "int32"))
                distances.append(int(index.value) // unit)
                return variables[-1] * unit if unit > 1 else variables[-1]
            # What is below a division stays as it is: without it, lanes may fall in several rows.
            return index

        def opened_load(load: TensorLoad) -> TensorLoad:
            return tirx.BufferLoad(load.source, [opened(index) for index in load.indices])

        body = tvm_ffi.structural_map(function.body, (TensorLoad, opened_load))
        return cls(_with_body(function, body, variables), variables, distances)


def share_kernels(ir: tvm.IRModule) -> tvm.IRModule:
    """Write kernels that differ only by distances that they add to what they read once.

    Before:  a = call_tir(kernel_1, (x,)); b = call_tir(kernel_2, (x,))   # x[16 + i], x[32 + i]
    After:   a = call_tir(kernel_1, (x, 16)); b = call_tir(kernel_1, (x, 32))

    Requires: `fuse_loops` has run.
    Ensures:  every element is computed by the same arithmetic on the same elements; the numbers
              follow the tensors that a kernel reads, as int32 parameters.
    """
    main = ir.get_global_var("main")
    kernels = {
        variable: function
        for variable, function in ir.functions.items()
        if isinstance(function, tirx.PrimFunc)
    }
    flow = Dataflow(ir)
    read_counts = _read_counts(flow)
    replaced: dict[tvm.ir.GlobalVar, tuple[tvm.ir.GlobalVar, list[int]]] = {}
    shared: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
    for family in _families(kernels):
        first = next(iter(family))
        function, distances = _merged(list(family.values()), read_counts[first])
        shared[first] = function.with_attr("global_symbol", first.name_hint)
        for variable, own in zip(family, distances, strict=True):
            replaced[variable] = (first, own)
    if not replaced:
        return ir
    kept = {
        variable: shared.get(variable, function)
        for variable, function in ir.functions.items()
        if variable not in replaced or variable in shared
    }
    kept[main] = _with_calls(flow, replaced)["main"]
    return tvm.IRModule(kept, attrs=ir.attrs)


def _families(
    kernels: dict[tvm.ir.GlobalVar, tirx.PrimFunc],
) -> list[dict[tvm.ir.GlobalVar, _Template]]:
    """The kernels of equal templates, where there are several."""
    by_hash: dict[int, list[dict[tvm.ir.GlobalVar, _Template]]] = {}
    for variable, function in kernels.items():
        template = _Template.of(function)
        if not template.variables:
            continue
        alike = by_hash.setdefault(tvm_ffi.structural_hash(template.function), [])
        for family in alike:
            other = next(iter(family.values()))
            if tvm_ffi.structural_equal(other.function, template.function):
                family[variable] = template
                break
        else:
            alike.append({variable: template})
    return [family for alike in by_hash.values() for family in alike if len(family) > 1]


def _read_counts(flow: Dataflow) -> dict[tvm.ir.GlobalVar, int]:
    """How many tensors each kernel reads."""
    calls = flow.calls(KERNEL_CALL).values()
    return {call.args[0]: len(call.args[1].fields) for call in calls}


def _merged(family: list[_Template], read_count: int) -> tuple[tirx.PrimFunc, list[list[int]]]:
    """One function with a parameter for every distance that varies, and each member's distances.

    Distances that are the same in all members stay literals, which the compiler knows more of;
    those that always agree are one parameter.
    """
    first = family[0]
    columns = list(zip(*(one.distances for one in family), strict=True))
    parameters: dict[tuple[int, ...], tirx.Var] = {}
    known: dict[tirx.Var, Any] = {}
    for variable, column in zip(first.variables, columns, strict=True):
        if len(set(column)) == 1:
            known[variable] = tirx.const(column[0], "int32")
        else:
            known[variable] = parameters.setdefault(column, variable)
    body = tvm_ffi.structural_map(first.function.body, (tirx.Var, lambda one: known.get(one, one)))
    tensors = list(first.function.params)[: len(first.function.params) - len(first.variables)]
    taken = [*tensors[:read_count], *parameters.values(), *tensors[read_count:]]
    function = tirx.PrimFunc(taken, body, first.function.ret_type, first.function.attrs)
    return function, [[column[k] for column in parameters] for k in range(len(family))]


def _with_body(
    function: tirx.PrimFunc, body: tirx.Stmt, variables: list[tirx.Var]
) -> tirx.PrimFunc:
    """The function with another body and more parameters, without its name."""
    made = tirx.PrimFunc([*function.params, *variables], body, function.ret_type, function.attrs)
    return made.without_attr("global_symbol")


def _with_calls(
    flow: Dataflow, replaced: dict[tvm.ir.GlobalVar, tuple[tvm.ir.GlobalVar, list[int]]]
) -> tvm.IRModule:
    calls = flow.calls(KERNEL_CALL)
    bindings = []
    for binding in flow.bindings:
        call = calls.get(binding.var)
        if call is not None and call.args[0] in replaced:
            shared, distances = replaced[call.args[0]]
            numbers = [relax.prim_value(one) for one in distances]
            arguments = [shared, relax.Tuple([*call.args[1].fields, *numbers])]
            new = relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span)
            binding = relax.VarBinding(binding.var, typed(new, call.ty))
        bindings.append(binding)
    return flow.finish(bindings)
