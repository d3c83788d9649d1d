# SPDX-License-Identifier: Apache-2.0
"""What is said of overrides: those that select nothing, and those that change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import attrs

from amp_ir.dialect.loop import NAME as LOOP
from amp_ir.ir.near_names import inside_of_others, near_names
from amp_ir.ir.short_list import short_list, short_names
from amp_ir.ir.step_graph import Op, StepGraph

if TYPE_CHECKING:
    from amp_ir.amp.overrides import Override

Scopes = Sequence[tuple[StepGraph, Sequence[str]]]


def describe(override: Override) -> str:
    """Return an override as the user writes it."""
    given = attrs.asdict(override, filter=lambda _attribute, value: value is not None)
    return f"Override({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def explain_unused(scopes: Scopes, override: Override) -> str:
    """Explain why an override selects nothing: the fields that match no call, and near matches."""
    ops = [op for graph, _ in scopes for op in graph.ops if op.name != LOOP]
    why = "; ".join(_unmatched(scopes, ops, override)) or _why_no_call(ops, override)
    inside = [] if override.op is None else inside_of_others(override.op, (op.name for op in ops))
    return ". ".join([f"{describe(override)} selects nothing: {why}", *inside])


def _unmatched(scopes: Scopes, ops: Sequence[Op], override: Override) -> Iterator[str]:
    """Yield the fields of an override that match no call of the step."""
    candidates = {
        "op": sorted({name for op in ops for name in (op.name, op.label)}),
        "module": _modules(ops),
        "parameter": sorted({name for _, names in scopes for name in names if name}),
    }
    for field, known in candidates.items():
        pattern = getattr(override, field)
        patterns = (pattern, f"{pattern}.*") if field == "module" else (pattern,)
        written = {name for op in ops for name in op.names} if field == "op" else known
        if pattern is None or any(fnmatchcase(n, one) for n in written for one in patterns):
            continue
        near = near_names(pattern, known)
        if field == "module" and not near:
            near = f"; the step has {short_names([*map(repr, known)])}" if known else ""
        yield f"no {field} matches {pattern!r}{near}"


def _why_no_call(ops: Sequence[Op], override: Override) -> str:
    """Explain an override each of whose fields matches some call."""
    if override.op is not None:
        named = [op for op in ops if any(fnmatchcase(one, override.op) for one in op.names)]
        if named and all(op.is_view for op in named):
            return f"{named[0].name} is a view, which has the dtype of what it looks at"
        if named and override.phase is None and _is_optimizer(named):
            return 'the optimizer\'s calls are selected by phase="optimizer" only'
    return "each word matches some call, but no call matches them all"


def _is_optimizer(ops: Sequence[Op]) -> bool:
    return all(op.location.phase == "optimizer" for op in ops)


def explain_unchanged(scopes: Scopes, override: Override, calls: Sequence[Op]) -> str:
    """Say that an override changes nothing, for the calls that it selects are so already."""
    names = ", ".join(dict.fromkeys(op.label for op in calls))
    places = list(dict.fromkeys(str(op.location) for op in calls))
    count = "1 call" if len(calls) == 1 else f"{len(calls)} calls"
    ops = [op.name for graph, _ in scopes for op in graph.ops]
    inside = [] if override.op is None else inside_of_others(override.op, ops)
    text = (
        f"{describe(override)} changes nothing: it selects {count} of {names}, for which the rules "
        f"or a later override decide the same without it ({short_list(places)})"
    )
    return ". ".join([text, *inside])


def _modules(ops: Sequence[Op]) -> list[str]:
    """Return the module paths of a step, and the paths that lead to them."""
    paths = [op.location.module.split(".") for op in ops if op.location.module]
    return sorted({".".join(path[:n]) for path in paths for n in range(1, len(path) + 1)})
