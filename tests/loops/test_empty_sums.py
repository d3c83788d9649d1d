# SPDX-License-Identifier: Apache-2.0
"""Sums of no elements in kernels that compute something else, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_ir


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_product_with_an_empty_vector_is_added(dtype: torch.dtype) -> None:
    matrix, vector, base = torch.zeros(5, 0).to(dtype), torch.zeros(0).to(dtype), torch.arange(5)

    def step(base: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        return torch.addmv(base, matrix, vector, beta=2, alpha=3)

    batch = (base.to(dtype), matrix, vector)
    mod, args = amp_ir.trace_step(step, batch, model=nn.Identity())
    found = amp_ir.compile(mod)(*args)
    torch.testing.assert_close(found, step(*batch), rtol=0, atol=0)
