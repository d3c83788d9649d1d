# SPDX-License-Identifier: Apache-2.0
"""A mask that the data decides, as it was when it selected, and whether two of them are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from amp_ir.capture.constant_values import constant_value


@attrs.frozen(eq=False)
class Selection:
    """What bool[*shape] selects; `given` is the user's tensor, which may be written to later."""

    given: torch.Tensor
    kept: torch.Tensor
    version: int

    @classmethod
    def of(cls, given: torch.Tensor) -> Selection:
        """Return the selection of what is not 0 now."""
        kept = given.clone() if given.dtype is torch.bool else given != 0
        return cls(given, kept, 0 if given.is_inference() else given._version)

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the mask."""
        return self.kept.shape

    @property
    def ndim(self) -> int:
        """Return the number of axes that are selected from."""
        return self.kept.ndim

    def over(self, shape: Sequence[int]) -> torch.Tensor:
        """Return a mask that broadcasts over [*extents, *rest].

        Along an axis of one element for all it tells whether any is selected.
        """
        mask = self.kept
        for axis, extent in enumerate(mask.shape):
            if shape[axis] == 1 != extent:
                mask = mask.any(axis, keepdim=True)
        return mask.reshape(*mask.shape, *[1] * (len(shape) - mask.ndim))

    def is_alike(self, other: Selection) -> bool:
        """Return whether both select the same, at whatever values."""
        if self is other:
            return True
        first, second = _node_of(self.kept), _node_of(other.kept)
        if self.given is other.given and not self.given.is_inference() and first and second:
            # Another node is other data (p.data = value).
            return self.version == other.version and first.args[0] is second.args[0]
        if first is None or second is None or self.shape != other.shape:
            return False
        return _are_alike(first, second, depth=9) and _nothing_is_written(first, second)


def decides_later(x: Any) -> bool:
    """Return whether x has axes and elements, and values that do not exist yet."""
    return (
        type(x) is FakeTensor
        and x.ndim > 0
        and x.numel() > 0
        and x.constant is None
        and constant_value(x) is None
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _node_of(tensor: torch.Tensor) -> torch.fx.Node | None:
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _are_alike(first: Any, second: Any, depth: int) -> bool:
    """Return whether two nodes compute the same of the same."""
    if not (isinstance(first, torch.fx.Node) and isinstance(second, torch.fx.Node)):
        return type(first) is type(second) and bool(first == second)
    if first is second:
        return True
    if depth == 0 or first.target is not second.target or first.op != "call_function":
        return False
    schema, tags = getattr(first.target, "_schema", None), getattr(first.target, "tags", ())
    if schema is None or schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        return False
    return (
        first.kwargs == second.kwargs
        and len(first.args) == len(second.args)
        and all(
            _are_alike(one, other, depth - 1)
            for one, other in zip(first.args, second.args, strict=True)
        )
    )


def _nothing_is_written(first: torch.fx.Node, second: torch.fx.Node) -> bool:
    """Return whether no op between two nodes writes to what the first one is computed from."""
    if second < first:
        first, second = second, first
    read, rest = set(), [first]
    while rest:
        one = rest.pop()
        if _root(one) not in read:
            read.add(_root(one))
            rest += one.all_input_nodes
    node = first
    while node is not second:
        if any(_root(one) in read for one in _written(node)):
            return False
        node = node.next
    return True


def _written(node: torch.fx.Node) -> list[torch.fx.Node]:
    schema = getattr(node.target, "_schema", None)
    return node.all_input_nodes if schema is not None and schema.is_mutable else []


def _root(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node that made the memory of a node's result: it may be a view, or written to."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.returns or schema.returns[0].alias_info is None:
            break
        (node, *_) = node.all_input_nodes
    return node
