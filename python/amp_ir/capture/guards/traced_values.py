# SPDX-License-Identifier: Apache-2.0
"""What values of a traced step hold: tensors of the trace, and whether each call makes others."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.constant_values import nodes_behind
from amp_ir.capture.decompositions.packed_sequences import PackedPart
from amp_ir.capture.guards.kept_tables import is_table
from amp_ir.capture.later_number import LaterNumber
from amp_ir.capture.symbolic_float import SymbolicFloat
from amp_ir.capture.traced_node import traced_node
from amp_ir.host.held_values import each_held

# As of loops that fill a mask element by element.
_MOST_OPS = 2**20


def traced_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Return the fake tensors that a value reaches, also in what a function reads when called."""
    kinds = (
        type, types.ModuleType, torch.nn.Module, torch.Tensor, SymbolicFloat, LaterNumber,
    )  # fmt: skip
    with contextlib.suppress(OverflowError):
        for one in each_held(value, lambda one: isinstance(one, kinds)):
            if isinstance(one, FakeTensor):
                yield one
            elif isinstance(one, PackedPart):
                yield from one.held()


def holds_result(value: Any) -> bool:
    """Return whether a value holds a tensor that depends on inputs or on random numbers."""
    return any(not _is_constant(tensor) for tensor in traced_tensors(value))


def is_constant_tensor(value: Any) -> bool:
    """Return whether a value holds tensors, and each is the same at every call."""
    return any(True for _ in traced_tensors(value)) and not holds_result(value)


def begins_anew(now: Any, before: Any) -> bool:
    """Return whether a tensor of constants takes the place of another one that is no table."""
    are_tensors = isinstance(now, FakeTensor) and isinstance(before, torch.Tensor)
    is_alike = are_tensors and now.shape == before.shape
    return is_alike and not is_table(before) and is_constant_tensor(now)


def _is_constant(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of the trace is the same at every call."""
    node = traced_node(tensor)
    if node is None:
        return False
    behind = nodes_behind(node, _is_computed_again, most_nodes=_MOST_OPS)
    return behind is not None


def _is_computed_again(node: torch.fx.Node) -> bool:
    tags: Any = getattr(node.target, "tags", ())
    return node.op != "placeholder" and torch.Tag.nondeterministic_seeded not in tags
