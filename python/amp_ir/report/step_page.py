# SPDX-License-Identifier: Apache-2.0
"""One step as one HTML file: memory, kernels, exchanges with other ranks, the cast plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Protocol

from amp_ir.ir.nbytes_text import mebibytes
from amp_ir.report.bar_shares import bar_shares
from amp_ir.report.exchange_section import exchange_section
from amp_ir.report.kernel_profile import KernelProfile, KernelTotal
from amp_ir.report.kernel_table import (
    LEAST_SHARE,
    how_timed,
    kernel_time,
    rate,
    rate_unit,
    rounded,
    shortened,
    step_time,
)
from amp_ir.report.memory import HeldValue, MemoryReport
from amp_ir.report.memory_chart import colour_class, memory_chart
from amp_ir.report.step_style import SCRIPT, STYLE

_SHOWN_VALUES = 20


class RoundingError(Protocol):
    """One row; see amp_ir.verification.contributions.Contribution."""

    @property
    def name(self) -> str:
        """What is rounded."""

    @property
    def phase(self) -> str:
        """The phase; "" for several."""

    @property
    def error(self) -> float:
        """The gradients' error by these roundings alone."""

    @property
    def worst_parameter(self) -> str:
        """The parameter whose gradient they change most."""


class RoundingErrors(Protocol):
    """The gradients' error by op; see amp_ir.verification.error_report.ErrorReport."""

    @property
    def error(self) -> float:
        """By all roundings together."""

    @property
    def contributions(self) -> Sequence[RoundingError]:
        """By each op, the largest first."""

    @property
    def is_complete(self) -> bool:
        """Whether every op was measured."""

    @property
    def evaluated_in(self) -> str:
        """The dtype of what is not rounded."""


def step_page(
    title: str,
    memory: MemoryReport,
    profile: KernelProfile,
    plan: Any,
    machine: str,
    peers: Mapping[str, float] | None = None,
    errors: RoundingErrors | None = None,
    doubt: str = "",
) -> str:
    """Return the page; it loads nothing from anywhere.

    Args:
        title: what was measured.
        memory: its memory; where it has a baseline, what AMP saved and cost is shown.
        profile: its time.
        plan: the CastPlan, or None for a step without casts.
        machine: the machine in a few words.
        peers: milliseconds of a step by who ran it, in turns; the first is this step.
        errors: the gradients' error by op, where it was measured.
        doubt: why the times may not be the machine's best.
    """
    doubted = f"<p><b>{escape(doubt)}</b></p>" if doubt else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        '</title><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<p class="quiet">{escape(machine)}; peaks: {escape(str(profile.peaks))}</p>'
        f'{doubted}<div class="facts">{"".join(_facts(memory, profile))}</div>{_peers(peers or {})}'
        f"{_memory_section(memory)}{_kernel_section(profile)}"
        f"{exchange_section(profile.exchanges, profile.step_milliseconds)}"
        f"{_library_section(profile)}{_error_section(errors)}{_plan_section(plan)}"
        f'<script type="application/json" id="moments">{_moments(memory)}</script>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _facts(memory: MemoryReport, profile: KernelProfile) -> Iterator[str]:
    gap = memory.gap_bytes / max(memory.lower_bound_bytes, 1)
    over = f"{gap:.2%} above the lower bound" if gap >= LEAST_SHARE else "the lower bound itself"
    facts = [
        *_step_facts(profile),
        (mebibytes(memory.peak_bytes), f"peak, {over}"),
        (mebibytes(memory.state_bytes), "of it the state, which no plan changes"),
        (f"{profile.speed_of_light_share:.0%}", "of the speed of light at this machine's peaks"),
    ]
    if profile.cast_share >= LEAST_SHARE:
        facts.append((f"{profile.cast_share:.1%}", "of the time in kernels that only cast"))
    if profile.overhead_share >= LEAST_SHARE:
        facts.append((f"{profile.overhead_share:.1%}", "of the time outside of kernels"))
    for number, what in facts:
        yield f'<div><b>{escape(number)}</b><span class="quiet">{escape(what)}</span></div>'


def _peers(peers: Mapping[str, float]) -> str:
    """Return the step beside others as bars: the shortest is the fastest."""
    if not peers:
        return ""
    mine, top = next(iter(peers.values())), max(peers.values())
    rows = "".join(
        f'<tr><td class="kind">{escape(name)}</td><td class="number">{rounded(spent)} ms</td>'
        f'<td class="number">{spent / mine:.2f}</td><td>{_bar(spent / top, "phase-forward")}</td>'
        "</tr>"
        for name, spent in peers.items()
    )
    return (
        '<h2>Beside PyTorch</h2><div class="wide"><table id="peers"><thead><tr><th>a step</th>'
        '<th class="number">median</th><th class="number">ratio</th><th></th></tr></thead>'
        f'<tbody>{rows}</tbody></table></div><p class="quiet">Taken in turns in one run.</p>'
    )


def _step_facts(profile: KernelProfile) -> Iterator[tuple[str, str]]:
    step = f"{step_time(profile, profile.step_milliseconds)} ms"
    if profile.gpu is None:
        yield step, f"a step, median of {profile.steps}"
        return
    launched = f"{step_time(profile, profile.gpu.launched_milliseconds)} ms"
    if profile.gpu.is_graph:
        yield step, f"a step as one CUDA graph, median of {profile.steps}"
    yield launched, f"a step launched call by call, median of {profile.steps}"


def _memory_section(memory: MemoryReport) -> str:
    balance = f"<p><b>{escape(str(memory.balance))}</b></p>" if memory.balance is not None else ""
    reruns = f"<p>{escape(memory.rerun_line())}</p>" if memory.reruns else ""
    shown, rest = memory.live_at_peak[:_SHOWN_VALUES], memory.live_at_peak[_SHOWN_VALUES:]
    top = max((one.nbytes for one in shown), default=1)
    rows = "".join(_held_row(one, top) for one in shown)
    if rest:
        total = mebibytes(sum(one.nbytes for one in rest))
        rows += (
            f'<tr class="quiet"><td>{len(rest)} smaller ones</td><td class="number">{total}</td>'
            "<td></td><td></td><td></td><td></td></tr>"
        )
    dtypes = ", ".join(
        f"{escape(dtype)} {mebibytes(nbytes)}" for dtype, nbytes in memory.nbytes_by_dtype.items()
    )
    return (
        f"<h2>Memory during the step</h2>{balance}{reruns}{memory_chart(memory)}"
        f'<h2>Alive at the peak</h2><p class="quiet">{dtypes}</p>'
        '<div class="wide"><table id="held"><thead><tr><th>value</th><th class="number">bytes</th>'
        f"{_heads('role', 'dtype', 'op', '')}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _held_row(one: HeldValue, top: int) -> str:
    place = f'<br><span class="quiet">{escape(one.module)}</span>' if one.module else ""
    role = f'<i class="swatch {colour_class(one.role)}"></i>{escape(one.role)}'
    return (
        f'<tr><td class="name" title="{escape(one.line)}">{escape(one.name)}{place}</td>'
        f'<td class="number">{mebibytes(one.nbytes)}</td><td class="kind">{role}</td>'
        f"<td>{escape(one.dtype)}</td><td>{escape(one.op)}</td>"
        f"<td>{_bar(one.nbytes / max(top, 1), colour_class(one.role))}</td></tr>"
    )


def _kernel_section(profile: KernelProfile) -> str:
    phases = " ".join(
        f'<span><i class="swatch phase-{escape(name)}"></i>{escape(name)} '
        f"<b>{step_time(profile, spent)} ms</b>"
        "</span>"
        for name, spent in profile.milliseconds_by_phase.items()
        if spent >= LEAST_SHARE * profile.step_milliseconds
    )
    timed = how_timed(profile)
    timed = timed and f" {timed[0].upper()}{timed[1:]}."
    kernels = profile.kernels
    top = max((one.milliseconds for one in kernels), default=1.0) or 1.0
    rows = "".join(_kernel_row(one, top, profile) for one in kernels)
    numbers = "".join(
        f'<th class="number">{name}</th>'
        for name in ("ms", "share", "calls", "MiB", rate_unit(profile), "roofline")
    )
    return (
        f'<h2>Kernels</h2><p class="key">{phases}</p>'
        '<input type="search" placeholder="op, module, phase, kernel ..." aria-label="Search">'
        f'<div class="wide"><table id="kernels"><thead><tr><th>ops</th>{numbers}'
        f"{_heads('phase', '')}</tr></thead><tbody>{rows}</tbody></table></div>"
        '<p class="quiet">MiB is what a kernel reads and writes, each tensor once. "Roofline" is '
        "the time at the machine's peaks over the time taken; above 100 % its data was in a "
        f"cache, or the machine was busy while its peaks were measured.{timed}</p>"
    )


def _kernel_row(one: KernelTotal, top: float, profile: KernelProfile) -> str:
    phase = one.phase or "other"
    where = escape(shortened(one.modules, 2))
    lines = escape(shortened(one.lines, 2))
    cast = ' <span class="quiet">cast only</span>' if one.is_cast else ""
    share = one.milliseconds / profile.step_milliseconds
    cells = (
        kernel_time(profile, one.milliseconds),
        f"{share:.1%}" if share >= LEAST_SHARE else "< 0.1%",
        f"{one.calls}",
        f"{one.nbytes / 2**20:.1f}",
        rate(profile, one),
        f"{one.roofline_share:.0%}",
    )
    numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
    return (
        f'<tr><td class="name" title="{escape(", ".join((*one.modules, *one.lines)))}">'
        f"{escape(shortened(one.ops, 4))}{cast}"
        f'<br><span class="quiet">{escape(one.name)} {escape(one.dtype)} {where} {lines}'
        "</span></td>"
        f'{numbers}<td class="kind"><i class="swatch phase-{phase}"></i>{phase}</td>'
        f"<td>{_bar(one.milliseconds / top, 'phase-' + phase)}</td></tr>"
    )


def _library_section(profile: KernelProfile) -> str:
    """Return which library each heavy op went to; a row for each reason."""
    rows = "".join(
        f'<tr><td>{escape(note.op)}</td><td class="number">{note.calls}</td>'
        f"<td>{escape(note.library)}</td><td>{escape(note.reason) or 'the first choice'}</td></tr>"
        for note in profile.dispatched
    )
    if not rows:
        return ""
    return (
        '<h2>Libraries</h2><div class="wide"><table id="libraries"><thead><tr><th>op</th>'
        f'<th class="number">calls</th>{_heads("went to", "why")}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _error_section(errors: RoundingErrors | None) -> str:
    """Return what each op's roundings do to the gradients, alone, as bars."""
    if errors is None or not errors.contributions:
        return ""
    shown = errors.contributions[:_SHOWN_VALUES]
    rows = "".join(
        f'<tr><td class="name">{escape(one.name)}</td><td class="number">{one.error:.2e}</td>'
        f"<td>{_bar(share, 'phase-' + (one.phase or 'other'))}</td>"
        f'<td class="name">{escape(one.worst_parameter)}</td></tr>'
        for one, share in zip(shown, bar_shares([one.error for one in shown]), strict=True)
    )
    rest = len(errors.contributions) - len(shown)
    whole = "" if errors.is_complete else "; groups were left whole for lack of time"
    return (
        f"<h2>Error of the gradients</h2><p>{errors.error:.2e} by all roundings of the plan, "
        f"against {escape(errors.evaluated_in)}. "
        "Each row has the error of these roundings alone.</p>"
        '<div class="wide"><table id="errors"><thead><tr><th>roundings</th>'
        '<th class="number">error alone</th><th></th><th>changes most</th></tr></thead>'
        f'<tbody>{rows}</tbody></table></div><p class="quiet">{rest} more{whole}.</p>'
    )


def _plan_section(plan: Any) -> str:
    if plan is None:
        return "<h2>Casts</h2><p>The step was compiled without casts.</p>"
    lines = plan.summary().splitlines()
    numbers = "".join(f"<p>{escape(line)}</p>" for line in lines[:2])
    return (
        f"<h2>Casts</h2>{numbers}<details><summary>dtypes by op</summary>"
        f"<pre>{escape(chr(10).join(lines[2:]))}</pre></details>"
    )


def _moments(memory: MemoryReport) -> str:
    """Return one line of text per call, for the chart; "<" is escaped: it could end the script."""
    lines = [
        f"{', '.join(one.ops[:4]) or one.call}"
        + (f" in {shortened(one.modules, 2)}" if one.modules else "")
        + (f" ({one.phase})" if one.phase else "")
        + f", {mebibytes(one.nbytes)}"
        for one in memory.timeline
    ]
    return json.dumps(lines).replace("<", "\\u003c")


def _heads(*names: str) -> str:
    return "".join(f"<th>{name}</th>" for name in names)


def _bar(share: float, tone: str) -> str:
    return f'<span class="bar {tone}"><i style="width:{min(share, 1):.1%}"></i></span>'
