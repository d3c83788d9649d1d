# SPDX-License-Identifier: Apache-2.0
"""The containers of a call's arguments as a lookup key, which takes a third of PyTorch's time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

from amp_ir.capture.containers import flatten

_LEAF = None
_LEAVES = frozenset({torch.Tensor, int, float, bool, str, type(None)})


def structure_of(value: Any, leaves: list[Any]) -> Hashable:
    """Return a key of the containers in `value`, and append what they hold to `leaves`.

    The keys of two values are equal exactly where the TreeSpecs of `containers.flatten` are, which
    also decides what a container is: of others than tuples, lists and dicts the key holds their
    TreeSpec.
    """
    kind = type(value)
    if kind in _LEAVES:
        leaves.append(value)
        return _LEAF
    if kind is tuple or kind is list:
        return kind, None, *[structure_of(one, leaves) for one in value]
    if kind is dict:
        inner = [structure_of(one, leaves) for one in value.values()]
        return kind, tuple(value), *inner
    found, spec = flatten(value)
    leaves += found
    return _LEAF if spec.is_leaf() else spec


def rebuild(structure: Any, leaves: Iterator[Any]) -> Any:
    """Return the containers of a key of `structure_of` around other leaves."""
    if structure is _LEAF:
        return next(leaves)
    if isinstance(structure, pytree.TreeSpec):
        return pytree.tree_unflatten([next(leaves) for _ in range(structure.num_leaves)], structure)
    kind, keys, *inner = structure
    values = [rebuild(one, leaves) for one in inner]
    return kind(values) if keys is None else dict(zip(keys, values, strict=True))
