# SPDX-License-Identifier: Apache-2.0
"""Tensors of shape [], which PyTorch lets be named by axis 0 or -1: ops along it, and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir

FIRST = torch.zeros((), dtype=torch.long)
CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flip": lambda x: x.flip(0),
    "flip of no axis": lambda x: x.flip([]),
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "amax": lambda x: x.amax(0),
    "var": lambda x: x.var(0),
    "std": lambda x: x.std(0, correction=0),
    "logsumexp": lambda x: x.logsumexp(0),
    "prod": lambda x: x.prod(0),
    "norm": lambda x: x.norm(1, dim=0),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "max": lambda x: x.max(0)[0],
    "min": lambda x: x.min(0, keepdim=True)[0],
    "sort": lambda x: x.sort(0)[0],
    "topk": lambda x: x.topk(1, 0)[0],
    "median": lambda x: x.median(0)[0],
    "kthvalue": lambda x: x.kthvalue(1, 0)[0],
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "index_select": lambda x: x.index_select(0, FIRST[None]),
    "gather": lambda x: x.gather(0, FIRST),
    "argmax": lambda x: x.argmax(0),
    "index_fill": lambda x: x.index_fill(0, FIRST[None], 0.25),
    "scatter": lambda x: torch.zeros_like(x).scatter(0, FIRST, x),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(0, FIRST, x),
    "transpose": lambda x: x.transpose(0, -1),
    "squeeze": lambda x: x.squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "flatten": lambda x: x.flatten(),
    "normalize": lambda x: F.normalize(x, dim=0),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 1, dim=0),
    "any": lambda x: (x > 0).any(0),
    "repeat_interleave": lambda x: x.repeat_interleave(2),
    "permute": lambda x: x.permute(()),
}


def _with_gradient(
    function: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    x = given.clone().requires_grad_()
    y = function(x)
    return (y, *torch.autograd.grad(y.sum(), x)) if y.requires_grad else (y,)


@pytest.mark.filterwarnings("ignore:(var|std)")
def test_ops_along_an_axis_of_a_number() -> None:
    def step(x: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
        return {name: _with_gradient(function, x) for name, function in CASES.items()}

    x = torch.tensor(1.5)
    found, expected = amp_ir.jit(step, model=nn.Linear(1, 1))(x), step(x)
    for name in CASES:
        torch.testing.assert_close(
            found[name], expected[name], equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
