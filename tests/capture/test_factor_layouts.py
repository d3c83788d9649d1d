# SPDX-License-Identifier: Apache-2.0
"""Determinants and solutions of matrices that are not contiguous: what PyTorch factors differs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_ir

N = 4
MATRICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda w: w,
    "transposed": lambda w: w.mT,
    "sliced": lambda w: torch.cat([w, w], -1)[..., 1 : N + 1],
    "of a batch": lambda w: torch.stack([w, w.mT + 1]).mT,
    "complex": lambda w: torch.complex(w, w.square()).mT,
}
FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "det": lambda a, x: torch.linalg.det(a),
    "slogdet": lambda a, x: torch.linalg.slogdet(a)[1],
    "logdet": lambda a, x: torch.logdet(a @ a.mT),
    "solve": lambda a, x: torch.linalg.solve(a, x),
    "solve for a vector": lambda a, x: torch.linalg.solve(a, x[..., 0].expand(a.shape[:-1])),
    "solve from the right": lambda a, x: torch.linalg.solve(a, x.mT, left=False),
    "inv": lambda a, x: torch.linalg.inv(a) * x[..., :1],
}


@pytest.mark.parametrize("turned", [False, True], ids=["", "of a transposed parameter"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_gradients_are_those_of_eager(matrix: str, function: str, turned: bool) -> None:
    torch.manual_seed(0)
    values, x = torch.randn(N, N, dtype=torch.float64), torch.randn(N, 3, dtype=torch.float64)
    if matrix == "complex" and function in ("det", "logdet"):
        pytest.skip("PyTorch has none, or branches on values, in second derivatives of these")

    def trained(*, is_ours: bool) -> list[torch.Tensor]:
        model = nn.Module()
        model.w = nn.Parameter(values.mT.clone().mT if turned else values.clone())

        def step(x: torch.Tensor) -> torch.Tensor:
            a = MATRICES[matrix](model.w)
            found = FUNCTIONS[function](a, x.to(a.dtype)).abs().square().sum()
            (first,) = torch.autograd.grad(found, model.w, create_graph=True)
            (found + first.square().sum()).backward()
            return found.detach()

        result = amp_ir.jit(step, model=model)(x) if is_ours else step(x)
        return [result, model.w.grad]

    # Two of PyTorch's float64 sums in another order, of matrices of a condition below 100.
    torch.testing.assert_close(trained(is_ours=True), trained(is_ours=False), rtol=1e-8, atol=1e-8)
