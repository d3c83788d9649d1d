# SPDX-License-Identifier: Apache-2.0
"""Loops with random bodies train as in PyTorch, in float64 by the interpreter and compiled."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

import amp_ir
from loop_models import assert_same_values, captured, loop_lengths

WIDTH = 8


class Generated(nn.Module):
    """A loop over time, forward or back, of a body that the seed decides."""

    def __init__(self, seed: int, *, draws: bool = False):
        super().__init__()
        draw = random.Random(seed)
        self.length, self.states = draw.choice([17, 20]), draw.choice([1, 2, 3])
        self.program = [
            (
                draw.randrange(11 if draws else 9),
                draw.randrange(self.states + 1 + k),
                draw.randrange(3),
            )
            for k in range(draw.randint(2, 6))
        ]
        self.is_reverse, self.result = draw.random() < 0.3, draw.choice(["stack", "cat", "last"])
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 4) for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.start = nn.Parameter(torch.randn(WIDTH))

    def body(self, states, x):
        values = [*states, x]
        for kind, source, k in self.program:
            values.append(self.op(kind, values[source], values[-1], self.weights[k]))
        new = [torch.tanh(one) for one in values[-len(states) :]]
        first = 0.5 * new[0] + 0.3 * states[0] @ self.weights[0] + self.start
        return [first, *new[1:]], values[-1] + first

    def op(self, kind, one, last, weight):
        return [
            lambda: torch.tanh(one @ weight + last),
            lambda: torch.sigmoid(one) * last,
            lambda: self.norm(one + last),
            lambda: torch.softmax(one, -1) - 0.1 * last,
            lambda: torch.cat([one[:, :3], last[:, 3:]], 1),
            lambda: one.detach() * 0.5 + last,
            lambda: torch.where(one > last, one, last * 0.5),
            lambda: (one * last).mean(-1, keepdim=True) + one,
            lambda: torch.einsum("bi,ij->bj", one, weight),
            lambda: nn.functional.dropout(one, 0.3) + last,
            lambda: one * torch.rand_like(last) + 0.1 * torch.randn(WIDTH),
        ][kind]()

    def forward(self, x):
        states, made = [torch.zeros_like(x[:, 0]) for _ in range(self.states)], []
        for t in range(self.length)[:: -1 if self.is_reverse else 1]:
            states, one = self.body(states, x[:, t])
            made.append(one)
        if self.result == "last":
            return states[0] + made[-1]
        return torch.stack(made, 1) if self.result == "stack" else torch.cat(made, 1)


@pytest.mark.parametrize("seed", range(10))
def test_a_random_body_trains_as_in_pytorch(seed):
    torch.manual_seed(seed)
    model = Generated(seed)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()

    def training(one):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.05)

        def step(x):
            optimizer.zero_grad()
            ((one(x) - 0.1) ** 2).mean().backward()
            optimizer.step()

        return step, optimizer

    step, optimizer = training(model)
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for _ in range(2):
        x = torch.randn(3, model.length, WIDTH)
        train(x)
        training(eager)[0](x)
        training(exact)[0](x.double())

    def error(one):
        pairs = zip(one.parameters(), exact.parameters(), strict=True)
        return max(((got.double() - want).norm() / want.norm()).item() for got, want in pairs)

    # Other orders of sums: several times the error of PyTorch's float32, or a few roundings.
    assert error(model) < max(10 * error(eager), 1e-6)


OVERRIDES = [
    amp_ir.Override(op="relax.matmul", phase="backward", to="float32"),
    amp_ir.Override(op="relax.tanh", to="low"),
    amp_ir.Override(parameter="*norm.weight", to="low"),
]


def overridden(mod, override):
    """What an override decides, without how often; None where it selects nothing."""
    try:
        plan = amp_ir.autocast(mod, amp_dtype="float16", overrides=[override]).plan
    except amp_ir.errors.OptionError:
        return None
    ops = [*plan.ops, *(op for loop in plan.loops for op in loop.plan.ops)]
    return {
        (op.name, op.phase, op.line, op.reads, op.results) for op in ops if op.rule == "override"
    }


@pytest.mark.parametrize("seed", range(20, 28))
def test_random_bodies_with_random_ops_a_scaler_and_overrides(seed):
    """They compute what their unrolled steps do, and overrides decide the same in them."""
    torch.manual_seed(seed)
    model = Generated(seed, draws=True)
    batch = (torch.randn(3, model.length, WIDTH),)
    scaler = amp_ir.GradScaler(init_scale=2.0**seed)
    rolled, unrolled = (captured(model, batch, rolls=one, scaler=scaler) for one in (True, False))
    assert loop_lengths(rolled) and not loop_lengths(unrolled)
    assert_same_values(rolled, unrolled, batch)
    for override in OVERRIDES:
        assert overridden(rolled, override) == overridden(unrolled, override)
