# SPDX-License-Identifier: Apache-2.0
"""Loops over time in steps with a loss scale: degrees go through them, and errors are the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import pipeline
from amp_ir.dialect.loop import CARRIED, NAME, loop_of
from amp_ir.errors import LossScaleError
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.step_graph import read_step
from amp_ir.loss_scaling.degrees.degree import ZERO, Degree, Solver, Special
from amp_ir.loss_scaling.degrees.diagnostics import Diagnostics
from amp_ir.loss_scaling.degrees.loop_degrees import StepsNeeded, degrees_of_loop
from loop_models import DropoutDecoder, assert_same_values, captured, loop_lengths

WIDTH, STEPS = 6, 20


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x):
        h, made = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.tanh(h @ self.weight + torch.sigmoid(x[:, t]))
            made.append(h)
        return torch.stack(made, 1)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def import_step(step, model, optimizer, scaler, *, rolls):
    batch = (torch.randn(3, STEPS, WIDTH),)
    return pipeline.import_step(
        step, batch, model=model, optimizer=optimizer, scaler=scaler, rolls_loops=rolls
    )


@pytest.mark.parametrize("kind", [Cell, lambda: DropoutDecoder(WIDTH)])
def test_a_scaled_step_has_loops_and_computes_the_same(kind):
    torch.manual_seed(0)
    model, batch = kind(), (torch.randn(3, STEPS, WIDTH),)
    scaler = amp_ir.GradScaler(init_scale=2.0**10)
    rolled, unrolled = (captured(model, batch, rolls=one, scaler=scaler) for one in (True, False))
    assert len(loop_lengths(rolled)) == 2 and not loop_lengths(unrolled)
    assert_same_values(rolled, unrolled, batch)
    assert [one for one in rolled.notes if "scale" in one] == [
        one for one in unrolled.notes if "scale" in one
    ]


def not_unscaled(model, optimizer, scaler):
    def step(x):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        optimizer.step()

    return step


def clipped_too_early(model, optimizer, scaler):
    def step(x):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def half_of_the_loss_is_scaled(model, optimizer, scaler):
    def step(x):
        optimizer.zero_grad()
        made = model(x)
        (scaler.scale(made[:, :, 0].square().mean()) + made[:, :, 1].square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def a_scaled_value_enters_the_loop(model, optimizer, scaler):
    def step(x):
        optimizer.zero_grad()
        scaler.scale(model(x * scaler.get_scale()).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def the_penalty_is_of_scaled_gradients(model, optimizer, scaler):
    def step(x):
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        loss = model(x).square().mean()
        (grad,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
        scaler.scale(loss + grad.square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


@pytest.mark.parametrize(
    "wrong",
    [
        not_unscaled,
        clipped_too_early,
        half_of_the_loss_is_scaled,
        a_scaled_value_enters_the_loop,
        the_penalty_is_of_scaled_gradients,
    ],
)
def test_errors_are_those_of_the_unrolled_step(wrong):
    texts = []
    for rolls in (True, False):
        torch.manual_seed(0)
        model, scaler = Cell(), amp_ir.GradScaler()
        optimizer = optimizer_of(model)
        step = wrong(model, optimizer, scaler)
        try:
            mod = import_step(step, model, optimizer, scaler, rolls=rolls)
        except LossScaleError as error:
            texts.append(str(error))
        else:
            texts.append([one for one in mod.notes if "scale" in one or "tell" in one])
    assert texts[0] == texts[1]
    assert texts[0], "each of these steps has an error, or a note"


def first_degrees(first, others):
    """Return the degrees of a backward loop's results, of those of what it is given."""
    model, scaler = Cell(), amp_ir.GradScaler()
    optimizer = optimizer_of(model)

    def step(x):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    mod = import_step(step, model, optimizer, scaler, rolls=True)
    *_, backward = Dataflow(mod.ir).calls(NAME).values()
    loop, solver = loop_of(backward), Solver()
    diagnostics = Diagnostics(read_step(mod.ir), mod.signature.inputs, ["scaler0"], solver)
    given = [first if kind == CARRIED else others for kind, _, _ in loop.inputs]
    assert first in given
    return degrees_of_loop(loop, given, solver, diagnostics)


def test_zeros_that_enter_a_loop_take_the_degree_of_the_steps():
    assert set(first_degrees(Special.ANY, ZERO)) == {ZERO}
    assert set(first_degrees(ZERO, ZERO)) == {ZERO}
    with pytest.raises(StepsNeeded):
        first_degrees(Degree.of("scaler0"), ZERO)
