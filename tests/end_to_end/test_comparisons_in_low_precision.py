# SPDX-License-Identifier: Apache-2.0
"""Comparisons of two tensors, the user's and those of gradients.

Autocast rounds neither side; in a model of low precision both are as PyTorch's memory has them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
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
    "place of the largest": lambda v: v * torch.take_along_dim(v, v.argmax(1, keepdim=True), 1),
    "place of the smallest": lambda v: v.min(1, keepdim=True)[0] * v,
    "large pools": lambda v: v * F.max_pool2d(v, (5, 5), 1, 2),
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


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float16, "fast"), (torch.bfloat16, "fast"), (torch.bfloat16, "strict")],
    ids=str,
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_low_model_compares_what_memory_holds(
    name: str, dtype: torch.dtype, rounding: str
) -> None:
    """The product is computed again where it is compared; its maximum comes from memory."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(1, 1, 8, dtype=dtype))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        values = FUNCTIONS[name](x * weight)
        values.sum().backward()
        optimizer.step()
        return values.detach()

    x = torch.randn(3, 5, 8, dtype=dtype)
    train = amp_ir.jit(step, model=model, optimizer=optimizer, rounding=rounding)
    values = train(x)
    assert weight.grad is not None
    found = weight.grad.clone()
    expected = step(x)
    # Each of 15 terms is rounded a few times on either side, and up to the square of the largest.
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    scale = float((x * weight.detach()).abs().amax().square() + 1)
    torch.testing.assert_close(values, expected, rtol=0, atol=4 * unit * scale)
    torch.testing.assert_close(found, weight.grad, rtol=0, atol=30 * unit * scale)


@pytest.mark.parametrize("function", [torch.isinf, torch.isfinite])
def test_what_is_infinite_in_float16_only(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.where(function(x * 300), x, 0.5)

    x = torch.tensor([1.0, 200.0, 300.0, -300.0], dtype=torch.float16)
    model = nn.Module()
    model.forward = forward
    mod, args = amp_ir.trace_model(model, (x,))
    torch.testing.assert_close(amp_ir.compile(mod)(*args), forward(x))


def test_the_place_of_the_largest_of_low_rows_that_are_widened() -> None:
    """Autocast makes the rows bfloat16; a value that is only widened is as low as they are."""
    torch.manual_seed(0)
    model = nn.Embedding(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        rows = model(ids)
        values = torch.take_along_dim(rows, rows.argmax(0, keepdim=True), 0)
        values.square().sum().backward()
        optimizer.step()
        return values.detach()

    ids = torch.tensor([2, 0])
    train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype="bfloat16")
    torch.testing.assert_close(train(ids), step(ids), rtol=2.0**-8, atol=0)
