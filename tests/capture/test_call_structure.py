# SPDX-License-Identifier: Apache-2.0
"""The key of a call's containers: equal where PyTorch's TreeSpecs are, with the same leaves."""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ir.capture.guards.call_structure import rebuild, structure_of

Pair = collections.namedtuple("Pair", ["first", "second"])
ONE, OTHER = torch.zeros(1), torch.ones(2)
LEAVES = st.sampled_from([ONE, OTHER, None, 1, 1.0, True, "a", b"a", torch.float32, 2j, range(3)])
KEYS = st.sampled_from(["a", "b", 0, 1, True, None, "c"])


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=3)
    by_key = st.lists(st.tuples(KEYS, inner), max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        by_key.map(dict),
        by_key.map(collections.OrderedDict),
        by_key.map(lambda items: collections.defaultdict(int, items)),
        several.map(collections.deque),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
    )


ARGUMENTS = st.recursive(LEAVES, containers, max_leaves=6)


@settings(max_examples=400, deadline=None)
@given(ARGUMENTS, ARGUMENTS)
def test_keys_are_equal_exactly_where_specs_are(one: Any, other: Any) -> None:
    keys, specs = [], []
    for value in (one, other):
        expected, spec = pytree.tree_flatten(value)
        leaves: list[Any] = []
        keys.append(structure_of(value, leaves))
        specs.append(spec)
        assert len(leaves) == len(expected)
        assert all(a is b for a, b in zip(leaves, expected, strict=True))
        built = rebuild(keys[-1], iter(leaves))
        again, built_spec = pytree.tree_flatten(built)
        assert built_spec == spec and all(a is b for a, b in zip(again, expected, strict=True))
    assert (keys[0] == keys[1]) == (specs[0] == specs[1])
    if keys[0] == keys[1]:
        assert hash(keys[0]) == hash(keys[1])
