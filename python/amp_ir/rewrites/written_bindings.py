# SPDX-License-Identifier: Apache-2.0
"""The bindings that a rewrite writes, one after the other."""

from __future__ import annotations

import attrs
import tvm
from tvm import relax


@attrs.define(eq=False)
class WrittenBindings:
    """Bindings in order; new variables are numbered by their place."""

    bindings: list[relax.VarBinding] = attrs.field(factory=list)
    _builder: relax.BlockBuilder = attrs.field(factory=relax.BlockBuilder)

    def bind(self, stem: str, expr: relax.Expr, span: tvm.ir.Span | None) -> relax.Var:
        """Bind an expression to a new variable; a call without a location gets `span`."""
        if isinstance(expr, relax.Call) and expr.span is None and span is not None:
            expr = relax.Call(expr.op, expr.args, expr.attrs, expr.ty_args, span)
        value = self._builder.normalize(expr)
        variable = relax.DataflowVar(f"{stem}_{len(self.bindings)}", value.ty)
        self.bindings.append(relax.VarBinding(variable, value))
        return variable

    def bind_fields(
        self, stem: str, call: relax.Call, span: tvm.ir.Span | None, count: int | None = None
    ) -> list[relax.Var]:
        """Bind a call and its first `count` results; None: as many as it has arguments."""
        whole = self.bind(stem, call, span)
        return [
            self.bind(f"{stem}_{k}", relax.TupleGetItem(whole, k), None)
            for k in range(len(call.args) if count is None else count)
        ]
