# SPDX-License-Identifier: Apache-2.0
"""The decisions of a capture, as sentences for the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from amp_ir.capture.interface import Interface
from amp_ir.capture.state import State
from amp_ir.ir.location import Location
from amp_ir.ir.short_list import short_list, short_names
from amp_ir.ir.step_module import Role

_MOST = 5
# Of a step that does not train what it was given an optimizer for.
NOT_TRAINED = (
    "The step was given an optimizer, and returns a tensor that requires a gradient without "
    "calling backward(); results of a compiled step have no gradient, so that backward() after it "
    "trains nothing. Call backward() and optimizer.step() inside of the step, compile the model "
    'alone with torch.compile(model, backend="amp_ir"), or call a step that only evaluates under '
    "torch.no_grad()."
)
_SHOWN = "The step turns a tensor into text, as print does, at "


def is_warning(note: str) -> bool:
    """Return whether a note is to be seen without asking for notes."""
    return note.startswith((NOT_TRAINED, _SHOWN))


def shown_notes(places: Sequence[Location]) -> tuple[str, ...]:
    """Return a note of the lines at which a step turns tensors to text."""
    if not places:
        return ()
    return (
        f"{_SHOWN}{short_list(places)}. That runs when the step is captured, not at each call, "
        "and shows no values: return the tensor and print it after the call.",
    )


def number_notes(followed: frozenset[str], unfollowed: frozenset[str]) -> tuple[str, ...]:
    """Return the outcome for each number that was to be an input."""
    notes = []
    if followed:
        notes.append(f"Python numbers that are read at every call: {', '.join(sorted(followed))}.")
    if unfollowed:
        notes.append(
            "Python numbers that stay guards, since they decide a branch, a size or what is not "
            f"computed with tensors: {', '.join(sorted(unfollowed))}."
        )
    return tuple(notes)


def capture_notes(
    graph: torch.fx.GraphModule, state: State, interface: Interface, followed: frozenset[str]
) -> tuple[str, ...]:
    """Return one sentence per decision; nothing about the default case.

    `followed` are the names of the inputs that are not hyper-parameters but Python numbers.
    """
    return tuple(_notes(graph, state, interface, followed))


def _notes(
    graph: torch.fx.GraphModule, state: State, interface: Interface, followed: frozenset[str]
) -> Iterator[str]:
    outside = [entry.name for entry in state.outside]
    if outside:
        yield (
            f"{len(outside)} tensors from outside of the model are read at every call: "
            f"{short_names(outside, most=_MOST)}."
        )
    if interface.fresh:
        yield (
            f"{len(interface.fresh)} tensors of optimizer state were made; they are put into "
            "optimizer.state before the first compiled step."
        )
    put = len(interface.put)
    if put:
        yield f"{put} parameters keep a gradient after the step, since it does not clear them."
    hypers = [
        entry.name
        for entry in interface.inputs
        if entry.role is Role.HYPER_PARAMETER and entry.name not in followed
    ]
    if hypers:
        yield f"Read from param_groups at every step: {', '.join(hypers)}."
    if any(module.training for model in state.models for module in model.modules()):
        return
    yield "The model is in eval mode."
