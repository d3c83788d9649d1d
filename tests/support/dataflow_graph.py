# SPDX-License-Identifier: Apache-2.0
"""A program as the graph of its nodes, without names and the order of independent bindings."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import GenericConst

from amp_ir.ir.dataflow import Dataflow, op_name


def nodes_of(ir: tvm.IRModule) -> list[str]:
    """Every node as text, operands by number, in the order in which the result reaches them."""
    flow = Dataflow(ir)
    numbers: dict[object, int] = {one: k for k, one in enumerate(flow.main.params)}
    nodes = [f"input {one.ty}" for one in flow.main.params]

    def visit(expr: relax.Expr) -> str:
        if isinstance(expr, relax.Var):
            if expr not in numbers:
                text = visit(flow.values[expr])
                numbers[expr] = len(nodes)
                nodes.append(f"{text} : {expr.ty}")
            return f"%{numbers[expr]}"
        if isinstance(expr, relax.Call):
            return f"{op_name(expr)}({', '.join(map(visit, expr.args))}) {expr.attrs}"
        if isinstance(expr, relax.Tuple):
            return f"({', '.join(map(visit, expr.fields))})"
        if isinstance(expr, relax.TupleGetItem):
            return f"{visit(expr.tuple_value)}[{expr.index}]"
        if isinstance(expr, GenericConst):
            value = expr.value.numpy()
            return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
        return str(expr)

    return [*nodes, visit(flow.result)]
