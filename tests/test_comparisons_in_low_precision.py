# SPDX-License-Identifier: Apache-2.0
"""Comparisons of two tensors, the user's and those of gradients: autocast rounds neither side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_ir

Function = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Function] = {
    "amax": lambda v: v * v.amax(1, keepdim=True),
    "amin": lambda v: v * v.amin(-1, keepdim=True),
    "the largest magnitude": lambda v: v / (v.abs().amax((0, 1), keepdim=True) + 1),
    "max of all": lambda v: v * v.max(),
    "infinity norm": lambda v: v / (v.norm(float("inf"), dim=1, keepdim=True) + 1),
    "maximum": lambda v: torch.maximum(v, v.mean(1, keepdim=True)) * v,
    "ties": lambda v: torch.maximum(v, v.clone()) * v,
    "the largest three": lambda v: torch.where(v < v.topk(3).values[..., -1:], 0.0, v),
    "a comparison of the user's": lambda v: torch.where(
        v == v.amax(1, keepdim=True), v * v, 0.5 * v
    ),
}


@pytest.mark.parametrize("amp_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_float32(name: str, amp_dtype: str) -> None:
    weight = nn.Parameter(torch.randn(1, 1, 8))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        values = FUNCTIONS[name](x * weight)
        values.sum().backward()
        optimizer.step()
        return values.detach()

    x = torch.randn(3, 5, 8)
    train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype=amp_dtype)
    values = train(x)
    assert weight.grad is not None
    found = weight.grad.clone()
    expected = step(x)
    # A rounding of 2^-9 or 2^-12 of each of 15 terms, each of up to the largest magnitude squared.
    unit = 2.0**-8 if amp_dtype == "bfloat16" else 2.0**-11
    scale = float((x * weight.detach()).abs().amax().square() + 1)
    torch.testing.assert_close(values, expected, rtol=0, atol=4 * unit * scale)
    torch.testing.assert_close(found, weight.grad, rtol=0, atol=15 * unit * scale)
