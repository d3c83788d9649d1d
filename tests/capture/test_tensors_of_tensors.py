# SPDX-License-Identifier: Apache-2.0
"""`torch.tensor([a, b])` of computed numbers, as people collect losses and norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir

MAKE: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: torch.tensor([a, b]),
    lambda a, b: torch.tensor(((a, 1), (b, 2.5)), dtype=torch.float64),
    lambda a, b: torch.as_tensor([b, True]),
    lambda a, b: torch.tensor([a.bfloat16(), 2], device="cpu"),
    lambda a, b: torch.tensor([a.bfloat16(), 2.0]),
]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_they_are_stacked_in_the_dtype_that_pytorch_gives_them() -> None:
    def run(*, compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)

        def step(x: torch.Tensor) -> list[torch.Tensor]:
            y = model(x)
            # No gradient flows into what is collected.
            (y.square().mean() * torch.tensor([y.mean(), 2.0]).sum()).backward()
            norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
            found = [make(y.detach().mean(), (x > 0).sum()) for make in MAKE]
            model.zero_grad()
            return [torch.tensor(norms).norm(), *found]

        one = amp_ir.jit(step, model=model) if compiled else step
        return [one(torch.linspace(-1, 2, 12).view(4, 3))]

    torch.testing.assert_close(run(compiled=True), run(compiled=False))
