# SPDX-License-Identifier: Apache-2.0
"""Steps of HuggingFace's models (small, random weights), imported and evaluated op by op."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from huggingface_models import bert, distilbert, gpt2, llama, resnet, t5, vit
from import_checks import Runner


def step_of(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A step that keeps the gradients it used."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss

    return step, optimizer


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", [bert, distilbert, gpt2, llama, t5, vit, resnet])
def test_step_is_pytorchs(make):
    model, batch = make()
    model.train()
    reference = copy.deepcopy(model)
    step, optimizer = step_of(model)
    runner = Runner(step, (batch,), model=model, optimizer=optimizer)
    expected, _ = step_of(reference)
    torch.testing.assert_close(runner(batch), expected(batch).detach(), rtol=1e-5, atol=0)
    gradients = {name: x.grad for name, x in reference.named_parameters() if x.grad is not None}
    largest = max(float(one.abs().max()) for one in gradients.values())
    for name, parameter in model.named_parameters():
        # Sums in another order; some gradients are zero but for rounding (biases of keys).
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-5 * largest)
        else:
            assert parameter.grad is None


def test_dropout_of_a_model_draws_from_the_random_state():
    model, batch = bert(dropout=0.1)
    model.train()
    step, optimizer = step_of(model)
    runner = Runner(step, (batch,), model=model, optimizer=optimizer)
    script = runner.mod.script()
    assert script.count('"amp_ir.dropout"') == script.count('"amp_ir.dropout_backward"') == 3
    losses = [float(runner(batch)) for _ in range(3)]
    assert len(set(losses)) == 3
    assert runner.mod.state["random_state"].tolist()[1] == 3
