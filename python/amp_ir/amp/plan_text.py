# SPDX-License-Identifier: Apache-2.0
"""Texts of a CastPlan: its summary, the explanation of each op, and its casts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from amp_ir.amp.plan_diff import dtypes_in_words
from amp_ir.amp.plan_parts import Part, parts_of
from amp_ir.errors import OptionError
from amp_ir.ir.nbytes_text import mebibytes
from amp_ir.ir.near_names import inside_of_others, near_names
from amp_ir.ir.selection import is_inside, names_of_op

if TYPE_CHECKING:
    from amp_ir.amp.plan import CastPlan, PlannedCast, PlannedOp


def summary(plan: CastPlan) -> Iterator[str]:
    """Yield two lines of numbers of the whole step, one per loop, and one per op name."""
    parts = parts_of(plan)
    casts = sum(len(one.plan.casts) for one in parts)
    nbytes = sum(one.alone_nbytes for one in parts)
    yield (
        f"{plan.amp_dtype}, policy {plan.policy}, placement {plan.placement}: "
        f"{_low(parts)} of {sum(len(one.plan.ops) for one in parts)} ops touch {plan.amp_dtype}; "
        f"{casts} casts, {_alone(parts)} of them kernels of their own "
        f"({mebibytes(nbytes)} a step)"
    )
    chosen, greedy, full = (
        mebibytes(sum(one.length * getattr(one.plan.cost_nbytes, name) for one in parts))
        for name in ("chosen", "greedy", "full")
    )
    yield (
        f"values of free ops move {chosen} a step, with the greedy placement {greedy}, in float32 "
        f"{full}"
    )
    for one in parts[1:]:
        assert one.loop is not None
        yield (
            f"of these in each of {one.length} steps of {one.loop.variable}, the loop in "
            f"{_place(one.loop)}: {_low([one])} of {len(one.plan.ops)} ops, {len(one.plan.casts)} "
            f"casts, {_alone([one])} of them kernels of their own"
        )
    for one in parts:
        counts = Counter((op.name, dtypes_in_words(op)) for op in one.plan.ops)
        width = max((len(name) for name, _ in counts), default=0)
        for (name, dtypes), n in sorted(counts.items()):
            yield f"  {name:{width}}  {dtypes}  x{n}{one.where}"


def _low(parts: Sequence[Part]) -> int:
    ops = [op for one in parts for op in one.plan.ops]
    return sum(parts[0].plan.amp_dtype in op.reads + op.results for op in ops)


def _alone(parts: Sequence[Part]) -> int:
    return sum(cast.is_alone for one in parts for cast in one.plan.casts)


def cast_traffic(plan: CastPlan) -> Iterator[str]:
    """Yield the bytes that dtypes cost the compiled step, by reason."""
    for one in sorted(plan.moved, key=lambda one: (not one.is_free, -one.nbytes)):
        free = "free " if one.is_free else "fixed"
        yield f"{_mebibytes(one.nbytes)}  {free}  {one.what}: {one.reason}"
    total = sum(one.nbytes for one in plan.moved)
    of_placement = sum(one.nbytes for one in plan.moved if one.is_free)
    yield f"{_mebibytes(total)}  in all, {of_placement / 2**20:.2f} of it by the placement"
    chosen, bound = (
        sum(one.length * getattr(one.plan.cost_nbytes, name) for one in parts_of(plan)) / 2**20
        for name in ("chosen", "bound")
    )
    yield (
        f"by the cost model, the values of free ops move {chosen:.2f} MiB; "
        f"no placement moves less than {bound:.2f}"
    )


def explain(plan: CastPlan, what: str) -> list[str]:
    """Return the lines on the ops that `what` matches, and on their casts.

    Raises:
        OptionError: it matches nothing.
    """
    bodies = {one.loop.id: one for one in parts_of(plan) if one.loop is not None}
    lines = []
    for op in plan.ops:
        lines += _explained(Part(plan), op, what)
        if op.id in bodies:
            body = bodies[op.id]
            lines += [line for one in body.plan.ops for line in _explained(body, one, what)]
    ops = [op for part in parts_of(plan) for op in part.plan.ops]
    inside = inside_of_others(what, (op.name for op in ops))
    if not lines:
        known = {name for op in ops for name in (op.name, op.module) if name}
        nothing = f"no op or module of the step matches {what!r}{near_names(what, known)}"
        raise OptionError(". ".join([nothing, *inside]))
    return [*lines, *inside]


def _explained(part: Part, op: PlannedOp, what: str) -> list[str]:
    if not _is_meant(op, what):
        return []
    lines = [
        f"{op.variable} = {op.name}  {dtypes_in_words(op)}  in {_place(op)}{part.where}",
        f"    {op.reason} [{op.rule}]",
    ]
    for cast in part.plan.casts:
        if cast.consumer == op.id:
            how = f"alone, {cast.nbytes} bytes" if cast.is_alone else "fused"
            shared = "shared" if cast.is_shared else "private"
            lines.append(
                f"    cast of {_maker(part, cast)}: {cast.from_dtype} -> {cast.to_dtype}, "
                f"{shared}, {how}"
            )
    return lines


def casts(plan: CastPlan) -> list[str]:
    """Return a line for each cast, by the modules of the ops that read them."""
    lines: dict[str, list[str]] = {}
    for part in parts_of(plan):
        for cast in part.plan.casts:
            # An output has no op that reads it; the op that makes it says where it is.
            ops = part.plan.ops
            near = cast.consumer if cast.consumer >= 0 else cast.source
            one = ops[near] if near >= 0 else part.loop
            assert one is not None, "an input is no output"
            reader = ops[cast.consumer].name if cast.consumer >= 0 else _readers(part)
            place = f"{one.module or 'step'} ({one.phase})"
            lines.setdefault(place, []).append(
                f"{place}: {cast.from_dtype} -> {cast.to_dtype} for {reader}, {cast.elements} "
                f"elements, of {_maker(part, cast)}, "
                f"{'a kernel of its own' if cast.is_alone else 'fused'}{part.where}"
            )
    return [line for of_module in lines.values() for line in of_module]


def _readers(part: Part) -> str:
    """Return what reads the outputs of a part."""
    return "the result" if part.loop is None else "the next step or a result"


def _maker(part: Part, cast: PlannedCast) -> str:
    return part.plan.ops[cast.source].variable if cast.source >= 0 else "an input"


def _place(one: PlannedOp) -> str:
    return f"{one.module or 'step'} ({one.phase}) {one.line}".rstrip()


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:9.2f} MiB"


def _is_meant(one: PlannedOp, what: str) -> bool:
    names = (*names_of_op(one.name), one.variable)
    return is_inside(one.module, what) or any(fnmatchcase(n, what) for n in names)
