# SPDX-License-Identifier: Apache-2.0
"""What a random op of a captured graph draws: `node.meta[DRAW_KEY]`, the index of the draw.

Each op draws from (seed, step, index). The indices count the ops in the order of the graph in which
loops over time steps are still unrolled, so that a loop draws what its unrolled steps would. In the
body of a loop it is the index in the loop's first step.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

DRAW_KEY = "amp_ir_draw"
_ATTENTION, _BACKWARD = "amp_ir.attention.default", "amp_ir.attention_backward.default"
# The positions of dropout_p, and of the forward op's logarithms, among the arguments.
_DROPOUT_P, _BACKWARD_DROPOUT_P, _BACKWARD_LSE = 4, 7, 5


def number_draws(graph: torch.fx.Graph) -> None:
    """Give each op that draws its `meta[DRAW_KEY]`, in a graph where none has it.

    The backward op of attention has that of its forward op, whose dropout mask it draws again.
    """
    if any(DRAW_KEY in node.meta for node in graph.nodes):
        return
    count = 0
    for node in graph.nodes:
        if _draws(node):
            node.meta[DRAW_KEY] = count
            count += 1
        elif str(node.target) == _BACKWARD and _probability(node, _BACKWARD_DROPOUT_P) > 0:
            found = _forward_draw(node.args[_BACKWARD_LSE])
            if found is not None:
                node.meta[DRAW_KEY] = found


def _draws(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is torch.ops.aten.native_dropout.default:
        return node.args[2] is not False and _probability(node, 1) != 0.0
    if str(node.target) == _ATTENTION:
        return _probability(node, _DROPOUT_P) > 0
    return torch.Tag.nondeterministic_seeded in node.target.tags


def _forward_draw(lse: object) -> int | None:
    """Return the draw of the attention whose logarithms of sums these are."""
    if not isinstance(lse, Node) or lse.target is not operator.getitem:
        return None
    made = lse.args[0]
    return made.meta.get(DRAW_KEY) if isinstance(made, Node) else None


def _probability(node: Node, position: int) -> float:
    """Return a probability among the arguments; one that is computed may be any but 0."""
    p = node.args[position]
    return float(p) if isinstance(p, (int, float)) else 1.0
