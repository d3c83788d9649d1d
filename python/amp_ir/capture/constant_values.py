# SPDX-License-Identifier: Apache-2.0
"""Values of traced tensors that depend on no input of the step, such as a mask of ones.

A step may read them in Python: they are the same at every call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

# A mask of positions by positions, of 4096 tokens, is as large.
_MOST_ELEMENTS = 2**24
_MOST_NODES = 512


def constant_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a tensor that no input and no random number reaches; None for others."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    nodes = None if slot is None else _nodes_behind(slot.proxy.node)
    if mode is None or nodes is None or slot is None:
        return None
    root: Any = getattr(mode.tracer, "root", None)
    values: dict[torch.fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for node in nodes:
            if node.op == "get_attr":
                value = getattr(root, str(node.target))
                if isinstance(value, FakeTensor):
                    return None
                values[node] = value
            else:
                args, kwargs = pytree.tree_map(
                    lambda one: values.get(one, one) if isinstance(one, torch.fx.Node) else one,
                    (node.args, dict(node.kwargs)),
                )
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    found = values[slot.proxy.node]
    return found if isinstance(found, torch.Tensor) else None


def _nodes_behind(last: torch.fx.Node) -> list[torch.fx.Node] | None:
    """Return the nodes that compute `last`, in order; None if one reads an input, or many do."""
    needed: set[torch.fx.Node] = set()
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if node in needed:
            continue
        if not _is_constant(node) or len(needed) >= _MOST_NODES:
            return None
        needed.add(node)
        waiting += node.all_input_nodes
    return [node for node in last.graph.nodes if node in needed]


def _is_constant(node: torch.fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    schema = getattr(node.target, "_schema", None)
    is_pure = node.op == "call_function" and not getattr(schema, "is_mutable", False)
    tags: Any = getattr(node.target, "tags", ())
    is_small = all(
        one.numel() <= _MOST_ELEMENTS
        for one in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(one, torch.Tensor)
    )
    return is_pure and is_small and torch.Tag.nondeterministic_seeded not in tags
