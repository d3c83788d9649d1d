# SPDX-License-Identifier: Apache-2.0
"""Simplify attention masks whose values are known when a step is compiled.

Models build a causal mask again in every step from the numbers of rows (transformers does, from
several conditions): such a mask depends on no input, and is equivalent to "causal".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import tvm
from tvm import relax

from amp_ir.errors import UnsupportedOpError
from amp_ir.ir.dataflow import live_bindings, variables_of
from amp_ir.ir.interpreter import interpret

# What is added to hide a place is -inf, or so low that its weight is 0 in float32 beside any score.
_HIDES = -1e30


def without_known_mask(
    options: Mapping[str, Any],
    mask: relax.Expr,
    bindings: Sequence[relax.VarBinding],
    scores: tuple[int, int],
) -> dict[str, bool]:
    """Return the options that change where `is_causal` is equivalent to a known mask.

    Args:
        options: of the op, with a mask.
        mask: what broadcasts to [..., rows, columns]: bool, or added to the scores.
        bindings: those before the op, in order.
        scores: rows and columns.

    Returns nothing where the mask is not known, or hides anything else.
    """
    visible = _visible(mask, bindings)
    if visible is None:
        return {}
    rows, columns = scores
    lower = torch.ones(rows, columns, dtype=torch.bool).tril()
    visible = visible.expand(*visible.shape[:-2], rows, columns)
    if options["is_causal"]:
        visible = visible & lower
    if bool(visible.all()):
        return {"has_mask": False, "is_causal": False}
    if rows == columns and bool((visible == lower).all()):
        return {"has_mask": False, "is_causal": True}
    return {}


def _visible(mask: relax.Expr, bindings: Sequence[relax.VarBinding]) -> torch.Tensor | None:
    """Return the visible places, bool, at least 2 axes; None where the mask is not known."""
    needed = live_bindings(bindings, mask)
    defined = {binding.var for binding in needed}
    read = {one for expr in (*(b.value for b in needed), mask) for one in variables_of(expr)}
    if not read <= defined:
        return None
    body = relax.SeqExpr([relax.BindingBlock(needed)], mask)
    try:
        (value,) = interpret(tvm.IRModule({"main": relax.Function([], body, mask.ty)}), [])
    except UnsupportedOpError:
        return None
    value = value.reshape((1,) * (2 - value.ndim) + tuple(value.shape))
    if value.dtype == torch.bool:
        return value
    hidden = value <= _HIDES
    return ~hidden if bool((hidden | (value == 0)).all()) else None
