# SPDX-License-Identifier: Apache-2.0
"""Bytes over a step as one drawing: the memory alive during each call, by role, stacked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from html import escape

from amp_ir.ir.memory_plan import MemoryRole
from amp_ir.ir.nbytes_text import mebibytes
from amp_ir.report.memory import MemoryReport, Moment

# From the bottom up: what is always there first. Colours are variables of the page's style.
_STACK = (
    MemoryRole.PARAMETER,
    MemoryRole.BUFFER,
    MemoryRole.OPTIMIZER_STATE,
    MemoryRole.OTHER_STATE,
    MemoryRole.BATCH,
    MemoryRole.RESULT,
    MemoryRole.LOW_COPY,
    MemoryRole.SAVED_ACTIVATION,
    MemoryRole.GRADIENT,
    MemoryRole.TEMPORARY,
    MemoryRole.WORKSPACE,
)
_HEIGHT = 1000
_LEAST_NAMED = 10  # less than a tenth of the calls has no room for a phase's name
_LEAST_SHOWN = 500  # a role below 1 / 500 of the peak is thinner than a line


def colour_class(role: str) -> str:
    """Return the class that carries a role's colour."""
    return "role-" + role.replace(" ", "-")


def memory_chart(report: MemoryReport) -> str:
    """Return the chart with its legend and axis as HTML; empty for a step without calls."""
    moments = report.timeline
    if not moments:
        return "<p>The step runs nothing.</p>"
    roles = [role.value for role in _STACK if any(role.value in m.nbytes_by_role for m in moments)]
    ticks = rounded_ticks(max(report.peak_bytes, 1))
    top = ticks[-1]
    areas = "".join(_areas(moments, roles, top))
    peak = (report.peak_call + 0.5) / len(moments)
    axis = "".join(
        f'<span style="bottom:{tick / top:.2%}">{_tick(tick, top)}</span>' for tick in ticks
    )
    rules = "".join(f'<i class="rule" style="bottom:{tick / top:.2%}"></i>' for tick in ticks[1:-1])
    return (
        f'<div class="chart"><div class="axis">{axis}</div><div class="plot">'
        f"{_shades(moments)}{rules}"
        f'<svg viewBox="0 0 {len(moments)} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="Bytes held during each call; peak {mebibytes(report.peak_bytes)}">{areas}'
        f'</svg><i class="peak" style="left:{peak:.3%}"></i><i class="cursor" hidden></i></div>'
        f'<p class="ends"><span>{_phases(moments)}</span></p></div>'
        f'<p class="key">{_legend(report, roles)}</p><p class="key">behind: {_phase_key(moments)}'
        '</p><p class="under" aria-live="polite">'
        "Point at the chart to see a call.</p>"
    )


def rounded_ticks(top: int) -> list[int]:
    """Return three to six round numbers of bytes from 0 to at least `top`: 1, 2 or 5 times 10^n.

    They count MiB, or KiB or bytes where there is not one MiB.
    """
    unit = 2**20 if top >= 2**20 else 2**10 if top >= 2**10 else 1
    least = top / unit / 5
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= least)
    count = math.ceil(top / unit / step)
    return [round(k * step * unit) for k in range(count + 1)]


def _tick(nbytes: int, top: int) -> str:
    unit, name = (2**20, "MiB") if top >= 2**20 else (2**10, "KiB") if top >= 2**10 else (1, "B")
    return f"{nbytes / unit:g} {name}"


def _shades(moments: Sequence[Moment]) -> str:
    """Return a band behind each run of calls of one phase; the longest of a phase has its name."""
    runs: list[tuple[str, int, int]] = []
    for phase, group in itertools.groupby(moments, key=lambda moment: moment.phase or "other"):
        begin = runs[-1][1] + runs[-1][2] if runs else 0
        runs.append((phase, begin, len(list(group))))
    longest: dict[str, int] = {}
    for phase, _, count in runs:
        longest[phase] = max(count, longest.get(phase, 0))
    bands = []
    for phase, begin, count in runs:
        is_named = count == longest[phase] and count * _LEAST_NAMED >= len(moments)
        name = escape(phase) if is_named else ""
        bands.append(
            f'<i class="band phase-{escape(phase)}" style="left:{begin / len(moments):.3%};'
            f'width:{count / len(moments):.3%}"><span>{name}</span></i>'
        )
    return "".join(bands)


def _areas(moments: Sequence[Moment], roles: Sequence[str], top: int) -> Iterator[str]:
    """Return one path per role: along the upper edges of its columns, back along the lower ones."""
    below = [0] * len(moments)
    for role in roles:
        above = [
            base + moment.nbytes_by_role.get(role, 0)
            for base, moment in zip(below, moments, strict=True)
        ]
        upper = "".join(_column(k, nbytes, top) for k, nbytes in enumerate(above))
        lower = "".join(
            f"L{k + 1} {_y(nbytes, top)}L{k} {_y(nbytes, top)}"
            for k, nbytes in reversed(list(enumerate(below)))
        )
        yield f'<path class="{colour_class(role)}" d="M0 {_HEIGHT}{upper}{lower}Z"/>'
        below = above


def _column(position: int, nbytes: int, top: int) -> str:
    height = _y(nbytes, top)
    return f"L{position} {height}L{position + 1} {height}"


def _y(nbytes: int, top: int) -> str:
    return f"{_HEIGHT * (1 - nbytes / top):.1f}".removesuffix(".0")


def _phases(moments: Sequence[Moment]) -> str:
    backward = next((k for k, m in enumerate(moments) if m.phase == "backward"), None)
    where = "" if backward is None else f"; the backward pass begins at call {backward}"
    return f"{len(moments)} calls, in order{where}"


def _phase_key(moments: Sequence[Moment]) -> str:
    names = dict.fromkeys(moment.phase or "other" for moment in moments)
    return " ".join(
        f'<span><i class="swatch phase-{escape(name)}"></i>{escape(name)}</span>' for name in names
    )


def _legend(report: MemoryReport, roles: Sequence[str]) -> str:
    """Return the visible roles, with their bytes at the peak."""
    at_peak = report.nbytes_by_role
    most = {role: max(m.nbytes_by_role.get(role, 0) for m in report.timeline) for role in roles}
    return " ".join(
        f'<span><i class="swatch {colour_class(role)}"></i>{escape(role)} '
        f"<b>{mebibytes(at_peak.get(role, 0))}</b></span>"
        for role in reversed(roles)
        if most[role] * _LEAST_SHOWN >= report.peak_bytes
    )
