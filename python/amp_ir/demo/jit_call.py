# SPDX-License-Identifier: Apache-2.0
"""What a training file's own call of `amp_ir.jit` says of its step, read from the file's text."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import attrs

_OWNERS = ("model", "optimizer", "scaler")


@attrs.frozen
class JitCall:
    """A call of `jit` on a step: its line, and what it passes, as expressions."""

    line: int
    owners: Mapping[str, ast.expr]

    def text(self, owner: str) -> str:
        """Return an argument as it is written."""
        return f"{owner}={ast.unparse(self.owners[owner])}"


def jit_call(source: bytes, names: Mapping[str, Any]) -> JitCall | None:
    """Return the first call of `jit` that is given the function `step` of a file; None if none is.

    `names` are those that the file defines at its top level.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or _last_name(node.func) != "jit":
            continue
        by_name = {one.arg: one.value for one in node.keywords if one.arg}
        given = node.args[0] if node.args else by_name.get("step")
        if isinstance(given, ast.Name) and names.get(given.id) is names["step"]:
            owners = {owner: by_name[owner] for owner in _OWNERS if owner in by_name}
            return JitCall(node.lineno, owners)
    return None


def value_of(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return what an expression of names, attributes and lists of them is.

    Raises:
        LookupError: it has something else in it, or a name that is not there.
    """
    match expression:
        case ast.Name(id=name):
            return names[name]
        case ast.Constant(value=None):
            return None
        case ast.Attribute(value=owner, attr=name):
            return getattr(value_of(owner, names), name)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [value_of(one, names) for one in parts]
    raise LookupError(ast.unparse(expression))


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
