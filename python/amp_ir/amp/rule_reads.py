# SPDX-License-Identifier: Apache-2.0
"""What rules of the user's read besides their arguments, to see that it is another value now."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import attrs

from amp_ir.amp.hints import Rule
from amp_ir.host.held_values import Again, each_held

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset)
# What their objects hold is not looked into.
_LIBRARIES = frozenset(("amp_ir", "tvm", "tvm_ffi", "torch", "numpy"))
_NOT_OF_USER = _LIBRARIES | sys.stdlib_module_names
# What a rule that is no function reads: its attributes, or what `functools.partial` binds.
_ITSELF = "its own parts"


@attrs.frozen
class Read:
    """A value that a rule reads, and what was in it: plain values by value, objects by identity."""

    value: Any = attrs.field(eq=False)
    held: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> Read:
        """Look at a value now."""
        try:
            return cls(value, tuple(map(_part, each_held(value, _is_end))))
        except OverflowError:  # of thousands of values only the object itself is compared
            return cls(value, (type(value), id(value)))


def reads_of(rule: Rule) -> dict[str, Read]:
    """Return what a rule and the user's functions that it calls by name read, by variable."""
    if not isinstance(rule, FunctionType):
        return {_ITSELF: Read.of(rule)}
    return {name: Read.of(value) for name, value in _variables(rule, "", set())}


def _variables(function: FunctionType, prefix: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    seen.add(id(function))
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found = cell.cell_contents
        except ValueError:
            continue  # of a variable without a value yet
        yield prefix + name, found
    for name in sorted(_names(code) & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, FunctionType):
            if id(value) not in seen and _package(value) not in _NOT_OF_USER:
                yield from _variables(value, f"{prefix}{name}.", seen)
        elif not isinstance(value, (ModuleType, type)):
            yield prefix + name, value
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    given = dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
    for name, value in given.items():
        yield prefix + name, value


def _names(code: CodeType) -> set[str]:
    """Return the names in a function's code, and in that of the functions inside of it."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names}.union(*map(_names, inner))


def _package(value: Any) -> str:
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0]


def _is_end(value: Any) -> bool:
    if isinstance(value, (*_PLAIN, ModuleType, type)):
        return True
    return not isinstance(value, _CONTAINERS) and _package(value) in _LIBRARIES


def _part(value: Any) -> Any:
    if isinstance(value, Again):
        return value
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # NaN is as NaN, and 0.0 is not -0.0
    if isinstance(value, _CONTAINERS):
        return type(value), len(value)
    return type(value), id(value)
