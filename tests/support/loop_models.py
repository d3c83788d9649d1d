# SPDX-License-Identifier: Apache-2.0
"""Steps whose models loop over time, and their programs with and without loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp_ir.api.trace import rewrite, trace_unchanged
from amp_ir.dialect.loop import NAME, loop_of
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.step_module import StepModule


class DropoutDecoder(nn.Module):
    """An attention decoder around an LSTMCell, with dropout of its weights and of its output."""

    def __init__(self, width: int, p: float = 0.25):
        super().__init__()
        self.cell = nn.LSTMCell(2 * width, width)
        self.query = nn.Linear(width, width)
        self.out = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        memory = x[:, :5] * 2
        h = x.new_zeros(x.shape[0], x.shape[2])
        c, context, made = h, h, []
        for t in range(x.shape[1]):
            h, c = self.cell(torch.cat([x[:, t], context], 1), (h, c))
            weights = torch.softmax(torch.bmm(memory, self.query(h).unsqueeze(2)).squeeze(2), 1)
            context = torch.bmm(self.drop(weights).unsqueeze(1), memory).squeeze(1)
            made.append(torch.tanh(self.out(self.drop(torch.cat([h, context], 1)))))
        return torch.stack(made, 1)


def training(
    model: nn.Module, scaler: Any = None, lr: float = 0.1
) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    """Return a training step of the mean square of a model's result, and its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step(*batch):
        optimizer.zero_grad()
        loss = (model(*batch) ** 2).mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss

    return step, optimizer


def captured(
    model: nn.Module, batch: tuple[Any, ...], *, rolls: bool, scaler: Any = None
) -> StepModule:
    """Return the captured training step of a model, its loops rolled or not."""
    step, optimizer = training(model, scaler)
    return rewrite(
        trace_unchanged(
            step, batch, model=model, optimizer=optimizer, scaler=scaler, rolls_loops=rolls
        )
    )


def loop_lengths(mod: StepModule) -> list[int]:
    """Return the number of steps of each loop."""
    return [loop_of(call).length for call in Dataflow(mod.ir).calls(NAME).values()]


def inputs_of(mod: StepModule, batch: tuple[torch.Tensor, ...]) -> list[Any]:
    """Return the values of a step's inputs, with the state that it has now."""
    tensors, found = iter(batch), []
    for one in mod.signature.inputs:
        value = mod.state[one.name] if one.is_state else next(tensors)
        found.append(value() if callable(value) else value)
    return found


def in_float64(mod: StepModule, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Return a step's outputs by their names, evaluated in float64 by the interpreter."""
    values = interpret(mod, inputs_of(mod, batch), float_dtype=torch.float64)
    return {spec.name: one for spec, one in zip(mod.signature.outputs, values, strict=True)}


def assert_same_values(one: StepModule, other: StepModule, batch: tuple[torch.Tensor, ...]) -> None:
    """Fail unless two programs of a step compute the same values in float64.

    Their sums may be in other orders: float64 has 53 significant bits.
    """
    got, wanted = in_float64(one, batch), in_float64(other, batch)
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-13, msg=name)
