# SPDX-License-Identifier: Apache-2.0
"""torch.nn's layers and losses, compiled: results, gradients of inputs and weights, and updates.

Layers of a family share one compiled step, since compiling is most of the time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from compiled_steps import assert_compiled_alike
from layer_cases import FAMILIES, Case, weighted
from step_comparison import Training


def training(family: dict[str, Case]) -> Training:
    model = nn.ModuleDict({f"the_{name}": make() for name, (make, _) in family.items()})
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05) if parameters else None

    def step(inputs: dict[str, list[torch.Tensor]]) -> Any:
        for parameter in parameters:
            parameter.grad = None
        loss, results, leaves = torch.zeros(()), {}, {}
        for name, values in inputs.items():
            leaves[name] = [x.detach().requires_grad_(x.is_floating_point()) for x in values]
            results[name] = model[f"the_{name}"](*leaves[name])
            loss = loss + weighted(results[name])
        wanted = [x for xs in leaves.values() for x in xs if x.requires_grad]
        gradients = torch.autograd.grad(
            loss, [*wanted, *parameters], allow_unused=True, materialize_grads=True
        )
        for parameter, gradient in zip(parameters, gradients[len(wanted) :], strict=True):
            parameter.grad = gradient
        if optimizer is not None:
            optimizer.step()
        return results, list(gradients[: len(wanted)])

    return Training(model, optimizer, step)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_train_as_in_eager(name: str) -> None:
    family = FAMILIES[name]

    def batch(index: int) -> tuple[Any, ...]:
        return ({key: [make(index) for make in inputs] for key, (_, inputs) in family.items()},)

    assert_compiled_alike(lambda: training(family), batch, steps=2, rtol=2e-5)
