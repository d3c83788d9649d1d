# SPDX-License-Identifier: Apache-2.0
"""Share kernels that differ only in load offsets: one kernel takes the offsets as parameters.

An unrolled recurrence reads step t of a sequence in a kernel of its own, for every t: the same
code but for one number. LLVM compiles the shared kernel in a fraction of the time.
"""

from __future__ import annotations

from typing import Any

import attrs
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir.expr import TensorLoad

from amp_ir.ir.dataflow import KERNEL_CALL, Dataflow
from amp_ir.loops.fusion.write_fused import typed


@attrs.frozen(eq=False)
class _Template:
    """A kernel with a variable for every load offset that it adds to a position it reads.

    `function` takes them last; `offsets` are the values of this kernel.
    """

    function: tirx.PrimFunc
    variables: list[tirx.Var]
    offsets: list[int]

    @classmethod
    def of(cls, function: tirx.PrimFunc) -> _Template:
        """Return the template of a kernel."""
        variables: list[tirx.Var] = []
        offsets: list[int] = []

        def opened(index: Any, unit: int = 1) -> Any:
            """Return the index with a variable for each offset, in units of so many elements."""
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
                offsets.append(int(index.value) // unit)
                return variables[-1] * unit if unit > 1 else variables[-1]
            # What is below a division stays as it is: without it, lanes may fall in several rows.
            return index

        def opened_load(load: TensorLoad) -> TensorLoad:
            return tirx.BufferLoad(load.source, [opened(index) for index in load.indices])

        body = tvm_ffi.structural_map(function.body, (TensorLoad, opened_load))
        return cls(_with_body(function, body, variables), variables, offsets)


def share_kernels(ir: tvm.IRModule) -> tvm.IRModule:
    """Write kernels once that differ only in the load offsets they add to what they read.

    Before:  a = call_tir(kernel_1, (x,)); b = call_tir(kernel_2, (x,))   # x[16 + i], x[32 + i]
    After:   a = call_tir(kernel_1, (x, 16)); b = call_tir(kernel_1, (x, 32))

    Requires: `fuse_loops` has run.
    Ensures:  every element is computed by the same arithmetic on the same elements; the numbers
              follow the tensors that a kernel reads, as int32 parameters. Kernels that nothing
              calls are gone.
    """
    main = ir.get_global_var("main")
    flow = Dataflow(ir)
    read_counts = _read_counts(flow)
    # Of values that nothing reads, fusion leaves the kernels, without a call.
    kernels = {variable: ir[variable] for variable in ir.functions if variable in read_counts}
    replaced: dict[tvm.ir.GlobalVar, tuple[tvm.ir.GlobalVar, list[int]]] = {}
    shared: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
    for members in _equal_templates(kernels):
        first = next(iter(members))
        function, offsets = _merged(list(members.values()), read_counts[first])
        shared[first] = function.with_attr("global_symbol", first.name_hint)
        for variable, own in zip(members, offsets, strict=True):
            replaced[variable] = (first, own)
    if not replaced and len(kernels) == len(ir.functions) - 1:
        return ir
    kept = {
        variable: shared.get(variable, function)
        for variable, function in kernels.items()
        if variable not in replaced or variable in shared
    }
    kept[main] = _with_calls(flow, replaced)["main"]
    return tvm.IRModule(kept, attrs=ir.attrs)


def _equal_templates(
    kernels: dict[tvm.ir.GlobalVar, tirx.PrimFunc],
) -> list[dict[tvm.ir.GlobalVar, _Template]]:
    """Return the sets of kernels with equal templates, where there are several."""
    by_hash: dict[int, list[dict[tvm.ir.GlobalVar, _Template]]] = {}
    for variable, function in kernels.items():
        template = _Template.of(function)
        if not template.variables:
            continue
        same_hash = by_hash.setdefault(tvm_ffi.structural_hash(template.function), [])
        for members in same_hash:
            other = next(iter(members.values()))
            if tvm_ffi.structural_equal(other.function, template.function):
                members[variable] = template
                break
        else:
            same_hash.append({variable: template})
    return [members for same_hash in by_hash.values() for members in same_hash if len(members) > 1]


def _read_counts(flow: Dataflow) -> dict[tvm.ir.GlobalVar, int]:
    """Count the tensors that each kernel reads."""
    calls = flow.calls(KERNEL_CALL).values()
    return {call.args[0]: len(call.args[1].fields) for call in calls}


def _merged(members: list[_Template], read_count: int) -> tuple[tirx.PrimFunc, list[list[int]]]:
    """Return one function with a parameter for every offset that varies, and each member's offsets.

    Offsets that are the same in all members stay literals, which the compiler can fold; those that
    always agree are one parameter.
    """
    first = members[0]
    columns = list(zip(*(one.offsets for one in members), strict=True))
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
    return function, [[column[k] for column in parameters] for k in range(len(members))]


def _with_body(
    function: tirx.PrimFunc, body: tirx.Stmt, variables: list[tirx.Var]
) -> tirx.PrimFunc:
    """Return the function with another body and more parameters, without its name."""
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
            shared, offsets = replaced[call.args[0]]
            numbers = [relax.prim_value(one) for one in offsets]
            arguments = [shared, relax.Tuple([*call.args[1].fields, *numbers])]
            new = relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span)
            binding = relax.VarBinding(binding.var, typed(new, call.ty))
        bindings.append(binding)
    return flow.finish(bindings)
