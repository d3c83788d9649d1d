# SPDX-License-Identifier: Apache-2.0
"""The counter-based generator: a pure function of seed, step, op and element, and random enough."""

from __future__ import annotations

import math

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from amp_ir.dialect import DECLARATIONS
from amp_ir.dialect.random import random_bits

WORDS = st.integers(min_value=-(2**63), max_value=2**63 - 1)
INDICES = st.integers(min_value=0, max_value=2**32 - 1)
SIZE = 1 << 16


def uniform(seed: int = 1, step: int = 0, index: int = 0) -> torch.Tensor:
    state = torch.tensor([seed, step])
    return DECLARATIONS["amp_ir.random_uniform"].reference(state, shape=(SIZE,), index=index)


@given(WORDS, WORDS, INDICES)
def test_numbers_are_in_range_and_repeatable(seed: int, step: int, index: int):
    state = torch.tensor([seed, step])
    bits = random_bits(state, (64,), index)
    assert torch.equal(bits, random_bits(state, (8, 8), index).flatten())
    assert int(bits.min()) >= 0 and int(bits.max()) < 2**32


@given(WORDS, WORDS, INDICES, WORDS, WORDS, INDICES)
def test_another_seed_step_or_op_gives_other_numbers(
    seed: int, step: int, index: int, seed2: int, step2: int, index2: int
):
    assume((seed, step, index) != (seed2, step2, index2))
    first = random_bits(torch.tensor([seed, step]), (64,), index)
    second = random_bits(torch.tensor([seed2, step2]), (64,), index2)
    # 64 pairs of 32 bits: an equal pair has a chance of 1.5e-8.
    assert not (first == second).any()


def test_the_distribution_is_uniform():
    counts = torch.histc(uniform(), 256, 0.0, 1.0)
    expected = SIZE / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 255 degrees of freedom: mean 255, standard deviation 22.6; six of them.
    assert abs(chi_square - 255) < 136
    assert float(uniform().max()) < 1.0


def test_streams_of_neighbouring_seeds_steps_and_ops_do_not_correlate():
    base = uniform() - 0.5
    bound = 6 / math.sqrt(SIZE)
    others = [uniform(seed=2), uniform(step=1), uniform(index=1), uniform(seed=1 << 32)]
    for other in [*others, uniform().roll(1)]:
        correlation = float((base * (other - 0.5)).mean() * 12)
        assert abs(correlation) < bound


def test_every_bit_of_the_counter_moves_half_of_the_bits():
    count = 1 << 12
    bits = random_bits(torch.tensor([3, 5]), (count,), 0)
    elements = torch.arange(count)
    for k in range(12):
        changed = bits ^ bits[elements ^ (1 << k)]
        ones = float(((changed[:, None] >> torch.arange(32)) & 1).sum())
        assert abs(ones / (32 * count) - 0.5) < 0.01


def test_normal_has_the_moments_of_a_normal():
    state = torch.tensor([1, 0])
    x = DECLARATIONS["amp_ir.random_normal"].reference(state, shape=(SIZE,), index=0).double()
    bound = 6 / math.sqrt(SIZE)
    assert abs(float(x.mean())) < bound
    assert abs(float(x.var()) - 1.0) < bound * math.sqrt(2)
    assert abs(float((x**4).mean()) - 3.0) < bound * math.sqrt(96)
    assert bool(x.isfinite().all())


def test_dropout_keeps_its_share_and_the_mean():
    state, x = torch.tensor([1, 0]), torch.ones(SIZE)
    y, mask = DECLARATIONS["amp_ir.dropout"].reference(x, state, p=0.25, index=0)
    assert torch.equal(y != 0, mask)
    assert abs(float(mask.float().mean()) - 0.75) < 6 * math.sqrt(0.25 * 0.75 / SIZE)
    assert y.max() == torch.tensor(1.0 / 0.75)
    nothing, _ = DECLARATIONS["amp_ir.dropout"].reference(x, state, p=1.0, index=0)
    assert not nothing.any()
