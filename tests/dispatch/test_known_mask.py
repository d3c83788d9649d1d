# SPDX-License-Identifier: Apache-2.0
"""Masks that a step makes of nothing but numbers of rows, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm
from tvm import relax
from tvm.relax import op as R

import amp_ir
from amp_ir.dialect.registry import call_op
from amp_ir.dispatch.decompose_attention import decompose_attention
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import read
from amp_ir.rewrites.fold_casts import fold_casts
from relax_functions import build

CAUSAL, FULL, KEPT = {"is_causal": True}, {"is_causal": False}, None


def emit(expr: relax.Expr) -> relax.Var:
    return relax.BlockBuilder.current().emit(expr)


def rows(n: int, *shape: int) -> relax.Expr:
    return emit(R.reshape(emit(R.arange(0, n, 1, "int64")), shape))


def causal(s: int, t: int, _x: Any) -> relax.Expr:
    return emit(R.less_equal(rows(t, 1, 1, 1, t), rows(s, 1, 1, s, 1)))


def strictly_lower(s: int, t: int, _x: Any) -> relax.Expr:
    return emit(R.less(rows(t, 1, 1, 1, t), rows(s, 1, 1, s, 1)))


def added(s: int, t: int, x: Any) -> relax.Expr:
    hidden = relax.const(float("-inf"), "float32")
    return emit(R.where(causal(s, t, x), relax.const(0.0, "float32"), hidden))


def biased(s: int, t: int, x: Any) -> relax.Expr:
    return emit(
        R.where(causal(s, t, x), relax.const(0.5, "float32"), relax.const(-1e38, "float32"))
    )


def everything(s: int, t: int, _x: Any) -> relax.Expr:
    return emit(R.less(rows(t, 1, t), relax.const(t, "int64")))


def of_an_input(s: int, t: int, x: Any) -> relax.Expr:
    return emit(R.logical_and(causal(s, t, x), x))


def attention(
    mask: Callable[[int, int, Any], relax.Expr], *, keys: int = 6, is_causal: bool = False
) -> tvm.IRModule:
    def body(q: Any, k: Any, grad: Any, lse: Any, visible: Any) -> Any:
        options = {"has_mask": True, "dropout_p": 0.0, "index": 0, "is_causal": is_causal,
                   "scale": 0.25}  # fmt: skip
        given = mask(6, keys, visible)
        both = emit(call_op("amp_ir.attention", [q, k, k, given], **options))
        out = emit(relax.TupleGetItem(both, 0))
        backward = call_op("amp_ir.attention_backward", [grad, q, k, k, out, lse, given], **options)
        return out, emit(relax.TupleGetItem(emit(backward), 1))

    low = "bfloat16"
    return build(
        [((2, 3, 6, 16), low), ((2, 3, keys, 16), low), ((2, 3, 6, 16), low),
         ((2, 3, 6), "float32"), ((2, 1, 6, keys), "bool")],
        body,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "options", "expected"),
    [
        (causal, {}, CAUSAL),
        (causal, {"is_causal": True}, CAUSAL),
        (causal, {"keys": 8}, KEPT),
        (added, {}, CAUSAL),
        (biased, {}, KEPT),
        (strictly_lower, {}, KEPT),
        (everything, {}, FULL),
        (everything, {"is_causal": True}, CAUSAL),
        (everything, {"keys": 8}, FULL),
        (of_an_input, {}, KEPT),
    ],
)
def test_a_known_mask_is_said_by_an_option(mask, options, expected):
    log = DispatchLog()
    ir = fold_casts(
        decompose_attention(attention(mask, **options), libraries=("torch_cuda",), log=log)
    )
    bindings = [b.value for block in ir["main"].body.blocks for b in block.bindings]
    calls = [v for v in bindings if isinstance(v, relax.Call) and "dps_packed" in v.op.name]
    notes = {note.library for note in log.notes}
    if expected is KEPT:
        assert not calls and notes == {"matmuls and own kernels"}
        return
    assert len(calls) == 2 and notes == {"torch_cuda"}
    for call in calls:
        assert read(call).is_causal == expected["is_causal"]
    # Nothing makes the mask any more.
    assert not [v for v in bindings if isinstance(v, relax.Call) and v.op.name == "relax.arange"]


def test_a_step_with_transformers_way_of_a_causal_mask():
    """Rows and columns compared in the step, as transformers' create_causal_mask does."""
    model = torch.nn.Linear(16, 48)

    def step(x: torch.Tensor) -> torch.Tensor:
        q, k, v = model(x).view(2, 6, 3, 16).unbind(2)
        place = torch.arange(6)
        mask = (place[None, :] <= place[:, None])[None, None].expand(2, 1, 6, 6)
        heads = (t[:, None] for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).sum()

    mod, args = amp_ir.trace_step(step, (torch.randn(2, 6, 16),), model=model)
    mod = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    log = DispatchLog()
    decompose_attention(mod.ir, libraries=("torch_cuda",), log=log)
    assert [str(note) for note in log.notes] == ["amp_ir.attention: 1 call -> torch_cuda"]
