# SPDX-License-Identifier: Apache-2.0
"""Sizes that are chosen from the lengths that come cost little more than the best ones."""

from __future__ import annotations

import bisect
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ir.buckets.chosen_sizes import ChosenSizes

COMPILE_SECONDS = 3.0


def costs(lengths: list[int], seconds_per_entry: float, limit: int = 12) -> tuple[float, int]:
    """Seconds of padding and compiling beside those of the data, and the number of sizes."""
    sizes, used, total = ChosenSizes(limit), set(), 0.0
    for length in lengths:
        choices = sizes.of(length)
        size = choices[bisect.bisect_left(choices, length)]
        assert size >= length
        total += COMPILE_SECONDS * (size not in used)
        used.add(size)
        total += (size - length) * seconds_per_entry
        sizes.add_step(size, length, size * seconds_per_entry, COMPILE_SECONDS)
    assert list(sizes.sizes) == sorted(set(sizes.sizes)) and len(sizes.sizes) <= limit
    return total, len(sizes.sizes)


def test_lengths_drawn_evenly_waste_little():
    draws = random.Random(0)
    lengths = [draws.randint(8, 512) for _ in range(20_000)]
    total, count = costs(lengths, 1e-3)
    # Best would be, with k sizes, 20000 * 504 / 2k ms + 3 k s: 12 sizes, 456 s.
    assert total < 1.3 * 456 and count == 12


def test_few_steps_are_not_worth_a_size():
    _, count = costs([100] * 20, 1e-3)
    assert count == 1


def test_one_length_gets_its_own_size():
    sizes = ChosenSizes(4)
    for _ in range(1000):
        choices = sizes.of(33)
        size = choices[bisect.bisect_left(choices, 33)]
        sizes.add_step(size, 33, 1e-2, 1.0)
    assert sizes.sizes == (40, 64)


@pytest.mark.parametrize("limit", [1, 3])
def test_the_limit_holds(limit):
    draws = random.Random(1)
    # A length beyond all sizes needs one whatever the limit is.
    lengths = [512, *(draws.randint(2, 512) for _ in range(3000))]
    assert costs(lengths, 1.0, limit)[1] <= limit


@given(st.lists(st.integers(2, 300), min_size=1, max_size=200), st.floats(0, 1))
def test_every_length_is_held(lengths, seconds):
    costs([300, *lengths], seconds)
