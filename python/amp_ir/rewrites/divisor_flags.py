# SPDX-License-Identifier: Apache-2.0
"""Flag zero elements of integer divisors as indices that `check_indices.py` can check."""

from __future__ import annotations

from tvm import relax
from tvm.ir import GenericConst

from amp_ir.ir.dataflow import Dataflow, op_name

_DIVISIONS = ("relax.divide", "relax.floor_divide", "relax.mod", "relax.floor_mod")


def with_divisor_flags(
    flow: Dataflow,
) -> tuple[list[relax.VarBinding], dict[relax.Var, relax.Var]]:
    """Bind, beside each integer division, a flag where its divisor is 0.

    Before:  q = floor_divide(x, y)
    After:   is_zero = equal(y, 0); flag = astype(is_zero, "int32"); q = floor_divide(x, y)

    Returns:
        the bindings, and the flag of each division: int32, 1 where its divisor is 0.
    """
    builder = relax.BlockBuilder()
    bindings: list[relax.VarBinding] = []
    flags: dict[relax.Var, relax.Var] = {}

    def bind(call: relax.Call) -> relax.Var:
        value = builder.normalize(call)
        variable = relax.DataflowVar(f"divisor{len(bindings)}", value.ty)
        bindings.append(relax.VarBinding(variable, value))
        return variable

    for binding in flow.bindings:
        if _may_divide_by_zero(binding.value):
            divisor = binding.value.args[1]
            zero = relax.const(0, str(divisor.ty.dtype))
            is_zero = bind(relax.op.equal(divisor, zero))
            flags[binding.var] = bind(relax.op.astype(is_zero, "int32"))
        bindings.append(binding)
    return bindings, flags


def _may_divide_by_zero(value: relax.Expr) -> bool:
    if op_name(value) not in _DIVISIONS:
        return False
    divisor = value.args[1]
    if not str(divisor.ty.dtype).startswith(("int", "uint")):
        return False
    return not isinstance(divisor, GenericConst) or not divisor.value.numpy().all()
