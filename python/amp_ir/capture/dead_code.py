# SPDX-License-Identifier: Apache-2.0
"""Removal of what nothing reads from a functional graph."""

from __future__ import annotations

from typing import Any

import torch


def drop_dead_code(graph: torch.fx.Graph) -> None:
    """Drop the nodes that nothing reads, random ops too: in a graph each is a pure function.

    torch.fx keeps random ops, and asks each node anew whether it has effects.
    """
    has_effects: dict[Any, bool] = {}

    def is_kept(node: torch.fx.Node) -> bool:
        if not isinstance(node.target, torch._ops.OpOverload):
            return node.is_impure(impure_random=False)
        if node.target not in has_effects:
            has_effects[node.target] = node.is_impure(impure_random=False)
        return has_effects[node.target]

    graph.eliminate_dead_code(is_kept)
