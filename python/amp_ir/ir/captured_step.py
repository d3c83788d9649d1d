# SPDX-License-Identifier: Apache-2.0
"""CapturedStep, the capture's result: a functional graph and the tensors that it works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from amp_ir.ir.step_module import Role


@attrs.frozen
class CapturedInput:
    """One placeholder of the graph, in order.

    `tensor_or_reader` is the user's own live tensor for state (parameters, buffers, optimizer
    state), a function that returns the current tensor in `p.grad` for a gradient, a function that
    reads the current value as a new 0-d float64 tensor for a hyper-parameter, and the example's
    tensor for the batch.
    """

    name: str
    role: Role
    tensor_or_reader: torch.Tensor | Callable[[], torch.Tensor] = attrs.field(eq=False)


@attrs.frozen
class CapturedOutput:
    """One field of the graph's output tuple, in order.

    `updates` is the position of the input whose tensor takes this value after the step. It is None
    for a RESULT, and for a GRADIENT of a parameter whose `grad` was not an input: that tensor goes
    to `CapturedStep.after_step`, which assigns it to `p.grad`.
    """

    name: str
    role: Role
    updates: int | None = None


def _nothing() -> None:
    """Do nothing."""


def _always() -> bool:
    """Return True."""
    return True


def _no_change() -> str:
    """Report no change."""
    return ""


def _never() -> bool:
    """Return False."""
    return False


def _no_numbers() -> tuple[str, ...]:
    """Report no changed number."""
    return ()


def _take_none(_plain: Sequence[Any]) -> None:
    """Read no numbers."""


def _no_gradients(_gradients: Sequence[torch.Tensor]) -> None:
    """Do nothing."""


@attrs.frozen
class CapturedStep:
    """A step as a functional ATen graph.

    `graph` takes the inputs in order and returns a flat tuple. Each node has `meta["val"]` (fake
    tensor or tuple of them) and `meta["amp_ir_location"]` (`location.Location`). A get_attr node
    is a constant tensor. A Python scalar of ATen (`alpha`, an exponent, ...) may be a node of a
    0-d float64 tensor where it depends on a hyper-parameter.
    `flatten_batch(args)` gives the batch tensors in the order of the BATCH inputs; it raises
    `errors.ArgumentError`, or `errors.ShapeMismatchError` when nothing but a shape differs.
    `unflatten_results(tensors)` builds what the user's step returns from the RESULT outputs.
    `notes` describe what the capture decided, one sentence each.

    Around a run, in this order:
    `guards_hold()` tells whether the graph still equals the step: False when the user froze
    a parameter, changed a flag of a param group, replaced a state tensor (`load_state_dict` of an
    optimizer), left gradients where there were none, ...; then capture again.
    `recompile_reason()` describes the failed guard, "" while all guards hold. `is_over()` tells
    whether the guards will never hold again. `changed_numbers()` names the Python numbers
    outside of the step that have another value now and could be inputs (`numbers_as_inputs`).
    `take_numbers(plain)` takes the plain values among the arguments, in order, before that;
    `followed` are the positions of those that are read at every call.
    `install_state()` puts optimizer state that did not exist before the capture (zeros as the
    optimizer makes them; these tensors are in `inputs` already) into `optimizer.state`. Call it
    once before the first run; calling it again changes nothing.
    `after_step(gradients)` is called after every run with the values of the GRADIENT outputs that
    have `updates=None`, in order. It sets or clears every `p.grad` as the step leaves it.
    """

    graph: torch.fx.GraphModule = attrs.field(eq=False)
    inputs: tuple[CapturedInput, ...]
    outputs: tuple[CapturedOutput, ...]
    flatten_batch: Callable[[tuple[Any, ...]], list[torch.Tensor]] = attrs.field(eq=False)
    unflatten_results: Callable[[list[torch.Tensor]], Any] = attrs.field(eq=False)
    notes: tuple[str, ...] = ()
    install_state: Callable[[], None] = attrs.field(default=_nothing, eq=False)
    guards_hold: Callable[[], bool] = attrs.field(default=_always, eq=False)
    after_step: Callable[[Sequence[torch.Tensor]], None] = attrs.field(
        default=_no_gradients, eq=False
    )
    recompile_reason: Callable[[], str] = attrs.field(default=_no_change, eq=False)
    is_over: Callable[[], bool] = attrs.field(default=_never, eq=False)
    changed_numbers: Callable[[], tuple[str, ...]] = attrs.field(default=_no_numbers, eq=False)
    take_numbers: Callable[[Sequence[Any]], None] = attrs.field(default=_take_none, eq=False)
    followed: frozenset[int] = frozenset()
