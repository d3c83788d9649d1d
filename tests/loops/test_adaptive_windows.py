# SPDX-License-Identifier: Apache-2.0
"""Adaptive pooling whose windows all hold as many elements along an axis, or each element alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir


@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
@pytest.mark.parametrize(
    ("extents", "out"),
    [((5, 4), (3, 4)), ((5, 4), (12, 4)), ((5, 4), (5, 6)), ((5, 6), (4, 3)), ((3, 5), (6, 2))],
)
def test_windows_of_one_size(
    pool: Callable[..., torch.Tensor], extents: tuple[int, int], out: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    values = torch.randn(2, 3, *extents, dtype=torch.float64)
    weights = torch.randn(2, 3, *out, dtype=torch.float64)

    def trained(*, is_ours: bool) -> list[torch.Tensor]:
        model = nn.Module()
        model.x = nn.Parameter(values.clone())

        def step(scale: torch.Tensor) -> torch.Tensor:
            pooled = pool(model.x * scale, out)
            (pooled * weights).sum().backward()
            return pooled.detach()

        train = amp_ir.jit(step, model=model) if is_ours else step
        return [train(torch.ones((), dtype=torch.float64)), model.x.grad]

    torch.testing.assert_close(trained(is_ours=True), trained(is_ours=False))
