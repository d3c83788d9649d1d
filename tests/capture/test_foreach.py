# SPDX-License-Identifier: Apache-2.0
"""`torch._foreach_*` with all of its arguments, by place and by name, beside eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import amp_ir

Lists = Callable[[torch.Tensor, torch.Tensor], Any]


def in_place(name: str, *args: Any, **named: Any) -> Lists:
    def call(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        tensors = [x.clone(), y.clone()]
        getattr(torch, name)(tensors, [y, x], [x.exp(), y.exp()], *args, **named)
        return tensors

    return call


CALLS: dict[str, Lists] = {
    "addcmul, number": lambda x, y: torch._foreach_addcmul([x, y], [y, x], [x, x], 0.3),
    "addcmul, value=": lambda x, y: torch._foreach_addcmul([x, y], [y, x], [x, x], value=-2),
    "addcmul, numbers": lambda x, y: torch._foreach_addcmul([x, y], [y, x], [x, x], [0.3, 0.7]),
    "addcmul, scalars=": lambda x, y: torch._foreach_addcmul(
        [x, y], [y, x], [x, x], scalars=[0.3, 0.7]
    ),
    "addcmul": lambda x, y: torch._foreach_addcmul([x, y], [y, x], [x, x]),
    "addcdiv, value=": lambda x, y: torch._foreach_addcdiv([x], [y], [x.exp()], value=0.3),
    "addcmul_, value=": in_place("_foreach_addcmul_", value=0.5),
    "addcdiv_, scalars=": in_place("_foreach_addcdiv_", scalars=[0.2, 0.9]),
    "pow of a number": lambda x, y: torch._foreach_pow(2.0, [x, y]),
    "pow": lambda x, y: torch._foreach_pow([x.exp(), y.exp()], [0.5, 3.0]),
    "norm": lambda x, y: torch._foreach_norm([x, y]),
    "norm in float64": lambda x, y: torch._foreach_norm([x, y], 1, dtype=torch.float64),
    "norm, ord=": lambda x, y: torch._foreach_norm([x, y], ord=float("inf")),
    "add, alpha=": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=0.3),
    "add, scalars=": lambda x, y: torch._foreach_add([x, y], scalars=[1.0, 2.0]),
    "lerp, a whole number": lambda x, y: torch._foreach_lerp([x], [y], 1),
    "lerp, numbers": lambda x, y: torch._foreach_lerp([x, y], [y, x], [0.5, 0.8]),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_eager(name: str) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: torch.Tensor) -> Any:
        y = model(x)
        results = CALLS[name](y, y.sin() * 2)
        (sum(one.sum() for one in results) + y.sum()).backward()
        gradient = model.bias.grad
        assert gradient is not None
        gradient = gradient.clone()
        optimizer.step()
        optimizer.zero_grad()
        return [*(one.detach() for one in results), gradient]

    x = torch.randn(2, 3)
    found = amp_ir.jit(step, model=model, optimizer=optimizer)(x)
    for one, other in zip(found, step(x), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-6)


def test_numbers_in_a_tensor() -> None:
    # Without a derivative in PyTorch: an update that reads gradients.
    model = torch.nn.Linear(3, 4)

    def step(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = model(x)
            numbers = torch.tensor([0.3, 0.7])
            changed = [y.clone(), y.clone()]
            torch._foreach_addcdiv_(changed, [y, y], [y.exp(), y.exp()], numbers)
            return [*torch._foreach_addcmul([y, y], [y, y], [y, y], numbers), *changed]

    x = torch.randn(2, 3)
    for one, other in zip(amp_ir.jit(step, model=model)(x), step(x), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-6)
