# SPDX-License-Identifier: Apache-2.0
"""Number the random ops of a captured graph, so that no later change of it changes what they draw.

Each op draws from (seed, step, index). The indices count the ops in the order of the graph in which
loops over time steps are still unrolled, so that a loop draws what its unrolled steps would.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

import amp_ir.capture.decompositions.attention  # noqa: F401  (registers the ops)
from amp_ir.ir.random_draws import DRAW_KEY

_ATTENTION = torch.ops.amp_ir.attention.default
_BACKWARD = torch.ops.amp_ir.attention_backward.default
# The positions of dropout_p, and of the forward op's logarithms, among the arguments.
_DROPOUT_P, _BACKWARD_DROPOUT_P, _BACKWARD_LSE = 4, 7, 5


def _probability(node: Node, position: int) -> float:
    p = node.args[position]
    assert isinstance(p, float)
    return p


def number_draws(graph: torch.fx.Graph) -> None:
    """Give each op that draws its `meta[DRAW_KEY]`.

    The backward op of attention has that of its forward op, whose dropout mask it draws again.
    """
    count = 0
    for node in graph.nodes:
        if _draws(node):
            node.meta[DRAW_KEY] = count
            count += 1
        elif node.target is _BACKWARD and _probability(node, _BACKWARD_DROPOUT_P) > 0:
            found = _forward_draw(node.args[_BACKWARD_LSE])
            if found is not None:
                node.meta[DRAW_KEY] = found


def _draws(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is torch.ops.aten.native_dropout.default:
        return node.args[2] is not False and _probability(node, 1) != 0.0
    if node.target is _ATTENTION:
        return _probability(node, _DROPOUT_P) > 0
    return torch.Tag.nondeterministic_seeded in node.target.tags


def _forward_draw(lse: object) -> int | None:
    """Return the draw of the attention whose logarithms of sums these are."""
    if not isinstance(lse, Node) or lse.target is not operator.getitem:
        return None
    made = lse.args[0]
    return made.meta.get(DRAW_KEY) if isinstance(made, Node) else None
