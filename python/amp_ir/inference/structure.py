# SPDX-License-Identifier: Apache-2.0
"""Nested arguments and results as JSON: tuples, lists, dictionaries, tensors and plain values."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.utils._pytree as pytree

from amp_ir.capture.batch import Arguments, Results
from amp_ir.capture.call_arguments import NamedArguments
from amp_ir.capture.containers import Record
from amp_ir.errors import OptionError

_PLAIN = (type(None), bool, int, float, str)


def arguments_to_json(arguments: Arguments) -> dict[str, Any]:
    """Describe the arguments of a program: the structure, and each leaf without its numbers."""
    leaves = [_leaf_to_json(leaf) for leaf in arguments.leaves]
    return {"structure": _spec_to_json(arguments.spec), "leaves": leaves}


def arguments_from_json(data: dict[str, Any], device: str) -> tuple[Any, ...]:
    """Return arguments of that description on a device; the tensors' numbers are undefined."""
    leaves = [_leaf_from_json(leaf, device) for leaf in data["leaves"]]
    made: tuple[Any, ...] = pytree.tree_unflatten(leaves, _spec_from_json(data["structure"]))
    return made


def results_to_json(results: Results) -> dict[str, Any]:
    """Describe the results of a program. A class that is a dictionary becomes a plain one."""
    structure = _spec_to_json(results.spec)
    constants = [
        None if place is not None else _plain_to_json(constant)
        for place, constant in zip(results.places, results.constants, strict=True)
    ]
    return {
        "structure": structure,
        "places": list(results.places),
        "constants": constants,
        "numbers": sorted(results.numbers),
    }


def results_from_json(data: dict[str, Any]) -> Results:
    """Return what `results_to_json` described."""
    constants = [None if one is None else one["value"] for one in data["constants"]]
    return Results(
        _spec_from_json(data["structure"]),
        tuple(data["places"]),
        tuple(constants),
        frozenset(data["numbers"]),
    )


def _leaf_to_json(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, torch.Tensor):
        return {
            "shape": list(leaf.shape),
            "strides": list(leaf.stride()),
            "dtype": str(leaf.dtype).removeprefix("torch."),
            "requires_grad": leaf.requires_grad,
        }
    return _plain_to_json(leaf)


def _plain_to_json(leaf: Any) -> dict[str, Any]:
    if type(leaf) in _PLAIN:
        return {"value": leaf}
    raise OptionError(
        f"the program takes or returns a {type(leaf).__name__}, {leaf!r}, which a file cannot "
        "hold; give tensors, and values of the types bool, int, float, str and None"
    )


def _leaf_from_json(data: dict[str, Any], device: str) -> Any:
    if "value" in data:
        return data["value"]
    return torch.empty_strided(
        data["shape"],
        data["strides"],
        dtype=getattr(torch, data["dtype"]),
        device=device,
        requires_grad=data["requires_grad"],
    )


def names_to_json(names: inspect.Signature | None) -> list[list[Any]] | None:
    """Describe a signature: name and kind of each argument, and its default where it is plain."""
    if names is None:
        return None
    return [
        [one.name, one.kind.name, *_default_to_json(one.default)]
        for one in names.parameters.values()
    ]


def _default_to_json(default: Any) -> list[Any]:
    if default is inspect.Parameter.empty:
        return []
    return [default if type(default) in _PLAIN else {}]


def names_from_json(data: list[list[Any]] | None) -> inspect.Signature | None:
    """Return the signature of `names_to_json`; a default that a file cannot hold is `...`."""
    if data is None:
        return None
    parameters = []
    for name, kind, *default in data:
        value = default[0] if default else inspect.Parameter.empty
        value = ... if value == {} else value
        made = inspect.Parameter(name, inspect._ParameterKind[kind], default=value)
        parameters.append(made)
    return inspect.Signature(parameters)


def _spec_to_json(spec: pytree.TreeSpec) -> Any:
    return _to_json(pytree.tree_unflatten(range(spec.num_leaves), spec))


def _to_json(value: Any) -> Any:
    if isinstance(value, int):
        return value
    if isinstance(value, NamedArguments):
        return {"named": [[name, _to_json(one)] for name, one in value.items()]}
    if isinstance(value, dict):
        keys = list(value)
        if all(isinstance(key, (str, int)) for key in keys):
            return {"dict": [[key, _to_json(one)] for key, one in value.items()]}
    elif type(value) in (tuple, list):
        return {type(value).__name__: [_to_json(one) for one in value]}
    kind = value.shape.kind if isinstance(value, Record) else type(value)
    cache = (
        ". A model of transformers returns no cache when it is converted and called with "
        '"use_cache": False among its inputs'
    )
    raise OptionError(
        f"the program takes or returns a {kind.__name__}, which a file cannot hold; give tuples, "
        f"lists and dictionaries{cache if kind.__name__.endswith('Cache') else ''}"
    )


def _spec_from_json(data: Any) -> pytree.TreeSpec:
    return pytree.tree_flatten(_from_json(data))[1]


def _from_json(data: Any) -> Any:
    if isinstance(data, int):
        return data
    ((kind, entries),) = data.items()
    if kind == "dict":
        return {key: _from_json(one) for key, one in entries}
    if kind == "named":
        return NamedArguments({name: _from_json(one) for name, one in entries})
    fields = [_from_json(one) for one in entries]
    return tuple(fields) if kind == "tuple" else fields
