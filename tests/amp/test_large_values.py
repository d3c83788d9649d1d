# SPDX-License-Identifier: Apache-2.0
"""Values out of float16's range stay in float32 until an op bounds them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import amp_ir

Function = Callable[[torch.Tensor], torch.Tensor]
# Each is beyond 65504 for some of the numbers of a layer, and on the float32 list of torch.autocast
# for a GPU.
LARGE: dict[str, Function] = {
    "x ** 2": lambda h: (h * 400) ** 2,
    "x ** 3": lambda h: (h * 60) ** 3,
    "x ** 4": lambda h: (h * 25) ** 4,
    "x.square()": lambda h: torch.square(h * 400),
    "1 / x": lambda h: 1 / (h.abs() * 1e-4 + 1e-6),
    "pow of a tensor": lambda h: (h.abs() * 60) ** torch.full_like(h, 3.0),
    "norm of order 3": lambda h: h + (h * 5e4).norm(3, dim=-1, keepdim=True),
    "cdist": lambda h: torch.cdist(h.repeat(4, 1) * 4e4, h * 4e4)[:8],
}
CARRIED: dict[str, Function] = {
    "relu": lambda v: torch.relu(v) / 3e4,
    "gelu": lambda v: F.gelu(v) / 3e4,
    "log": lambda v: torch.log(v.abs() + 1),
    "concat": lambda v: torch.cat([v, v], -1)[..., 4:12] / 3e4,
    "max": lambda v: v / v.abs().amax(-1, keepdim=True),
    "max_pool": lambda v: F.max_pool1d(v[None], 2)[0].repeat(1, 2) / 3e4,
    "layer_norm": lambda v: F.layer_norm(v, (8,)),
    "index": lambda v: v[torch.tensor([1, 0, 3, 2, 4, 5, 6, 7])] / 3e4,
}


class _Between(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.function(self.before(x)))


@pytest.mark.parametrize("large", LARGE)
def test_what_leaves_the_range_of_float16_stays_float32_until_it_is_small(large: str):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))

    def everything(h: torch.Tensor) -> torch.Tensor:
        made = LARGE[large](h)
        return torch.stack([carry(made) for carry in CARRIED.values()]).mean(0)

    assert LARGE[large](_Between(everything).before(x)).abs().max() > 65504
    low, exact = _Between(everything), _Between(everything).double()

    def step(x: torch.Tensor) -> torch.Tensor:
        out = low(x)
        out.square().mean().backward()
        return out.detach()

    got = amp_ir.jit(step, model=low, amp_dtype="float16", rounding="strict")(x)
    expected = exact(x.double())
    expected.square().mean().backward()
    assert (got - expected).norm() < 0.01 * expected.norm()
    for one, other in zip(low.after.parameters(), exact.after.parameters(), strict=True):
        assert (one.grad - other.grad).norm() < 0.02 * other.grad.norm()
    # What is left of the gradient of a large value may be below float16's range: finite, at least.
    assert all(one.grad.isfinite().all() for one in low.before.parameters())


def test_a_square_may_be_stored_as_bfloat16_whose_range_is_that_of_float32():
    def reasons(amp_dtype: str) -> set[str]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), _Square(), torch.nn.Linear(8, 8))
        mod, _ = amp_ir.trace_model(model, (torch.randn(4, 8),))
        plan = amp_ir.autocast(mod, amp_dtype=amp_dtype).plan
        return {one.rule for one in plan.ops if one.name == "relax.multiply"}

    assert reasons("float16") == {"large_values"}
    assert reasons("bfloat16") == {"arithmetic"}


class _Square(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * x)
