# SPDX-License-Identifier: Apache-2.0
"""Attention as one op: `torch.ops.amp_ir.attention`, and its backward.

During a capture `torch.nn.functional.scaled_dot_product_attention` is the function defined here.
The CPU kernels are the reference implementation of the ops (plain PyTorch); only tests run them.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from amp_ir.capture.define_op import define_op

_SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout_p, bool is_causal, "
    "float scale) -> (Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? mask, float dropout_p, bool is_causal, float scale) -> (Tensor, Tensor, Tensor)"
)


def _wide(q: torch.Tensor) -> torch.dtype:
    """Return the dtype of scores and their logarithms."""
    return torch.promote_types(q.dtype, torch.float32)


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float
) -> torch.Tensor:
    """Return scaled and masked scores f32[b, h, s, t] (f64 for f64 arguments)."""
    wide = _wide(q)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * scale
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is None:
        return scores
    if mask.dtype is torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask.to(wide)


def _kept(scores: torch.Tensor, dropout_p: float) -> torch.Tensor | float:
    """Return dropout's factor of each probability: the same at every call, for tests."""
    if dropout_p == 0.0:
        return 1.0
    generator = torch.Generator(device=scores.device).manual_seed(0)
    uniform = torch.rand(scores.shape, generator=generator, device=scores.device)
    return (uniform >= dropout_p).to(scores.dtype) / (1.0 - dropout_p)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(q k^T scale + mask) v, and the logarithm of the softmax's denominators.

    Args:
        q: [b, h, s, d]; k: [b, h, t, d]; v: [b, h, t, e].
        mask: broadcasts to [b, h, s, t]; bool (True: attend) or floating (added).

    Returns:
        out [b, h, s, e] of q's dtype, lse f32[b, h, s] (f64 for f64). A row whose positions are all
        masked is zero with lse -inf.
    """
    scores = _scores(q, k, mask, is_causal, scale)
    lse = torch.logsumexp(scores, -1)
    weights = _probabilities(scores, lse) * _kept(scores, dropout_p)
    return (weights @ v.to(weights.dtype)).to(q.dtype).contiguous(), lse.to(_wide(q))


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    weights = torch.exp(scores - lse.to(scores.dtype).unsqueeze(-1))
    return torch.where(torch.isneginf(lse).unsqueeze(-1), torch.zeros_like(weights), weights)


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, each with its argument's shape and dtype."""
    scores = _scores(q, k, mask, is_causal, scale)
    kept = _kept(scores, dropout_p)
    weights = _probabilities(scores, lse)
    wide = weights.dtype
    grad, values = grad.to(wide), v.to(wide)
    dot = (grad * out.to(wide)).sum(-1, keepdim=True)
    products = weights * (grad @ values.transpose(-1, -2) * kept - dot) * scale
    dq = products @ k.to(wide)
    dk = products.transpose(-1, -2) @ q.to(wide)
    dv = (weights * kept).transpose(-1, -2) @ grad
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _attention_types(q: Any, k: Any, v: Any, *_options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=_wide(q))


def _backward_types(_grad: Any, q: Any, k: Any, v: Any, *_options: Any) -> tuple[Any, Any, Any]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


define_op(_SCHEMA, attention, _attention_types)
define_op(_BACKWARD_SCHEMA, attention_backward, _backward_types)


class _Attention(torch.autograd.Function):
    """The op with a derivative that is an op too; the second derivative is plain PyTorch."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, *options: Any) -> Any:
        out, lse = torch.ops.amp_ir.attention(q, k, v, mask, *options)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, mask, out, lse = ctx.saved_tensors
        nothing = (None,) * (1 + len(ctx.options))
        if torch.is_grad_enabled():
            gradients = _differentiable_backward(grad, q, k, v, mask, *ctx.options)
        else:
            gradients = torch.ops.amp_ir.attention_backward(
                grad, q, k, v, out, lse, mask, *ctx.options
            )
        return *gradients, *nothing


def _differentiable_backward(
    grad: Any, q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float
) -> Any:
    """Compute the backward with ops that autograd can differentiate again (create_graph=True)."""
    if dropout_p > 0.0:
        raise NotImplementedError(
            "a gradient of a gradient through scaled_dot_product_attention with dropout_p="
            f"{dropout_p}; set the model's attention dropout to 0, or use "
            "attn_implementation='eager'"
        )
    out, lse = attention(q, k, v, mask, 0.0, is_causal, scale)
    return attention_backward(grad, q, k, v, out, lse, mask, 0.0, is_causal, scale)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return `torch.nn.functional.scaled_dot_product_attention` as one op.

    The op has no gradient of a mask (a learnt bias): a mask that needs one uses plain PyTorch.
    """
    query, key, value, attn_mask = _under_autocast(query, key, value, attn_mask)
    if query.shape[-1] == 0:
        # Scores over a dimension of 0 elements are 0 at any scale, as over one element that is 0.
        query, key, scale = query.sum(-1, keepdim=True), key.sum(-1, keepdim=True), 1.0
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    if attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
        return _decomposed(query, key, value, attn_mask, dropout_p, is_causal, scale)
    leading = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    query, key, value = (_four_dimensional(x, leading) for x in (query, key, value))
    mask = _mask_of_four(attn_mask, leading)
    _check_types(query, key, value, mask)
    out = _Attention.apply(query, key, value, mask, float(dropout_p), is_causal, scale)
    return out.reshape(*leading, *out.shape[-2:])


def _under_autocast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """Cast as the user's torch.autocast region casts for attention."""
    query = tensors[0]
    assert query is not None
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x is not None and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        else x
        for x in tensors
    )  # fmt: skip


def _four_dimensional(x: torch.Tensor, leading: torch.Size) -> torch.Tensor:
    x = x.expand(*leading, *x.shape[-2:])
    if len(leading) == 2:
        return x
    heads = leading[-1] if leading else 1
    return x.reshape(math.prod(leading[:-1]), heads, *x.shape[-2:])


def _check_types(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """Refuse, as PyTorch's kernels do, what the op's types would leave to a later stage."""
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            f"scaled_dot_product_attention has a query of dtype {query.dtype}, a key of dtype "
            f"{key.dtype} and a value of dtype {value.dtype}; expected one dtype"
        )
    length = key.shape[-2]
    if query.shape[-1] != key.shape[-1] or length != value.shape[-2]:
        raise RuntimeError(
            f"scaled_dot_product_attention has a query of shape {tuple(query.shape)}, a key of "
            f"shape {tuple(key.shape)} and a value of shape {tuple(value.shape)}; expected as many "
            "features in query and key, and as many places in key and value"
        )
    scores = (*query.shape[:-1], length)
    if mask is None:
        return
    pairs = zip(reversed(mask.shape), reversed(scores), strict=False)
    if mask.dim() > len(scores) or any(one not in (1, extent) for one, extent in pairs):
        raise RuntimeError(
            f"attn_mask of scaled_dot_product_attention has shape {tuple(mask.shape)}, expected "
            f"one that broadcasts to {scores}"
        )


def _mask_of_four(mask: torch.Tensor | None, leading: torch.Size) -> torch.Tensor | None:
    """Return the mask with four dimensions; expand it only where ranks above four were folded."""
    if mask is None:
        return None
    if len(leading) > 2:
        mask = mask.expand(*leading, *mask.shape[-2:])
        return mask.reshape(math.prod(leading[:-1]), leading[-1], *mask.shape[-2:])
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask


def _decomposed(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float
) -> Any:
    """Compute attention by plain ops, in float32 between its arguments and its result.

    So does PyTorch's own decomposition, `_scaled_dot_product_attention_math`, for low arguments,
    and a `torch.autocast` region around it does not reach inside.
    """
    device = query.device.type
    is_region = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if is_region else contextlib.nullcontext():
        scores = _scores(query, key, mask, is_causal, scale)
        weights = torch.nn.functional.dropout(scores.softmax(-1), dropout_p)
        return (weights @ value.to(weights.dtype)).to(query.dtype)
