# SPDX-License-Identifier: Apache-2.0
"""Steps that seed PyTorch's generators, or put their states back: a compiled step cannot repeat."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import amp_ir
from amp_ir import errors

Draws = Callable[[torch.Tensor], torch.Tensor]
BEFORE = torch.get_rng_state()


def seeded(y: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return F.dropout(y)


def same_twice(y: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    first = F.dropout(y)
    torch.set_rng_state(state)
    return first + F.dropout(y)


def of_before(y: torch.Tensor) -> torch.Tensor:
    torch.random.set_rng_state(BEFORE)
    return y + torch.rand(4, 3)


def forked(y: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        first = y + torch.randn(4, 3)
    return first + torch.randn(4, 3)


def seeded_fork(y: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return y + torch.randn(4, 3)


def default_generator(y: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(3)
    return F.dropout(y)


SEEDED_BY: dict[Draws, str] = {
    seeded: "torch.manual_seed",
    same_twice: "torch.set_rng_state",
    of_before: "torch.set_rng_state",
    forked: "torch.set_rng_state",
    seeded_fork: "torch.manual_seed",
    default_generator: "manual_seed of torch.default_generator",
}


def unused_fork(y: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
    return F.dropout(y)


def read_only(y: torch.Tensor) -> torch.Tensor:
    torch.get_rng_state()
    return F.dropout(y)


def renewed(y: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    torch.seed()
    return F.dropout(y)


def seeded_afterwards(y: torch.Tensor) -> torch.Tensor:
    dropped = F.dropout(y)
    torch.manual_seed(3)
    return dropped


def without_dropout(y: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    with sdpa_kernel(SDPBackend.MATH):
        y = y + F.scaled_dot_product_attention(y[None], y[None], y[None])[0]
    return F.rrelu(F.dropout(y, training=False), training=False)


def trained(draws: Draws, model: nn.Module | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what two calls of a compiled step draw."""
    model = nn.Linear(3, 3) if model is None else model

    def step(x: torch.Tensor) -> torch.Tensor:
        y = draws(model(x))
        y.sum().backward()
        model.zero_grad()
        return y.detach()

    train = amp_ir.jit(step, model=model)
    return train(torch.ones(4, 3)), train(torch.ones(4, 3))


@pytest.mark.parametrize("draws", SEEDED_BY, ids=lambda draws: draws.__name__)
def test_a_step_that_seeds_and_draws_is_refused(draws: Draws) -> None:
    model = nn.Linear(3, 3)  # draws: the state is not the one just after a seed
    before = torch.get_rng_state()
    message = f"draws random numbers after the step called {SEEDED_BY[draws]}. Leave the seeding"
    with pytest.raises(errors.CaptureError, match=re.escape(message)):
        trained(draws, model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draws", [unused_fork, read_only, renewed, seeded_afterwards])
def test_what_does_not_repeat_numbers_is_captured(draws: Draws) -> None:
    first, second = trained(draws)
    assert not torch.equal(first, second)


def test_seeding_without_draws_is_captured() -> None:
    first, second = trained(without_dropout)
    torch.testing.assert_close(first, second)
