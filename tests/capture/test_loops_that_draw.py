# SPDX-License-Identifier: Apache-2.0
"""Loops whose steps draw random numbers: those of the unrolled program, in both passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.ir.step_module import Role
from loop_models import (
    DropoutDecoder,
    assert_same_values,
    captured,
    in_float64,
    loop_lengths,
)

WIDTH, STEPS = 8, 20


class Noisy(nn.Module):
    """Steps that draw in other ways than dropout; the state is reached from each of them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x):
        h, made = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            noise = torch.randn_like(h) * torch.rand(WIDTH) + torch.bernoulli(torch.sigmoid(h))
            kept = nn.functional.dropout(x[:, t], 0.3)
            h = torch.tanh(h @ self.weight + kept + 0.1 * noise)
            made.append(h)
        return torch.stack(made, 1)


class AttentionWithDropout(nn.Module):
    """Dropout inside of attention, which the backward pass draws again, from the last step on."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        memory, h, made = x[:, :7].unsqueeze(1), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            query = self.query(h + x[:, t])[:, None, None]
            context = nn.functional.scaled_dot_product_attention(
                query, memory, memory, dropout_p=0.4
            )
            h = torch.tanh(context[:, 0, 0] + x[:, t])
            made.append(h)
        return torch.stack(made, 1)


MODELS = [lambda: DropoutDecoder(WIDTH), Noisy, AttentionWithDropout]


@pytest.mark.parametrize("kind", MODELS)
def test_steps_draw_what_the_unrolled_steps_draw(kind):
    torch.manual_seed(0)
    model, batch = kind(), (torch.randn(3, STEPS, WIDTH),)
    rolled, unrolled = (captured(model, batch, rolls=rolls) for rolls in (True, False))
    assert len(loop_lengths(rolled)) == 2 and not loop_lengths(unrolled)
    assert not [note for note in rolled.notes if "one by one" in note]
    assert_same_values(rolled, unrolled, batch)


@pytest.mark.parametrize(("kind", "rounding"), zip(MODELS, ["fast", "strict", "fast"], strict=True))
def test_three_compiled_steps_equal_the_unrolled_ones(kind, rounding):
    """Those are interpreted: to compile them takes several times as long as the loops."""
    torch.manual_seed(0)
    batches = [(torch.randn(3, STEPS, WIDTH),) for _ in range(3)]
    model = kind()
    rolled, unrolled = (captured(model, batches[0], rolls=rolls) for rolls in (True, False))
    assert loop_lengths(rolled) and not loop_lengths(unrolled)
    unrolled = unrolled.with_random_state(rolled.random_state)
    train = amp_ir.compile(rolled, rounding=rounding)
    specs = unrolled.signature
    (loss,) = [one.name for one in specs.outputs if one.role is Role.RESULT]
    updates = {
        specs.inputs[one.updates].name: one.name
        for one in specs.outputs
        if one.role is Role.PARAMETER
    }
    assert len(updates) == len([*model.parameters()])
    for batch in batches:
        wanted = in_float64(unrolled, batch)
        # Sums are in float32, which has 24 significant bits, and pass through 20 steps.
        assert train(*batch).item() == pytest.approx(wanted[loss].item(), rel=1e-5)
        for name, output in updates.items():
            torch.testing.assert_close(
                rolled.state[name].double(), wanted[output], rtol=1e-4, atol=1e-6
            )


def test_each_step_and_each_call_draws_its_own_mask():
    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            h, made = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                mask = nn.functional.dropout(self.bias.expand(64, WIDTH) + 0 * x[:, t], 0.25)
                h = 0.5 * torch.tanh(h) + 0.1
                made.append(mask + 0 * h)
            return torch.stack(made, 0)

    model = Masks()
    mod, _ = amp_ir.trace_model(model, (torch.zeros(64, STEPS, WIDTH),))
    assert loop_lengths(mod)
    run = amp_ir.compile(mod)
    masks = torch.stack([run(torch.zeros(64, STEPS, WIDTH)) for _ in range(2)]).flatten(0, 1) != 0
    assert len({one.numpy().tobytes() for one in masks}) == 2 * STEPS
    # 20480 draws with probability 0.75: four standard deviations are 0.012.
    assert masks.float().mean().item() == pytest.approx(0.75, abs=0.013)
    # Masks of two steps agree in 0.75^2 + 0.25^2 of their elements; of 512, four deviations: 0.086.
    agreeing = (masks[1:] == masks[:-1]).float().mean((1, 2))
    assert (agreeing - 0.625).abs().max().item() < 0.09


def test_a_skipped_step_draws_the_same_again():
    """The overflow is in the loop: gradients that are carried there in float16 are infinite."""
    torch.manual_seed(0)
    model = DropoutDecoder(WIDTH)
    scaler = amp_ir.GradScaler(init_scale=2.0**40)
    batch = (torch.randn(3, STEPS, WIDTH),)
    mod = captured(model, batch, rolls=True, scaler=scaler)
    assert len(loop_lengths(mod)) == 2
    train = amp_ir.compile(amp_ir.autocast(mod, batch, amp_dtype="float16"))
    before = [one.detach().clone() for one in model.parameters()]
    first, second = train(*batch).item(), train(*batch).item()
    assert first == second
    assert scaler.get_scale() == 2.0**38
    for one, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(one, old)
    losses = [train(*batch).item() for _ in range(40)]
    assert scaler.get_scale() < 2.0**30
    assert len(set(losses)) > 2 and losses[-1] < first
