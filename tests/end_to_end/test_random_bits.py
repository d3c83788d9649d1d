# SPDX-License-Identifier: Apache-2.0
"""Functions of random float32 bit patterns: 4 ULP, or nearer to float64 than PyTorch is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from float_distance import is_as, is_near_exact

FUNCTIONS = [
    torch.exp, torch.log, torch.log1p, torch.expm1, torch.tanh, torch.sigmoid, torch.erf,
    F.silu, F.softplus, F.logsigmoid, F.elu, F.selu, F.celu, torch.sin, torch.cos, torch.tan,
    torch.asin, torch.acos, torch.atan, torch.sinh, torch.cosh, torch.asinh, torch.acosh,
    torch.atanh, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.log2, torch.log10, torch.exp2,
    F.relu, F.hardswish, lambda x: x**1.5, lambda x: x**3, lambda x: x**-3,
]  # fmt: skip


def patterns() -> torch.Tensor:
    """Random bits, ordinary numbers, the range of exp, and numbers near 0 and 1."""
    draw = torch.Generator().manual_seed(0)
    count = 8192
    bits = torch.randint(-(2**31), 2**31, (count,), generator=draw)
    normal = torch.randn(count, generator=draw)
    near = torch.rand(count, generator=draw) * 2 - 1
    steps = torch.linspace(-105, 92, count)
    return torch.cat([bits.to(torch.int32).view(torch.float32), 3 * normal, steps, near,
                      1 + 1e-3 * normal])  # fmt: skip


def test_functions_of_random_bits() -> None:
    x = patterns()

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        return [function(x) for function in FUNCTIONS]

    mod, args = amp_ir.trace_step(step, (x,), model=nn.Linear(1, 1))
    for function, got in zip(FUNCTIONS, amp_ir.compile(mod)(*args), strict=True):
        wanted, exact = function(x), function(x.double())
        right = is_as(got, wanted) | is_near_exact(got, exact, [wanted])
        wrong = ~right
        assert right.all(), (
            function, int(wrong.sum()), x[wrong][:4], got[wrong][:4], wanted[wrong][:4]
        )  # fmt: skip
