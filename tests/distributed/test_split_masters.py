# SPDX-License-Identifier: Apache-2.0
"""A bfloat16 model whose optimizer has float32 masters: these are split, and bfloat16 is sent."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import amp_ir
from data_parallel import Training, batches, mlp
from rank_processes import ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]


class MasterSgd(torch.optim.Optimizer):
    """SGD with momentum on float32 copies of the parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state["master"] = one.float()
                    state["momentum"] = torch.zeros_like(state["master"])
                state["momentum"].mul_(0.9).add_(one.grad.float())
                state["master"].add_(state["momentum"], alpha=-group["lr"])
                one.copy_(state["master"])


def trained(rank: int, shard: str | None) -> tuple[dict[str, list[float]], str]:
    torch.manual_seed(0)
    model = mlp().bfloat16()
    optimizer = MasterSgd(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer, data_parallel=True, shard=shard)
    for batch in batches("mlp", 5, rank):
        train(*batch)
    state = Training([model], [optimizer], step).state()
    return {name: one.flatten().tolist() for name, one in state.items()}, train.ir("memory")


def test_masters_are_split_and_bfloat16_is_gathered(tmp_path: Path) -> None:
    def program(rank: int) -> list[Any]:
        return [trained(rank, None), trained(rank, "optimizer")]

    first, second = ranks(program, tmp_path)
    (whole, _), (split, text) = first
    gathers = [line for line in text.splitlines() if "all_gather_start" in line]
    assert gathers and all("bf16[" in line for line in gathers), gathers
    other = second[1][0]
    masters = [name for name in split if name.endswith(".master")]
    held = [sum(len(one[name]) for name in masters) for one in (split, other, whole)]
    # At most 32 elements of the one bucket above an equal part.
    assert max(held[:2]) <= held[2] / 2 + 32
    parameters = [name for name in whole if not name.startswith("optimizer")]
    for name in parameters:
        assert split[name] == other[name] == whole[name]
