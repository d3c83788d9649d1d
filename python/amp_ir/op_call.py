# SPDX-License-Identifier: Apache-2.0
"""Calls in Relax: which op they call, and the same call of other arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax
from tvm.ir import Op


def op_name(expr: Any) -> str:
    """The name of the op that `expr` calls; "" where it calls none."""
    is_op = isinstance(expr, relax.Call) and isinstance(expr.op, Op)
    return str(expr.op.name) if is_op else ""


def with_arguments(
    call: relax.Call, args: Sequence[relax.Expr], ty: relax.Type | None = None
) -> relax.Call:
    """A new call of the same op with `args`, its options and location; `ty` if that changes."""
    result = call.ty if ty is None else ty
    return relax.Call(call.op, list(args), call.attrs, call.ty_args, call.span, result)
