# SPDX-License-Identifier: Apache-2.0
"""The degree of every gradient is known, and once the loss scale, through all layers and losses.

The proof is only worth something if it neither refuses nor gives up on ordinary models: these are
the layers, losses and optimizers that the other tests train.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.ir.step_module import Role
from amp_ir.loss_scaling.degrees.check_scale_degrees import ScaleDegrees, check_scale_degrees
from amp_ir.loss_scaling.degrees.degree import ZERO, Degree, Special
from layer_cases import FAMILIES, Case, weighted
from optimizer_cases import CASES

ONCE = Degree.of("scaler0")


def degrees_of(family: dict[str, Case]) -> tuple[amp_ir.StepModule, ScaleDegrees]:
    """The degrees of a step that returns the scaled gradients of all inputs of the layers."""
    model = nn.ModuleDict({f"the_{name}": make() for name, (make, _) in family.items()})
    model["one_parameter"] = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp_ir.GradScaler()

    def step(inputs: dict[str, list[torch.Tensor]]) -> Any:
        optimizer.zero_grad()
        loss = model["one_parameter"](torch.ones(1, 1)).sum()
        leaves = []
        for name, values in inputs.items():
            own = [x.detach().requires_grad_(x.is_floating_point()) for x in values]
            loss = loss + weighted(model[f"the_{name}"](*own))
            leaves += [x for x in own if x.requires_grad]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    batch = {key: [make(0) for make in inputs] for key, (_, inputs) in family.items()}
    mod, _ = amp_ir.trace_step(step, (batch,), model=model, optimizer=optimizer, scaler=scaler)
    return mod, check_scale_degrees(mod)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_every_layer_are_scaled_once(name: str):
    mod, found = degrees_of(FAMILIES[name])
    for spec in mod.signature.outputs:
        if spec.role is Role.RESULT:
            # An integer says whether values that a loss requires are there: of no gradient.
            once = ZERO if spec.dtype == "int64" else ONCE
            assert found.outputs[spec.name] in (once, Special.ANY), (spec, found.notes)
        elif spec.role in (Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER_STATE):
            assert found.outputs[spec.name] in (ZERO, Special.ANY), (spec, found.notes)
    assert not [note for note in found.notes if not note.startswith("The step returns")]


@pytest.mark.parametrize(
    ("kind", "options"), CASES, ids=[f"{kind.__name__}-{k}" for k, (kind, _) in enumerate(CASES)]
)
def test_every_optimizer_takes_unscaled_gradients_only(kind: Any, options: dict[str, Any]):
    model = nn.Linear(3, 2)
    values = {k: v.clone() if torch.is_tensor(v) else v for k, v in options.items()}
    optimizer = kind(model.parameters(), **values)
    scaler = amp_ir.GradScaler()

    def step(x: torch.Tensor, *, by_scaler: bool = True) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if by_scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    given = {"model": model, "optimizer": optimizer, "scaler": scaler}
    mod, _ = amp_ir.trace_step(step, (torch.ones(4, 3),), **given)
    assert check_scale_degrees(mod).notes == ()
    with pytest.raises(amp_ir.errors.LossScaleError, match="call scaler.step.optimizer. instead"):
        amp_ir.trace_step(lambda x: step(x, by_scaler=False), (torch.ones(4, 3),), **given)
