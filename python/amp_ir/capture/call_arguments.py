# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call as one tuple: those by position, then those by keyword, if any are left.

Arguments by keyword that the step also takes by position are moved there, so that `train(x, y)`
and `train(x, y=y)` run one program.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.utils._pytree as pytree

from amp_ir.errors import ArgumentError

# What an option names an argument by: its position, its name, or its key where it lies in a dict.
Key = int | str


class NamedArguments(dict[str, Any]):
    """The arguments of a call by keyword; the last entry of the tuple of its arguments."""


def _flatten(named: NamedArguments) -> tuple[list[Any], tuple[str, ...]]:
    return [*named.values()], tuple(named)


def _flatten_with_keys(named: NamedArguments) -> tuple[list[Any], tuple[str, ...]]:
    return [(NameKey(name), value) for name, value in named.items()], tuple(named)


class NameKey(pytree.MappingKey[str, Any]):
    """The name of an argument, in a path."""


pytree.register_pytree_node(
    NamedArguments,
    _flatten,
    lambda values, names: NamedArguments(zip(names, values, strict=True)),
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="amp_ir.capture.call_arguments.NamedArguments",
)


def call_arguments(*args: Any, **named: Any) -> tuple[Any, ...]:
    """Return the arguments of a call as `example_batch`, which has them by keyword too.

    `amp_ir.trace_step(step, amp_ir.call_arguments(x, labels=y), ...)` captures `step(x, labels=y)`.
    """
    return (*args, NamedArguments(named)) if named else args


def signature_of(step: Any) -> inspect.Signature | None:
    """Return the signature of a step; None for a builtin without one."""
    try:
        return inspect.signature(step)
    except (TypeError, ValueError):
        return None


def split(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments by position, and those by keyword."""
    if arguments and isinstance(arguments[-1], NamedArguments):
        return arguments[:-1], arguments[-1]
    return arguments, {}


def names_in(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature without annotations."""
    empty = inspect.Signature.empty
    parameters = [one.replace(annotation=empty) for one in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=empty)


def call(step: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a step with arguments by position and by keyword."""
    by_position, named = split(arguments)
    return step(*by_position, **named)


def bound(
    signature: inspect.Signature | None, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a call as one tuple, by position where the step takes them so.

    Raises:
        ArgumentError: the step does not take these arguments.
    """
    if not named:
        return args
    if signature is None:
        return call_arguments(*args, **named)
    try:
        found = signature.bind(*args, **named)
    except TypeError as error:
        raise ArgumentError(f"{error}; the arguments are {names_in(signature)}") from None
    return call_arguments(*found.args, **found.kwargs)
