# SPDX-License-Identifier: Apache-2.0
"""Casts to float32 of what is float32 where no autocast runs: they leave no op in the trace.

Under torch.autocast `net(x).float()` is where low precision ends. What makes the value is marked,
so that `amp_ir.autocast` knows that its readers have it in float32.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.repeated_ops import has_views
from amp_ir.capture.traced_node import traced_node
from amp_ir.ir.location import META_KEY, Location

CASTS = frozenset((torch.Tensor.float, torch.Tensor.to, torch.Tensor.type))


def mark_widened(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object) -> None:
    """Mark what made the float32 tensor that a call of CASTS casts to float32, and returns."""
    tensor = args[0]
    if out is not tensor or type(tensor) is not FakeTensor or tensor.dtype != torch.float32:
        return
    asked = (*args[1:], *kwargs.values())
    # A call of `to` may be about the device alone; float() has no argument.
    if asked and not any(one is torch.float32 or one is torch.FloatTensor for one in asked):
        return
    node: Any = traced_node(tensor)
    while node is not None:
        location = node.meta.get(META_KEY)
        if isinstance(location, Location) and location.precision == "rules":
            node.meta[META_KEY] = attrs.evolve(location, precision="widened")
        # A view may be dropped, as one to the shape that it has already.
        is_op = isinstance(node.target, torch._ops.OpOverload)
        if node.target is not operator.getitem and not (is_op and has_views(node.target)):
            return
        node = node.args[0]
