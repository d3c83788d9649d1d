# SPDX-License-Identifier: Apache-2.0
"""Strict construction of a plan's classes from JSON: every field, of its type, and no other."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import attrs

T = TypeVar("T")
_NAMES = {dict: "an object", list: "a list", str: "text", int: "an integer", bool: "true or false",
          float: "a number", type(None): "null"}  # fmt: skip


def from_fields(cls: type[T], data: Any, where: str) -> T:
    """Make a `cls` of a JSON object's entries; lists become tuples.

    Args:
        cls: an attrs class of integers, booleans, texts, literals, such classes and tuples of them.
        data: what JSON held.
        where: the place of `data`, for the message.

    Raises:
        ValueError: an entry is missing, unknown, or of another type; it says which and where.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {_named(data)}, expected an object")
    resolved: Any = attrs.resolve_types(cls)  # type: ignore[type-var]
    fields = attrs.fields_dict(resolved)
    required = [name for name, one in fields.items() if one.default is attrs.NOTHING]
    missing = sorted(set(required) - set(data))
    unknown = sorted(set(data) - set(fields))
    if missing or unknown:
        errors = [f"{where} has no {', '.join(missing)}"] if missing else []
        errors += [f"{where} has the unknown {', '.join(unknown)}"] if unknown else []
        raise ValueError("; ".join(errors))
    values = {
        name: _value(fields[name].type, value, f"{where}.{name}") for name, value in data.items()
    }
    return cls(**values)


def _value(expected: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is tuple:
        return _items(arguments[0], value, where)
    if attrs.has(expected):
        return from_fields(expected, value, where)
    if not _fits(expected, origin, arguments, value):
        raise ValueError(f"{where} is {_named(value)}, expected {_expected(expected)}")
    return value


def _items(expected: Any, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} is {_named(value)}, expected a list")
    return tuple(_value(expected, one, f"{where}[{k}]") for k, one in enumerate(value))


def _fits(expected: Any, origin: Any, arguments: Sequence[Any], value: Any) -> bool:
    if origin is Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return type(value) in arguments
    return type(value) is expected  # so that true is not an integer


def _expected(expected: Any) -> str:
    arguments = typing.get_args(expected)
    if typing.get_origin(expected) is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    return " or ".join(_NAMES[one] for one in arguments or (expected,))


def _named(value: Any) -> str:
    if isinstance(value, str):
        return repr(value[:40])
    name = _NAMES.get(type(value), type(value).__name__)
    return f"{name}, {value}" if type(value) is int else name
