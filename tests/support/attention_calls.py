# SPDX-License-Identifier: Apache-2.0
"""Calls of PyTorch's attention kernels."""

from __future__ import annotations

import torch

from amp_ir.host import native
from native_calls import layout, memory


def heads_inside(n: int, h: int, s: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, h, s, d] where the heads of a row lie behind each other, as a model makes them."""
    return torch.randn(n, s, h, d).to(dtype).transpose(1, 2)


def attend(q, k, v, *, is_causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    n, h, s, d = q.shape
    out = torch.full((n, s, h, d), float("nan"), dtype=q.dtype, device=q.device)
    lse = torch.full((n, h, s), float("nan"), device=q.device)
    native.function("amp_ir.torch_cuda.attention")(
        *map(memory, (q, k, v)), *layout(q), *layout(k), *layout(v), is_causal, scale, out, lse
    )
    return out.transpose(1, 2), lse


def attend_backward(grad, q, k, v, out, lse, *, is_causal: bool, scale: float):
    results = [torch.full_like(t.transpose(1, 2).contiguous(), float("nan")) for t in (q, k, v)]
    layouts = [one for t in (grad, q, k, v, out) for one in layout(t)]
    native.function("amp_ir.torch_cuda.attention_backward")(
        *map(memory, (grad, q, k, v, out)), lse, *layouts, is_causal, scale, *results
    )
    return [t.transpose(1, 2) for t in results]


def exact_attention(q, k, v, *, is_causal: bool, scale: float):
    scores = scale * (q.double() @ k.double().mT)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1) @ v.double(), torch.logsumexp(scores, -1)
