# SPDX-License-Identifier: Apache-2.0
"""The first call of a jitted step in a script that makes its parts in a function."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import attrs

from amp_ir.ir.capturing import before_call


@attrs.frozen
class FirstCall:
    """What a jitted step was made of, and the arguments of its first call."""

    step: Callable[..., Any]
    model: Any
    optimizer: Any
    scaler: Any
    batch: tuple[Any, ...]


class _Stop(BaseException):
    """Ends a script at its first call; no `except Exception` of the script catches it."""


def first_call(run: Callable[[], Any]) -> FirstCall | None:
    """Run a script until it calls a jitted step, which is not run; None if it calls none."""
    found: list[FirstCall] = []

    def take(step: Callable[..., Any], owners: Mapping[str, Any], batch: tuple[Any, ...]) -> None:
        if not found:
            model, optimizer, scaler = (owners[name] for name in ("model", "optimizer", "scaler"))
            found.append(FirstCall(step, model, optimizer, scaler, batch))
        raise _Stop

    earlier = before_call.set(take)
    try:
        run()
    except _Stop:
        pass
    except BaseException:
        # What the script makes of being stopped, such as an exit code, is not its failure.
        if not found:
            raise
    finally:
        before_call.reset(earlier)
    return found[0] if found else None


def calls_jit_in_a_function(source: bytes, needed: Collection[str]) -> bool:
    """Say whether a script names `amp_ir` and `jit`, and not all needed names at its top level."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False  # running it shows the line
    words = {one for node in ast.walk(tree) for one in _words(node)}
    bound = set(_bound(tree))
    return {"amp_ir", "jit"} <= words and "*" not in bound and not bound.issuperset(needed)


def _words(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node reads or imports."""
    match node:
        case ast.Import(names=names):
            yield from (one.name.partition(".")[0] for one in names)
        case ast.ImportFrom(module=module, names=names):
            yield (module or "").partition(".")[0]
            yield from (one.name for one in names)
        case ast.Attribute(attr=name):
            yield name


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that the statements outside of functions and classes bind."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name
            case ast.Lambda():
                pass
            case _:
                yield from _bound(child)
