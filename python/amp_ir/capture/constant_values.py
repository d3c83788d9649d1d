# SPDX-License-Identifier: Apache-2.0
"""Values of traced tensors that depend on no input of the step, such as a mask of ones.

A step may read them in Python: they are the same at every call, as long as the tensors from outside
of the step are that they are computed from. What the step wrote into them, or into a view of them,
counts too.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
import types
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from amp_ir.capture.alias_sets import shared_memory

# A mask of positions by positions, of 4096 tokens, is as large.
_MOST_ELEMENTS = 2**24
_MOST_NODES = 512
_ATEN = ("aten", "prims")
_EMPTY: Mapping[torch.fx.Node, torch.Tensor] = types.MappingProxyType({})
aten = torch.ops.aten
_LITERALS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default})

# Notes a tensor whose value is read, and returns whether the step cannot have written to it.
_Note = Callable[[torch.Tensor], bool]
_note: contextvars.ContextVar[_Note | None] = contextvars.ContextVar(
    "amp_ir_note_read", default=None
)


@contextlib.contextmanager
def noting_reads(note: _Note) -> Iterator[None]:
    """Tell `note` each tensor from outside of the step that a value is computed from inside.

    It returns whether the tensor has the value that it had before the step.
    """
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)


def constant_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a tensor that no input and no random number reaches; None for others.

    The tensors from outside of the step that it is computed from are noted; see `noting_reads`.
    """
    outside: list[torch.Tensor] = []
    found = unguarded_value(tensor, outside)
    note = _note.get()
    if found is not None and note is not None and not all([note(one) for one in outside]):
        return None
    return found


def outside_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a tensor from outside of the step itself, and note it as above."""
    note = _note.get()
    if note is None or tensor.numel() > _MOST_ELEMENTS or not note(tensor):
        return None
    return tensor


def unguarded_value(
    tensor: torch.Tensor,
    outside: list[torch.Tensor],
    *,
    most_nodes: int = _MOST_NODES,
    state: Mapping[torch.fx.Node, torch.Tensor] = _EMPTY,
) -> torch.Tensor | None:
    """Return what `constant_value` does, and note nothing.

    The tensors from outside of the step that it is computed from are added to `outside`. `state`
    are inputs whose values are known too, and not written by the step; they are added as well.
    """
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if mode is None or slot is None:
        return None
    nodes = nodes_behind(
        slot.proxy.node, lambda node: node in state or _is_constant(node), most_nodes=most_nodes
    )
    if nodes is None:
        return None
    root: Any = getattr(mode.tracer, "root", None)
    values: dict[torch.fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for node in nodes:
            if node in state:
                outside.append(state[node])
                values[node] = state[node].detach().clone()
            elif node.op == "get_attr":
                value = getattr(root, str(node.target))
                if isinstance(value, FakeTensor):
                    return None
                if is_from_outside(node):
                    outside.append(value)
                # A copy, for what the step writes into it is written here too.
                values[node] = value.clone()
            else:
                args, kwargs = pytree.tree_map(
                    lambda one: values.get(one, one) if isinstance(one, torch.fx.Node) else one,
                    (node.args, dict(node.kwargs)),
                )
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    found = values[slot.proxy.node]
    return found if isinstance(found, torch.Tensor) else None


def nodes_of_state(
    last: torch.fx.Node, state: Container[torch.fx.Node], *, most_nodes: int
) -> list[torch.fx.Node] | None:
    """Return the nodes that compute `last` of constants and of inputs that are `state`.

    None if others do, or if the step writes to such an input.
    """
    nodes = nodes_behind(
        last, lambda node: node in state or _is_computed_of_state(node), most_nodes=most_nodes
    )
    if nodes is None:
        return None
    memory = _memory_of_nodes(last.graph)
    writes = [memory[node] for node in nodes if _is_mutable(node)]
    is_written = any(one in state for each in writes for one in each)
    return None if is_written else nodes


def _is_computed_of_state(node: torch.fx.Node) -> bool:
    """Return whether a node is a constant, or one of ATen's ops, which may run at the capture."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    is_aten = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _ATEN
    return is_aten and computes_again(node, _MOST_ELEMENTS)


def is_from_outside(node: torch.fx.Node) -> bool:
    """Return whether a constant is no tensor that the step makes itself, as by `torch.tensor`."""
    return any(user.target not in _LITERALS for user in node.users)


def nodes_behind(
    last: torch.fx.Node,
    allows: Callable[[torch.fx.Node], bool],
    *,
    most_nodes: int = _MOST_NODES,
) -> list[torch.fx.Node] | None:
    """Return the nodes that compute `last`, in order; None if one is not allowed, or many do.

    They include those that write into memory which one of them makes or views.
    """
    memory = _memory_of_nodes(last.graph)
    writers = [node for node in memory if _is_mutable(node)]
    needed: set[torch.fx.Node] = set()
    reached: set[torch.fx.Node] = set()
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if not allows(node) or len(needed) >= most_nodes:
            return None
        needed.add(node)
        reached |= memory[node]
        waiting += [one for one in node.all_input_nodes if one not in needed]
        if not waiting:
            waiting += [one for one in writers if one not in needed and memory[one] & reached]
    return [node for node in last.graph.nodes if node in needed]


def _memory_of_nodes(graph: torch.fx.Graph) -> dict[torch.fx.Node, set[torch.fx.Node]]:
    """Return, for each node, the nodes that made the memory which its results lie in."""
    found: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    for node in graph.nodes:
        shared = shared_memory(node)
        found[node] = set().union(*(found[one] for one in shared)) if shared else {node}
    return found


def _is_mutable(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_constant(node: torch.fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    return computes_again(node, _MOST_ELEMENTS)


def computes_again(node: torch.fx.Node, most_elements: int) -> bool:
    """Return whether a node computes the same each time, tensors of at most so many elements."""
    tags: Any = getattr(node.target, "tags", ())
    is_small = all(
        one.numel() <= most_elements
        for one in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(one, torch.Tensor)
    )
    return node.op == "call_function" and is_small and torch.Tag.nondeterministic_seeded not in tags
