# SPDX-License-Identifier: Apache-2.0
"""Loops that assign entries of a tensor, read a split one, or compute with the step's number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_ir.ir.interpreter import interpret
from loop_models import assert_same_values, captured, inputs_of, loop_lengths

WIDTH, STEPS, ROWS = 6, 20, 3


class Model(nn.Module):
    """A model that loops over time as `loop(model, x)` says."""

    def __init__(self, loop):
        super().__init__()
        self.loop = loop
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.table = nn.Parameter(torch.randn(STEPS, WIDTH))

    def next(self, h, x):
        return torch.tanh(h @ self.weight + x)

    def forward(self, x):
        return self.loop(self, x)


def assigned(model, x):
    h, out = torch.zeros_like(x[:, 0]), torch.zeros(ROWS, STEPS, WIDTH)
    for t in range(STEPS):
        h = model.next(h, x[:, t])
        out[:, t] = h
    return out


def assigned_from_the_second_on(model, x):
    h, out = torch.zeros_like(x[:, 0]), torch.ones(ROWS, STEPS, WIDTH)
    for t in range(1, STEPS):
        h = model.next(h, x[:, t] + out[:, t - 1])
        out[:, t] = h * 2
    return out


def assigned_back_in_time_twice(model, x):
    h, a, b = torch.zeros_like(x[:, 0]), torch.zeros_like(x), torch.empty(STEPS, ROWS, WIDTH)
    for t in reversed(range(STEPS)):
        h = model.next(h, x[:, t])
        a[:, t] = h
        b[t] = h.exp()
    return a + b.transpose(0, 1)


def split(model, x):
    h, made = torch.zeros_like(x[:, 0]), []
    for a, b in zip(x.unbind(1), (x * 2).flatten(1).chunk(STEPS, 1), strict=True):
        h = model.next(h, a * b)
        made.append(h)
    return torch.stack(made, 1)


def masked_by_lengths(model, x):
    lengths, h, made = (x[:, :, 0] > 0).sum(1), torch.zeros_like(x[:, 0]), []
    for t in range(STEPS):
        h = torch.where((t < lengths)[:, None], model.next(h, x[:, t]), h)
        made.append(h)
    return torch.stack(made, 1)


def numbers(model, x):
    h, made = torch.zeros_like(x[:, 0]), []
    for t in range(STEPS):
        time = torch.full((ROWS, 1), t / STEPS)
        h = model.next(torch.cat([h[:, :-1], time], 1), x[:, t] * 0.9**t)
        made.append(h / (t + 1.5) - t * 0.1)
    return torch.stack(made, 1)


def rows_of_a_table(model, x):
    h, made = torch.zeros_like(x[:, 0]), []
    for t in range(STEPS):
        row = nn.functional.embedding(torch.full((ROWS,), t), model.table)
        h = model.next(h, x[:, t] + row)
        made.append(h)
    return torch.stack(made, 1)


LOOPS = [
    assigned, assigned_back_in_time_twice, split, masked_by_lengths, numbers, rows_of_a_table,
]  # fmt: skip


def both(loop):
    torch.manual_seed(0)
    model, batch = Model(loop), (torch.randn(ROWS, STEPS, WIDTH),)
    return batch, captured(model, batch, rolls=True), captured(model, batch, rolls=False)


@pytest.mark.parametrize("loop", LOOPS)
def test_both_passes_are_loops_with_the_values_of_the_unrolled_steps(loop):
    batch, rolled, unrolled = both(loop)
    assert len(loop_lengths(rolled)) == 2 and not loop_lengths(unrolled)
    assert_same_values(rolled, unrolled, batch)


def whole_is_read(model, x):
    """Each step reads all of the tensor that it assigns an entry of."""
    h, out = torch.zeros_like(x[:, 0]), torch.zeros(ROWS, STEPS, WIDTH)
    for t in range(STEPS):
        h = model.next(h, x[:, t] + out.mean(1))
        out[:, t] = h
    return out


def overwritten(model, x):
    h, out = torch.zeros_like(x[:, 0]), torch.ones(ROWS, STEPS, WIDTH)
    for _ in range(2):
        for t in range(STEPS):
            h = model.next(h, x[:, t] + out[:, t])
            out[:, t] = h
    return out


def another_dtype(model, x):
    h, out, y = torch.zeros_like(x[:, 0]), torch.zeros(ROWS, STEPS, WIDTH).double(), x.clone()
    for t in range(STEPS):
        h = model.next(h, y[:, t])
        out[:, t], y[:, t] = h, h * 2
    return out.float() + y


def parts_of_entries(model, x):
    h, out = torch.zeros_like(x[:, 0]), torch.zeros(ROWS, STEPS, WIDTH)
    for t in range(STEPS):
        h = model.next(h, x[:, t])
        out[:, t, :3] = h[:, :3]
        out[:, t, 3:] += h[:, 3:]
    return out


@pytest.mark.parametrize(
    "loop",
    [assigned_from_the_second_on, whole_is_read, overwritten, another_dtype, parts_of_entries],
)
def test_other_assignments_keep_their_values(loop):
    batch, rolled, unrolled = both(loop)
    assert loop_lengths(rolled)
    assert_same_values(rolled, unrolled, batch)


def test_numbers_beside_low_tensors_are_rounded_as_in_the_unrolled_steps():
    def low(model, x):
        h, made = torch.zeros_like(x[:, 0]).bfloat16(), []
        for t in range(STEPS):
            now = x[:, t].bfloat16() * (t * 0.013) + t * 0.01
            h = torch.tanh(h @ model.weight.bfloat16() + now)
            made.append(h)
        return torch.stack(made, 1).float()

    batch, rolled, unrolled = both(low)
    assert len(loop_lengths(rolled)) == 2
    got, wanted = (interpret(mod, inputs_of(mod, batch)) for mod in (rolled, unrolled))
    for spec, one, other in zip(rolled.signature.outputs, got, wanted, strict=True):
        # The loss is a sum in another order.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0, msg=spec.name)
