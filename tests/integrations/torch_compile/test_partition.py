# SPDX-License-Identifier: Apache-2.0
"""The cut of a joint program: what is saved, in which dtype, and what is computed twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from amp_ir.integrations.torch_compile import halves
from amp_ir.integrations.torch_compile.backend import amp_ir_backend
from amp_ir.integrations.torch_compile.partition import Partition, partition
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.step_module import StepModule


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[StepModule, Partition]]]:
    """Collect the joint programs that the backend cuts, and their cuts."""
    found: list[tuple[StepModule, Partition]] = []

    def recorded(mod: StepModule, *args: Any, **options: Any) -> Partition:
        found.append((mod, partition(mod, *args, **options)))
        return found[-1][1]

    monkeypatch.setattr(halves, "partition", recorded)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def ops(mod: StepModule) -> list[str]:
    return [op_name(value) for value in Dataflow(mod.ir).values.values() if op_name(value)]


def compiled(model: Callable[..., Any], *batch: Any, **options: Any) -> Any:
    return torch.compile(model, backend=amp_ir_backend, options=options or None)(*batch)


def nbytes(cut: Partition) -> int:
    sizes = {"bfloat16": 2, "float32": 4, "bool": 1}
    return sum(math.prod(one.shape) * sizes[one.dtype] for one in cut.saved)


def test_values_are_saved_as_the_backward_pass_reads_them_and_matmuls_run_once(
    cuts: list[tuple[StepModule, Partition]],
) -> None:
    model = nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 8)
    )
    y = compiled(model, torch.randn(32, 64), amp_dtype="bfloat16")
    ((joint, cut),) = cuts
    total, early, late = (
        ops(one).count("relax.matmul") for one in (joint, cut.forward.module, cut.backward.module)
    )
    assert total == early + late
    # GELU's argument, LayerNorm's and its result are stored low; the statistics of rows are not.
    assert sorted((one.shape, one.dtype) for one in cut.saved) == [
        ((32, 1), "float32"),
        ((32, 1), "float32"),
        ((32, 64), "bfloat16"),
        ((32, 64), "bfloat16"),
        ((32, 128), "bfloat16"),
    ]
    y.sum().backward()


def test_a_chain_of_elementwise_ops_is_computed_again_from_its_input(
    cuts: list[tuple[StepModule, Partition]],
) -> None:
    x = torch.randn(32, 64, requires_grad=True)
    y = compiled(lambda x: (x.sin() * x.exp()).tanh() * 2, x)
    ((_, cut),) = cuts
    assert cut.saved == ()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    z = (x.sin() * x.exp()).tanh() * 2
    (wanted,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


def test_no_cut_is_larger_than_what_eager_saves(
    cuts: list[tuple[StepModule, Partition]],
) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
            self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
            return (x + y).softmax(-1)

    x = torch.randn(8, 16, requires_grad=True)
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor is not x:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    block = Block()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = block(x)
    compiled(block, x)
    ((_, cut),) = cuts
    assert y.shape == (8, 16)
    parameters = {one.untyped_storage().data_ptr() for one in (*block.parameters(), x)}
    assert nbytes(cut) <= sum(size for key, size in held.items() if key not in parameters)


def test_an_input_that_is_overwritten_is_saved_as_a_copy(
    cuts: list[tuple[StepModule, Partition]],
) -> None:
    def written(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.sin() * weight
        x.mul_(2)
        return y

    x, weight = torch.randn(4, 3), torch.randn(3, requires_grad=True)
    before = x.clone()
    compiled(written, x, weight).sum().backward()
    ((_, cut),) = cuts
    assert [one.shape for one in cut.saved] == [(4, 3)]
    torch.testing.assert_close(weight.grad, before.sin().sum(0))
    torch.testing.assert_close(x, 2 * before)
