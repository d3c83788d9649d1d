# SPDX-License-Identifier: Apache-2.0
"""The step's function `main` with other bindings, as every rewrite of the step leaves it."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax


def with_bindings(
    main: relax.Function, bindings: Sequence[relax.Binding], result: relax.Expr | None = None
) -> relax.Function:
    """`main` with one dataflow block of `bindings`; `result` is what it returns, if another.

    Requires: `result` has the type that `main` returns.
    """
    block = relax.DataflowBlock(list(bindings))
    body = relax.SeqExpr([block], main.body.body if result is None else result)
    relax.expr._update_type(body, main.body.ty)
    return relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs, main.span)


def with_main(ir: tvm.IRModule, main: relax.Function) -> tvm.IRModule:
    """The module with another `main`; its other functions and attributes stay."""
    return tvm.IRModule({**ir.functions, ir.get_global_var("main"): main}, attrs=ir.attrs)
