# SPDX-License-Identifier: Apache-2.0
"""Example inputs of a model, by position and by name, as the one tuple of a call's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from amp_ir.capture.call_arguments import (
    call_arguments,
    names_in,
    signature_of,
    split,
)
from amp_ir.capture.containers import leaves_of
from amp_ir.errors import ArgumentError

_TAKEN = (
    "pass a tensor, the tuple of the arguments by position, or a dict or BatchEncoding of the "
    "arguments by name"
)


def model_inputs(model: torch.nn.Module, example: Any) -> tuple[Any, ...]:
    """Return an example of a model's inputs as `call_arguments` does, by name where it has names.

    Args:
        model: whose `forward` is called.
        example: one tensor; a tuple or list of the arguments by position, or what `call_arguments`
            returns; or a mapping, such as a BatchEncoding, of the arguments by name.

    Raises:
        ArgumentError: it is something else, holds no tensor, or `forward` does not take it.
    """
    if isinstance(example, torch.Tensor):
        inputs: tuple[Any, ...] = (example,)
    elif isinstance(example, Mapping):
        unusable = [name for name in example if not isinstance(name, str)]
        if unusable:
            raise ArgumentError(
                f"the model's inputs have the key {unusable[0]!r}, and the keys of a dict are "
                "names of the model's arguments; a model that takes a dict is given (batch,)"
            )
        inputs = call_arguments(**example)
    elif isinstance(example, (tuple, list)):
        inputs = tuple(example)
    else:
        raise ArgumentError(f"the model's inputs are a {type(example).__name__}; {_TAKEN}")
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(inputs)):
        raise ArgumentError(
            f"the model's inputs hold no tensor; {_TAKEN}. A tokenizer makes tensors with "
            'return_tensors="pt"'
        )
    bound_inputs(model, inputs)
    return inputs


def bound_inputs(model: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a call by position where `forward` takes them so.

    Calls by position and by name, in any order, are then one and the same.

    Raises:
        ArgumentError: an argument is missing or unknown.
    """
    signature = _signature(model)
    if signature is None:
        return inputs
    by_position, named = split(inputs)
    try:
        found = signature.bind(*by_position, **named)
    except TypeError as error:
        raise ArgumentError(_why(error, model, signature, by_position, named)) from None
    return call_arguments(*found.args, **found.kwargs)


def forward_like(model: torch.nn.Module, example: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a function of bound inputs that calls the model by name where the example does.

    A model may tell the two apart, in a hook or a decorator of `forward`.
    """
    signature, names = _signature(model), tuple(split(example)[1])

    def forward(*args: Any, **named: Any) -> Any:
        if signature is not None and names:
            found = signature.bind(*args, **named)
            moved = {name: found.arguments.pop(name) for name in names if name in found.arguments}
            args, named = found.args, {**found.kwargs, **moved}
        with torch.no_grad():
            return model(*args, **named)

    if signature is not None:
        forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def mapping_by_position(model: torch.nn.Module, inputs: tuple[Any, ...]) -> str:
    """Say that the one input is a mapping of arguments' names, as `model(batch)`; "" if it is not.

    A model may well take such a mapping, so that this explains a failure and is none by itself.
    """
    signature = _signature(model)
    if len(inputs) != 1 or not isinstance(inputs[0], Mapping) or split(inputs)[1]:
        return ""
    names = set() if signature is None else set(signature.parameters)
    if not inputs[0] or not names.issuperset(inputs[0]):
        return ""
    kind, keys = type(inputs[0]).__name__, ", ".join(inputs[0])
    return (
        f"{type(model).__name__} was called with a {kind} by position, whose keys ({keys}) are "
        "names of its arguments: pass the entries by name, with **batch, or the mapping itself as "
        "the example inputs instead of a tuple"
    )


def _signature(model: Any) -> inspect.Signature | None:
    """Return what `forward` takes; None where it is not known, or this is no model."""
    return signature_of(getattr(model, "forward", None))


def _why(
    error: TypeError,
    model: torch.nn.Module,
    signature: inspect.Signature,
    by_position: tuple[Any, ...],
    named: Mapping[str, Any],
) -> str:
    """Say what was given and what the model takes."""
    words = [f"{len(by_position)} by position"] * bool(by_position)
    words += [f"{name}=" for name in named]
    kind, takes = type(model).__name__, names_in(signature)
    text = f"{kind} takes {takes}, and was called with {', '.join(words) or 'nothing'}: {error}"
    return text
