# SPDX-License-Identifier: Apache-2.0
"""Checks of indices in a step of several ranks: one more exchange, by which all ranks decide."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_ir import pipeline
from amp_ir.dialect.collectives import START_SYMBOL
from amp_ir.ir.step_module import StepModule
from amp_ir.rewrites.check_indices import check_indices
from amp_ir.rewrites.exchange_gradients import exchange_gradients
from captured_ranks import captured, op_names


def two_halves(shard: str) -> StepModule:
    """A first optimizer steps before an index is computed from its gradient."""
    first, second = nn.Linear(8, 8), nn.Embedding(16, 8)
    both = (first, second)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in both]

    def step(x: torch.Tensor) -> None:
        first(x).square().mean().backward()
        optimizers[0].step()
        rows = x.sum(1) + first.weight.grad.abs().amax()
        optimizers[0].zero_grad()
        second(rows.round().long()).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    return captured(step, (torch.ones(4, 8),), [*both], optimizers, shard=shard)


@pytest.mark.parametrize("shard", ["", "optimizer"])
def test_exchanges_and_checks_have_one_order(shard: str) -> None:
    """The choice of old or new state must not hold up what the first optimizer gathers."""
    planned = pipeline.lower(pipeline.rewrite(exchange_gradients(two_halves(shard))))
    starts = [call for call in planned.plan.calls if call.symbol == START_SYMBOL]
    assert len(starts) == (6 if shard else 3)


def test_a_check_is_one_more_sum_and_one_more_number() -> None:
    mod = exchange_gradients(two_halves(""))
    checked = check_indices(mod.ir, mod.signature, on_host="all")
    before, after = (op_names(one).count("amp_ir.all_reduce_start") for one in (mod.ir, checked.ir))
    assert after == before + 1
    assert checked.signature.outputs[-1].shape == (3,)
