# SPDX-License-Identifier: Apache-2.0
"""Who uses a value of a step, and how often."""

from __future__ import annotations

from tvm import relax

from amp_ir.variables import variables_of


def count_uses(bindings: list[relax.Binding], result: relax.Expr) -> dict[relax.Var, int]:
    """How often each variable is used by the bindings and by the result."""
    uses: dict[relax.Var, int] = {}
    for expr in (*(binding.value for binding in bindings), result):
        for variable in variables_of(expr):
            uses[variable] = uses.get(variable, 0) + 1
    return uses


def only_readers(
    bindings: list[relax.Binding], uses: dict[relax.Var, int], op_name: str
) -> dict[relax.Var, relax.Var]:
    """For each variable with a single use, which is by this op, the variable bound to that."""
    readers = {}
    for binding in bindings:
        value = binding.value
        if isinstance(value, relax.Call) and value.op.name == op_name:
            source = value.args[0]
            if isinstance(source, relax.Var) and uses.get(source) == 1:
                readers[source] = binding.var
    return readers
