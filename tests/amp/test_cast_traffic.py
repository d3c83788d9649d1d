# SPDX-License-Identifier: Apache-2.0
"""What a compiled step moves because of dtypes: counted by hand on small steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_ir


def explained(model, batch, **options):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    mod, args = amp_ir.trace_step(step, batch, model=model)
    return amp_ir.explain_plan(amp_ir.autocast(mod, args, amp_dtype="bfloat16", **options))


def bytes_of(plan, what):
    return sum(one.nbytes for one in plan.moved if one.what == what)


def test_a_linear_layer_casts_its_weight_and_the_batch_and_keeps_its_gradient_in_float32():
    rows, inner, outer = 32, 16, 8
    plan = explained(nn.Linear(inner, outer, bias=False), (torch.randn(rows, inner),))
    # Read in float32 and written low; the batch is read low again for the weight's gradient.
    assert bytes_of(plan, "cast alone") == 6 * (inner * outer + rows * inner)
    gradients = [one for one in plan.moved if "gradient of a parameter" in one.reason]
    assert [one.nbytes for one in gradients] == [2 * inner * outer]
    assert not any(one.is_free for one in gradients)


def test_the_cast_traffic_says_all_of_it_by_reason():
    plan = explained(nn.Sequential(nn.Linear(8, 8), nn.GELU()), (torch.randn(4, 8),))
    text = plan.cast_traffic()
    with pytest.warns(DeprecationWarning, match="is called CastPlan.cast_traffic now"):
        assert plan.certificate() == text
    assert len(text.splitlines()) == len(plan.moved) + 2
    for one in plan.moved:
        assert one.reason in text
    total = sum(one.nbytes for one in plan.moved) / 2**20
    assert f"{total:.2f} MiB  in all" in text


def test_a_plan_that_was_not_explained_has_none():
    model = nn.Linear(8, 8)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss

    mod, args = amp_ir.trace_step(step, (torch.randn(4, 8),), model=model)
    assert amp_ir.autocast(mod, args, amp_dtype="bfloat16").plan.moved == ()


@pytest.mark.parametrize("placement", ["cut", "greedy"])
def test_no_placement_is_below_the_bound_and_the_cut_is_at_it(placement):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
    )
    cost = explained(model, (torch.randn(2, 3, 8, 8),), placement=placement).cost_nbytes
    assert cost.bound <= min(cost.chosen, cost.greedy, cost.full)
    if placement == "cut":
        assert cost.chosen == cost.bound


def test_no_cast_stands_alone_beside_a_kernel_of_the_step():
    """Convolution, normalization, a residual sum and attention: all roundings are in kernels."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(4)
            self.qkv = nn.Linear(4, 12)

        def forward(self, x):
            x = torch.relu(self.norm(self.conv(x)) + x)
            q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    plan = explained(Block(), (torch.randn(2, 4, 6, 6),))
    assert [cast for cast in plan.casts if cast.is_alone and cast.source >= 0] == []
