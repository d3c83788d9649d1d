# SPDX-License-Identifier: Apache-2.0
"""A loss over classes and its gradient: one kernel reads the scores, and no sum is over zeros."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.api import lower
from amp_ir.ir.step_module import StepModule
from amp_ir.loops.fusion.fuse import group_values
from amp_ir.loops.ir import Reduction

ROWS, CLASSES = 64, 5000


def classifier(weight: torch.Tensor | None = None, shape: tuple[int, ...] = ()) -> StepModule:
    model = nn.Linear(32, CLASSES) if not shape else nn.Conv2d(3, CLASSES, 1)
    loss_of = nn.CrossEntropyLoss(weight=weight)

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), target)
        loss.backward()
        return loss.detach()

    x = torch.randn(2, 3, *shape) if shape else torch.randn(ROWS, 32)
    target = torch.randint(0, CLASSES, (2, *shape) if shape else (ROWS,))
    return amp_ir.trace_step(step, (x, target), model=[model, loss_of])[0]


def loss_reductions(mod: StepModule) -> list[Reduction]:
    """The reductions over an index space of the size of the scores, less the bias' gradient."""
    _, grouping = group_values(mod.ir)
    found = [one for group in grouping.groups for one in group.members]
    return [
        one
        for one in found
        if isinstance(one, Reduction) and one.size < CLASSES
        and CLASSES in one.source_shape and len(one.source_shape) > 1
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_scores_are_read_by_one_kernel(dtype: str, weighted: bool) -> None:
    mod = classifier(torch.rand(CLASSES) if weighted else None)
    if dtype != "float32":
        mod = amp_ir.autocast(mod, amp_dtype=dtype)
    size = ROWS * CLASSES
    kernels = [
        call
        for call in lower(mod).plan.calls
        if call.name.startswith("kernel")
        and not call.is_cast
        and call.read_nbytes + call.written_nbytes >= size * (4 if dtype == "float32" else 2)
    ]
    assert len(kernels) == 1


@pytest.mark.parametrize("shape", [(), (4, 6)], ids=["rows", "pixels"])
def test_the_sum_of_a_target_s_gradient_is_its_one_element(shape: tuple[int, ...]) -> None:
    # The largest score, the sum of exponentials, the target's own; none for the gradient.
    kinds = [one.kind for one in loss_reductions(classifier(shape=shape))]
    assert kinds == ["largest", "sum", "sum"]
