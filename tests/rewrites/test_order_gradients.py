# SPDX-License-Identifier: Apache-2.0
"""Gradients that nothing waits for hide the exchange of a large one; no value changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_ir.dialect import options_of
from amp_ir.ir.bucket_sizes import BucketSizes
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.step_module import StepModule
from amp_ir.rewrites.order_gradients import order_gradients
from amp_ir.rewrites.start_collectives import start_collectives
from captured_ranks import captured

SMALL_END = BucketSizes(2**20, 16, 256)
BATCH = torch.arange(12).view(3, 4), torch.tensor([0, 1, 2])


class Classifier(nn.Module):
    """An embedding of 4 KiB, two layers of 1 KiB, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(self.words(ids)))
        return self.head(torch.tanh(self.second(x)).mean(1))


def step_of(sizes: BucketSizes, *, backwards: int = 1) -> StepModule:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for _ in range(backwards):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return captured(step, BATCH, [model], [optimizer], sizes=sizes)


def sent(ir: Any) -> list[list[str]]:
    """The parameters of each bucket, in the order of starts."""
    starts = Dataflow(start_collectives(ir)).calls("amp_ir.all_reduce_start").values()
    return [str(options_of(one)["parameters"]).split(",") for one in starts]


@pytest.mark.parametrize("backwards", [1, 2])
def test_an_embedding_is_sent_before_layers_that_nothing_waits_for(backwards: int) -> None:
    mod = step_of(SMALL_END, backwards=backwards)
    before, made = sent(mod.ir), order_gradients(mod.ir)
    after = sent(made)
    assert before[-1] == ["words.weight"]
    assert sorted(sum(after, [])) == sorted(sum(before, []))
    for k in range(backwards):
        of_pass = after[k * len(after) // backwards : (k + 1) * len(after) // backwards]
        # Two of 1 KiB are half of the embedding, so the head's stays.
        assert ["words.weight"] in [[one for one in b if "bias" not in one] for b in of_pass]
        assert of_pass[-1] == ["first.weight"] and "second.weight" in of_pass[-2]
    assert len(Dataflow(made).bindings) == len(Dataflow(mod.ir).bindings)
    inputs = [one if isinstance(one, torch.Tensor) else one() for one in mod.state.values()]
    for one, other in zip(
        interpret(made, [*inputs, *BATCH]), interpret(mod.ir, [*inputs, *BATCH]), strict=True
    ):
        assert torch.equal(one, other)


def test_sizes_that_a_user_gave_move_nothing() -> None:
    ir = step_of(BucketSizes(256, 256)).ir
    assert order_gradients(ir) is ir


def test_a_small_last_gradient_moves_nothing() -> None:
    ir = step_of(BucketSizes(2**20, 16, 2**14)).ir
    assert order_gradients(ir) is ir
