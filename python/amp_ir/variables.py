# SPDX-License-Identifier: Apache-2.0
"""Which variables an expression reads."""

from __future__ import annotations

from typing import Any

from tvm import relax


def variables_of(expr: relax.Expr) -> list[relax.Var]:
    """The variables that an expression reads, in order and as often as it does."""
    kind = _kind_of(type(expr))
    if kind is relax.Var:
        return [expr]
    if kind is relax.TupleGetItem:
        return variables_of(expr.tuple_value)
    if kind is relax.Expr:
        return []
    found: list[relax.Var] = []
    # A slice fetches an array of TVM at once, and passes ask this of thousands of bindings.
    for part in (expr.args if kind is relax.Call else expr.fields)[:]:
        if _kind_of(type(part)) is relax.Var:
            found.append(part)
        else:
            found += variables_of(part)
    return found


# Asked once a class: TVM's have a metaclass whose `isinstance` is slow where the answer is no.
_kinds: dict[type, Any] = {}


def _kind_of(class_: type) -> Any:
    """Which of the kinds told apart here a class is of; `relax.Expr`: one without variables."""
    if class_ not in _kinds:
        known = (relax.Var, relax.Call, relax.Tuple, relax.TupleGetItem)
        _kinds[class_] = next((one for one in known if issubclass(class_, one)), relax.Expr)
    return _kinds[class_]
