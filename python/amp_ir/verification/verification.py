# SPDX-License-Identifier: Apache-2.0
"""Verification: what `verify` measured, as text, JSON and one HTML page."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import attrs

from amp_ir.files.strict_json import strict_json
from amp_ir.verification.outcome import Errors
from amp_ir.verification.plan_check import PlanCheck
from amp_ir.verification.ranges import Range

EAGER, FULL = "eager float32", "amp_ir float32"
AUTOCAST, LOW, STRICT = "torch.autocast", "amp_ir low", "amp_ir low, strict"
_ORDER = (EAGER, FULL, AUTOCAST, LOW, STRICT)
# Errors below it are float32 rounding, whose ratio says nothing.
_FLOOR = 1e-6
_SHOWN = 5


@attrs.frozen
class Parameter:
    """A parameter whose gradient has a large error: ours and PyTorch's, and where it is made."""

    name: str
    error: float
    update_error: float
    pytorch_error: float | None
    line: str


@attrs.frozen(kw_only=True)
class Verification:
    """The numbers of one step, relative to float64.

    Attributes:
        step: its name.
        amp_dtype: the low dtype; "float32" where there is none.
        max_ratio: what was allowed.
        draws: for each draw, the `Errors` of every variant by its name.
        worst: the five parameters whose gradients have the largest errors, of the first draw.
        plan: the comparison of kernels with the plan, op by op; None if it was not asked for.
        ranges: the range of every low tensor, of the first draw.
        is_finite: whether float64's results, gradients and updates are.
        notes: what to know about the comparison, a sentence each.
        has_numbers: whether any draw has a floating-point number but 0 to compare.
    """

    step: str
    amp_dtype: str
    max_ratio: float
    draws: tuple[Mapping[str, Errors], ...]
    worst: tuple[Parameter, ...]
    plan: PlanCheck | None
    ranges: tuple[Range, ...]
    is_finite: bool = True
    notes: tuple[str, ...] = ()
    has_numbers: bool = True

    def __repr__(self) -> str:
        """Describe it in one line; `print` shows all of it."""
        outcome = "good" if self.is_good else "not good"
        return f"Verification({self.step} in {self.amp_dtype}: {outcome}; print() shows it)"

    @property
    def ratios(self) -> tuple[float, ...]:
        """The gradient error of amp_ir over PyTorch's in the same precision, draw by draw.

        Draws where PyTorch's is not finite have none.
        """
        if self.amp_dtype == "float32":
            return self.full_ratios
        return self._ratios(LOW, AUTOCAST)

    @property
    def full_ratios(self) -> tuple[float, ...]:
        """The gradient error of amp_ir in float32 over eager's, draw by draw."""
        return self._ratios(FULL, EAGER)

    @property
    def measure(self) -> str:
        """What the ratios are of: "gradient", or "result" for a step without gradients."""
        return "gradient" if any(one.gradients for one in self.draws[0].values()) else "result"

    def _ratios(self, ours: str, theirs: str) -> tuple[float, ...]:
        if not self.has_numbers:
            return ()
        measure = self.measure
        errors = (
            (getattr(one[ours], measure), getattr(one[theirs], measure))
            for one in self.draws
            if theirs in one
        )
        return tuple(_ratio(*pair) for pair in errors if math.isfinite(pair[1]))

    @property
    def failures(self) -> tuple[str, ...]:
        """Return what is wrong, a sentence each; () if the numbers are right."""
        return tuple(self._failures())

    def _failures(self) -> Iterator[str]:
        for one in () if self.plan is None else self.plan.mismatches:
            yield f"a kernel differs from the plan, which is a fault of amp_ir: {one}"
        if not self.is_finite:
            yield (
                "float64's own results are not finite, so there is nothing to compare with; "
                "train.find_overflow(*batch) says where that comes from"
            )
            return
        checked = [("float32", "eager float32", self.full_ratios)]
        if self.amp_dtype != "float32":
            checked.append((self.amp_dtype, "torch.autocast", self.ratios))
        for dtype, theirs, ratios in checked:
            if ratios and not _mean(ratios) <= self.max_ratio:
                times = f"{_mean(ratios):.2f} times that of {theirs}"
                yield (
                    f"in {dtype} the {self.measure} error is {times}, more than {self.max_ratio:g}"
                )
        ours = FULL if self.amp_dtype == "float32" else LOW
        if not math.isfinite(sum(getattr(one[ours], self.measure) for one in self.draws)):
            yield (
                f"a {self.measure} is not finite where float64's is; train.find_overflow(*batch) "
                "says why"
            )

    @property
    def verdict(self) -> str:
        """Return the last line of a check without failures."""
        return "The numbers are right." if self.has_numbers else "There were no numbers to check."

    @property
    def is_good(self) -> bool:
        """Whether there is no failure."""
        return not self.failures

    def to_json(self) -> str:
        """Return everything as JSON."""
        data = {
            **attrs.asdict(self, recurse=True),
            "ratios": self.ratios,
            "full_ratios": self.full_ratios,
            "failures": self.failures,
            "is_good": self.is_good,
        }
        return strict_json(data) + "\n"

    def to_html(self) -> str:
        """Return everything as one page."""
        return _page(self)

    def __str__(self) -> str:
        """Return the tables and the verdict as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        count = len(self.draws)
        yield f"{self.step} in {self.amp_dtype}, errors relative to float64, {count} draw" + (
            "s (medians)" if count > 1 else ""
        )
        yield from _table(_ERRORS_HEAD, self.error_rows())
        for dtype, theirs, ratios in self._named_ratios():
            spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
            times = f"{_mean(ratios):.2f} times the {self.measure} error of {theirs}"
            yield f"{dtype}: {times}{spread}"
        if self.worst:
            yield ""
            yield "The parameters whose gradients have the largest errors:"
            yield from _table(_WORST_HEAD, self.worst_rows())
        if self.ranges:
            yield ""
            yield f"The nearest of {len(self.ranges)} low tensors to the ends of {self.amp_dtype}:"
            yield from _table(_RANGES_HEAD, self.range_rows(_SHOWN))
        yield ""
        if self.plan is not None:
            yield str(self.plan)
        yield from (f"Note: {one}" for one in self.notes)
        yield from (f"FAILED: {one}" for one in self.failures)
        if self.is_good:
            yield self.verdict

    def _named_ratios(self) -> Iterator[tuple[str, str, tuple[float, ...]]]:
        if self.full_ratios:
            yield "float32", EAGER, self.full_ratios
        if self.amp_dtype != "float32" and self.ratios:
            yield self.amp_dtype, AUTOCAST, self.ratios

    def error_rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the first table."""
        rows = []
        for name in (one for one in _ORDER if one in self.draws[0]):
            errors = [one[name] for one in self.draws]
            numbers = [
                statistics.median(getattr(one, field) for one in errors)
                for field in ("result", "gradient", "median", "largest", "update")
            ]
            rows.append((name, *(f"{one:.1e}" for one in numbers)))
        return rows

    def worst_rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the second table."""
        return [
            (
                one.name,
                f"{one.error:.1e}",
                "" if one.pytorch_error is None else f"{one.pytorch_error:.1e}",
                f"{one.update_error:.1e}",
                os.path.basename(one.line),
            )
            for one in self.worst
        ]

    def range_rows(self, count: int) -> list[tuple[str, ...]]:
        """Return the rows of the third table: what lost most, then what is nearest to the top."""
        ordered = sorted(self.ranges, key=lambda one: (-round(one.lost, 3), one.headroom_bits))
        return [
            (
                f"{one.op} in {one.module or 'step'} ({one.phase})",
                f"{one.largest:.2e}",
                f"{one.headroom_bits:.1f}",
                *map(_share_text, one.shares),
            )
            for one in ordered[:count]
        ]


_ERRORS_HEAD = ("variant", "result", "gradient", "median", "largest", "update")
_WORST_HEAD = ("parameter", "gradient", "PyTorch's", "update", "line")
_RANGES_HEAD = ("tensor", "largest", "headroom bits", "subnormal", "flushed to 0", "infinite")


def join(parts: Sequence[Verification]) -> Verification:
    """Return one verification of the draws of several; the rest is the first one's."""
    return attrs.evolve(parts[0], draws=tuple(draw for one in parts for draw in one.draws))


def _share_text(share: float) -> str:
    if not share:
        return ""
    return f"{share:.1%}" if share >= 0.0005 else "<0.1%"


def _ratio(ours: float, theirs: float) -> float:
    return (ours + _FLOOR) / (theirs + _FLOOR)


def _mean(ratios: Sequence[float]) -> float:
    if not all(map(math.isfinite, ratios)):
        return math.inf
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table whose first column is left-aligned, the others right, but for lines of code."""
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    for row in (head, *rows):
        cells = [
            one.ljust(width) if k == 0 or head[k] == "line" else one.rjust(width)
            for k, (one, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()


_STYLE = """
:root { color-scheme: light dark; --line: #8884 }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } th { text-align: left }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line) }
td:not(:first-child) { font-variant-numeric: tabular-nums; white-space: nowrap }
.wide { overflow-x: auto } summary { cursor: pointer; margin: .7rem 0 }
p { overflow-wrap: anywhere }
@media (max-width: 44rem) { th, td { padding: .3rem .35rem } }
.good { color: #15803d } .wrong { color: #c2410c }
"""


def _page(found: Verification) -> str:
    verdict = "".join(f'<p class="wrong">{escape(one)}</p>' for one in found.failures)
    verdict = verdict or f'<p class="good">{found.verdict}</p>'
    ratios = "".join(
        f"<p>{dtype}: {_mean(ratios):.2f} times the {found.measure} error of {theirs}</p>"
        for dtype, theirs, ratios in found._named_ratios()
    )
    notes = "".join(f"<p>Note: {escape(one)}.</p>" for one in found.notes)
    plan = "" if found.plan is None else f"<p>{found.plan}.</p>"
    tables = _html_table("Errors relative to float64", _ERRORS_HEAD, found.error_rows())
    tables += _html_table("Parameters with the largest errors", _WORST_HEAD, found.worst_rows())
    if found.ranges:
        rows = found.range_rows(len(found.ranges))
        title = f"Low tensors nearest to the ends of {found.amp_dtype}"
        tables += _html_table(title, _RANGES_HEAD, rows[:_SHOWN])
        if rest := rows[_SHOWN:]:
            summary = f"<summary>The other {len(rest)} low tensors</summary>"
            tables += f"<details>{summary}{_html_rows(_RANGES_HEAD, rest)}</details>"
    title = escape(f"{found.step} in {found.amp_dtype}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1>{verdict}{ratios}{plan}{notes}{tables}</body></html>\n"
    )


def _html_table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return f"<h2>{escape(title)}</h2>{_html_rows(head, rows)}"


def _html_rows(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{escape(one)}</th>" for one in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(one)}</td>" for one in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead>{body}</table></div>'
