# SPDX-License-Identifier: Apache-2.0
"""What two cast plans decide differently, in lines for people; also of steps with other ops."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from amp_ir.amp.plan_parts import parts_of

if TYPE_CHECKING:
    from amp_ir.amp.plan import CastPlan, PlannedOp


def differences(mine: CastPlan, other: CastPlan) -> Iterator[str]:
    """Yield what `other` decides differently, one line a difference; nothing if nothing."""
    for field in ("amp_dtype", "policy", "placement", "output_dtypes"):
        before, after = getattr(mine, field), getattr(other, field)
        if before != after:
            yield f"{field}: {before} -> {after}"
    olds, news = _ops(mine), _ops(other)
    old, new = ([_key(*one) for one in ops] for ops in (olds, news))
    # Without junk: an op that comes often is as good an anchor as any.
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, first, last, start, end in matcher.get_opcodes():
        if tag == "equal":
            pairs = zip(olds[first:last], news[start:end], strict=True)
            yield from (
                _changed(before, after, where)
                for (before, _), (after, where) in pairs
                if _dtypes(before) != _dtypes(after)
            )
        else:
            yield from (f"gone: {_described(*one)}" for one in olds[first:last])
            yield from (f"new: {_described(*one)}" for one in news[start:end])
    counts = [sum(len(one.plan.casts) for one in parts_of(plan)) for plan in (mine, other)]
    nbytes = [sum(one.alone_nbytes for one in parts_of(plan)) for plan in (mine, other)]
    if counts[0] != counts[1] or nbytes[0] != nbytes[1]:
        yield f"casts: {counts[0]} ({nbytes[0]} bytes) -> {counts[1]} ({nbytes[1]} bytes)"


def _ops(plan: CastPlan) -> list[tuple[PlannedOp, str]]:
    """Return all ops, and in which loop each is."""
    return [(op, part.where) for part in parts_of(plan) for op in part.plan.ops]


def _key(one: PlannedOp, where: str) -> tuple[str, str, str, bool]:
    return one.name, one.module, one.phase, bool(where)


def dtypes_in_words(one: Any) -> str:
    """Return what an op reads and leaves: "float32+bfloat16 -> bfloat16"."""
    return f"{_distinct(one.reads)} -> {_distinct(one.results)}"


def _dtypes(one: Any) -> tuple[Any, Any]:
    return one.reads, one.results


def _changed(before: Any, after: Any, where: str) -> str:
    return (
        f"{before.variable} = {before.name} in {before.module or 'step'}{where}: "
        f"{dtypes_in_words(before)} becomes {dtypes_in_words(after)}: {after.reason} [{after.rule}]"
    )


def _described(one: Any, where: str) -> str:
    place = f"{one.module or 'step'} ({one.phase}){where}"
    return f"{one.variable} = {one.name} in {place}, {dtypes_in_words(one)}"


def _distinct(dtypes: Sequence[str]) -> str:
    return "+".join(dict.fromkeys(dtypes)) or "-"
