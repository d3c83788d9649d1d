# SPDX-License-Identifier: Apache-2.0
"""What a capture decided, in words for the user."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from amp_ir.frontend.interface import Interface
from amp_ir.frontend.state import State
from amp_ir.module import Role


def capture_notes(
    graph: torch.fx.GraphModule, state: State, interface: Interface
) -> tuple[str, ...]:
    """One sentence a decision; nothing about what goes without saying."""
    return tuple(_notes(graph, state, interface))


def _notes(graph: torch.fx.GraphModule, state: State, interface: Interface) -> Iterator[str]:
    constants = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    if constants:
        shapes = ", ".join(sorted(str(tuple(getattr(graph, str(c)).shape)) for c in constants))
        yield (
            f"Tensors that are no parameter or buffer are constants (shapes {shapes}): later "
            "changes to them are not seen."
        )
    if interface.fresh:
        yield (
            f"{len(interface.fresh)} tensors of optimizer state were made; they are put into "
            "optimizer.state before the first compiled step."
        )
    put = len(interface.put)
    if put:
        yield f"{put} parameters keep a gradient after the step, since it does not clear them."
    hypers = [entry.name for entry in interface.inputs if entry.role is Role.HYPER_PARAMETER]
    if hypers:
        yield f"Read from param_groups at every step: {', '.join(hypers)}."
    if any(module.training for model in state.models for module in model.modules()):
        return
    yield "The model is in eval mode."
