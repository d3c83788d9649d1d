# SPDX-License-Identifier: Apache-2.0
"""`as_strided` of the traced graph, by the elements that it has: the layout may differ later.

Where its result is all of a tensor it is a view; where nothing writes to the memory later, a copy.
A part to which one op writes, and which nothing else reads, as the gradient of `as_strided` has it,
is a copy too, which is then written to the tensor by indices.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_ir.capture.alias_sets import AliasSets
from amp_ir.capture.decompositions.layouts import has_window, strided, window, write_window

_OP = torch.ops.aten.as_strided.default


class PartsOfMemory:
    """The calls of `as_strided`, and the writers to their results."""

    def __init__(self, memory: AliasSets) -> None:
        self._read_at_last = memory.read_at_last(_OP)
        self.writers = {
            writer: part
            for writer, part in memory.written_once(_OP).items()
            if has_window(layout_of(part), **_geometry(part))
        }
        self._written = set(self.writers.values())

    def value(self, part: torch.fx.Node, x: torch.Tensor) -> torch.Tensor | None:
        """Return a part of x, the tensor that it is a part of; None where only PyTorch has it."""
        if part in self._written:
            forms: tuple[Any, ...] = (window,)
        else:
            forms = (strided, window) if part in self._read_at_last else (strided,)
        for form in forms:
            out: torch.Tensor | None = form(x, layout_of(part), **_geometry(part))
            if out is not None:
                return out
        return None

    def keep_until_written(
        self, last_uses: dict[torch.fx.Node, list[torch.fx.Node]], graph: torch.fx.Graph
    ) -> None:
        """Delay the end of tensors whose parts are written: others may view their memory."""
        places = {node: k for k, node in enumerate(graph.nodes)}
        for writer, part in self.writers.items():
            whole = whole_of(part)
            last = next(user for user, ends in last_uses.items() if whole in ends)
            if places[last] < places[writer]:
                last_uses[last].remove(whole)
                last_uses.setdefault(writer, []).append(whole)


def write_part(part: torch.fx.Node, x: torch.Tensor, value: torch.Tensor) -> None:
    """Write a part to x, the tensor that it is a part of."""
    write_window(x, layout_of(part), value, **_geometry(part))


def whole_of(part: torch.fx.Node) -> torch.fx.Node:
    """Return the tensor whose memory a call of `as_strided` views."""
    whole = part.args[0]
    assert isinstance(whole, torch.fx.Node)
    return whole


def layout_of(part: torch.fx.Node) -> torch.Tensor:
    """Return that tensor as it was when the step was run."""
    layout = whole_of(part).meta["val"]
    assert isinstance(layout, torch.Tensor)
    return layout


def _geometry(part: torch.fx.Node) -> dict[str, Any]:
    names = ("size", "stride", "storage_offset")
    return {**dict(zip(names, part.args[1:], strict=False)), **part.kwargs}
