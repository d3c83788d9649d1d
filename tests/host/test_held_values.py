# SPDX-License-Identifier: Apache-2.0
"""What an object reaches, and that other structures are told apart."""

from __future__ import annotations

import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ir.amp.rule_reads import Read
from amp_ir.capture.guards.left_values import in_full
from amp_ir.host.held_values import Again, each_held

TREES = st.recursive(
    st.integers(0, 2) | st.sampled_from(["a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)


@given(TREES, TREES)
def test_values_have_one_structure_exactly_where_they_are_equal(one, other):
    is_same = repr(one) == repr(other)
    assert (Read.of(one) == Read.of(other)) == is_same
    assert (in_full(one) == in_full(other)) == is_same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a", "b", "a"], ["a", "b", "b"]),
        ([[1], [2], [1]], [[1], [2], [2]]),
        (array.array("d", [1.5, 2.5, 1.5]), array.array("d", [1.5, 2.5, 2.5])),
    ],
)
def test_an_entry_that_comes_twice_is_told_from_another(one, other):
    assert Read.of(one) != Read.of(other)
    assert Read.of(one) == Read.of(one)


def test_an_object_in_two_places_is_told_from_another_in_one():
    first, second = ["x"], ["y"]
    assert Read.of([first, second, first]) != Read.of([first, second, second])


def test_a_cycle_ends():
    cycle: list[object] = [1]
    cycle.append(cycle)
    assert list(each_held(cycle, lambda one: isinstance(one, int))) == [cycle, 1, Again(0)]
    assert in_full(cycle)


def test_thousands_of_values_are_not_looked_into():
    with pytest.raises(OverflowError):
        list(each_held(list(range(10_001)), lambda one: isinstance(one, int)))
