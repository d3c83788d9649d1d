# SPDX-License-Identifier: Apache-2.0
"""A loop in a captured graph: the graph of one step, and what its inputs and outputs are."""

from __future__ import annotations

from typing import Any

import attrs
from torch import fx

LOOP_KEY = "amp_ir_loop"


@attrs.frozen(eq=False)
class CapturedLoop:
    """The graph of one step, the number of steps, and the places of its inputs and outputs.

    `inputs` and `outputs` are as in `dialect.loop`. In each step, random ops draw with indices that
    are `draw_stride` more than in the one before.
    """

    body: fx.GraphModule
    length: int
    inputs: tuple[tuple[int, int, int], ...]
    outputs: tuple[tuple[int, int, int], ...]
    draw_stride: int = 0


def run_loop(operands: list[Any]) -> Any:
    """Stand for a loop in a captured graph; its node's `meta[LOOP_KEY]` says which."""
    raise NotImplementedError("a captured loop is imported, not called")
