# SPDX-License-Identifier: Apache-2.0
"""Calls of native library functions, which write their result into memory that they are given."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

# The position of the argument that a library function may write its result over.
WRITTEN_OVER = {"amp_ir.onednn.matmul_accumulate": 2}


def library_call(
    name: str, arguments: list[relax.Expr], type_: relax.Type, span: tvm.ir.Span | None
) -> relax.Call:
    """Return a call of `name` with `arguments`, followed by a buffer for each result of `type_`."""
    call = relax.Call(
        tvm.ir.Op.get("relax.call_dps_packed"),
        [relax.ExternFunc(name), relax.Tuple(arguments)],
        None,
        [type_],
        span,
    )
    relax.expr._update_type(call, type_)
    return call


def shape_argument(numbers: Sequence[int]) -> relax.ShapeExpr:
    """Return numbers in the form that a library function takes."""
    return relax.ShapeExpr([int(n) for n in numbers])
