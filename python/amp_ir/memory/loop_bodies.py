# SPDX-License-Identifier: Apache-2.0
"""The bodies of loops as functions of the planned step, and the calls that run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax, tirx

from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.loop_call import SYMBOL
from amp_ir.ir.memory_plan import PlannedStep

_BODY_TYPE = relax.FuncType.opaque_func(ret=relax.TupleType([]))


class LoopBodies:
    """The planned bodies of a step's loops, by the names that their calls have."""

    def __init__(self, bodies: Mapping[str, PlannedStep]) -> None:
        self._bodies = bodies
        self._variables = {name: _global(name) for name in bodies}

    def call(
        self, name: str, arguments: Sequence[relax.Expr], span: tvm.ir.Span | None
    ) -> relax.Call:
        """Return the call that runs a body on (workspace, numbers, operands..., results...)."""
        # A body writes what its return value would be into a register of its caller's: a result
        # without a value has none.
        result = relax.AnyType()
        call = relax.Call(
            tvm.ir.Op.get("relax.call_builtin_with_ctx"),
            [relax.ExternFunc(SYMBOL), relax.Tuple([self._variables[name], *arguments])],
            None,
            [result],
            span,
        )
        relax.expr._update_type(call, result)
        return call

    def functions(self) -> dict[tvm.ir.GlobalVar, tirx.PrimFunc | relax.Function]:
        """Return the bodies, and their kernels under names of their own."""
        found: dict[tvm.ir.GlobalVar, tirx.PrimFunc | relax.Function] = {}
        for name, planned in self._bodies.items():
            renamed: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
            for variable, function in planned.ir.functions.items():
                if isinstance(function, tirx.PrimFunc):
                    own = f"{name}_{variable.name_hint}"
                    renamed[variable] = _global(own)
                    found[renamed[variable]] = function.with_attr("global_symbol", own)
            found[self._variables[name]] = _calling(planned.ir, renamed)
        return found


def _global(name: str) -> tvm.ir.GlobalVar:
    variable = tvm.ir.GlobalVar(name)
    relax.expr._update_type(variable, _BODY_TYPE)
    return variable


def _calling(
    ir: tvm.IRModule, renamed: Mapping[tvm.ir.GlobalVar, tvm.ir.GlobalVar]
) -> relax.Function:
    """Return a planned body whose kernels have other names; no body has a loop itself."""
    flow = Dataflow(ir)
    bindings = []
    for binding in flow.bindings:
        value = binding.value
        if isinstance(value.op, tvm.ir.GlobalVar):
            kernel = renamed[value.op]
            value = relax.Call(kernel, value.args, value.attrs, value.ty_args, value.span)
            relax.expr._update_type(value, binding.value.ty)
        bindings.append(relax.VarBinding(binding.var, value))
    body = relax.SeqExpr([relax.BindingBlock(bindings)], flow.result)
    return relax.Function(flow.main.params, body, relax.TupleType([]), is_pure=False)
