# SPDX-License-Identifier: Apache-2.0
"""What two cast plans decide differently, in lines for people; also of steps with other ops."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Plan(Protocol):
    """The part of a CastPlan that is compared."""

    @property
    def ops(self) -> Any:
        """The ops, in order."""

    @property
    def casts(self) -> Any:
        """The inserted casts."""


def differences(mine: Plan, other: Plan) -> Iterator[str]:
    """Yield what `other` decides differently, one line a difference; nothing if nothing."""
    for field in ("amp_dtype", "policy", "placement", "output_dtypes"):
        before, after = getattr(mine, field), getattr(other, field)
        if before != after:
            yield f"{field}: {before} -> {after}"
    old, new = ([(one.name, one.module, one.phase) for one in p.ops] for p in (mine, other))
    # Without junk: an op that comes often is as good an anchor as any.
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, first, last, start, end in matcher.get_opcodes():
        if tag == "equal":
            pairs = zip(mine.ops[first:last], other.ops[start:end], strict=True)
            yield from (_changed(*pair) for pair in pairs if _dtypes(pair[0]) != _dtypes(pair[1]))
        else:
            yield from (f"gone: {_described(one)}" for one in mine.ops[first:last])
            yield from (f"new: {_described(one)}" for one in other.ops[start:end])
    counts = [sum(cast.nbytes for cast in plan.casts) for plan in (mine, other)]
    if len(mine.casts) != len(other.casts) or counts[0] != counts[1]:
        yield (
            f"casts: {len(mine.casts)} ({counts[0]} bytes) -> "
            f"{len(other.casts)} ({counts[1]} bytes)"
        )


def dtypes_in_words(one: Any) -> str:
    """Return what an op reads and leaves: "float32+bfloat16 -> bfloat16"."""
    return f"{_distinct(one.reads)} -> {_distinct(one.results)}"


def _dtypes(one: Any) -> tuple[Any, Any]:
    return one.reads, one.results


def _changed(before: Any, after: Any) -> str:
    return (
        f"{before.variable} = {before.name} in {before.module or 'step'}: "
        f"{dtypes_in_words(before)} becomes {dtypes_in_words(after)}: {after.reason} [{after.rule}]"
    )


def _described(one: Any) -> str:
    place = f"{one.module or 'step'} ({one.phase})"
    return f"{one.variable} = {one.name} in {place}, {dtypes_in_words(one)}"


def _distinct(dtypes: Sequence[str]) -> str:
    return "+".join(dict.fromkeys(dtypes)) or "-"
