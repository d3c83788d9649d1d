# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.memory_report`: the memory of a step over time, and its owners."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import attrs
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from amp_ir.deprecation import Renamed
from amp_ir.files.strict_json import strict_json
from amp_ir.ir.memory_plan import ChunkedLoss, MemoryPlan, MemoryRole, PlannedValue, Recomputation
from amp_ir.ir.nbytes_text import mebibytes

_SHOWN_VALUES = 12
_TIMELINE_BARS = 24
_SHOWN_RERUNS = 6


@attrs.frozen
class HeldValue:
    """A tensor alive at the peak; `module` and `phase` are "" for state and the batch."""

    name: str
    op: str
    module: str
    phase: str
    line: str
    role: str
    dtype: str
    nbytes: int


@attrs.frozen
class Moment:
    """One call of the step, and the bytes of each role that are alive while it runs.

    `is_rerun` marks a call that runs a second time instead of its results being held.
    """

    call: str
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    phase: str
    nbytes: int
    nbytes_by_role: Mapping[str, int]
    is_rerun: bool = False


@attrs.frozen
class AmpBalance:
    """The bytes of each role at the peak with casts, less those at the peak without.

    `saved_bytes` adds up the roles that shrank and `cost_bytes` those that grew, gaps between
    tensors included: their difference is that of the peaks, exactly.
    """

    baseline_peak_bytes: int
    change_by_role: Mapping[str, int]

    @property
    def saved_bytes(self) -> int:
        """Return the bytes of the roles that shrank."""
        return -sum(change for change in self.change_by_role.values() if change < 0)

    @property
    def cost_bytes(self) -> int:
        """Return the bytes of the roles that grew."""
        return sum(change for change in self.change_by_role.values() if change > 0)

    def __str__(self) -> str:
        """Return both in one line."""
        net = self.saved_bytes - self.cost_bytes
        return (
            f"AMP saved {mebibytes(self.saved_bytes)}, cost {mebibytes(self.cost_bytes)}: "
            f"{mebibytes(abs(net))} {'less' if net >= 0 else 'more'} than "
            f"{mebibytes(self.baseline_peak_bytes)} without"
        )


@attrs.frozen
class MemoryReport:
    """The memory of one step, from its plan; all bytes include state, batch and results.

    `lower_bound_bytes` is the largest sum alive at once: no placement of this order of calls needs
    less. `peak_call` is the position in `timeline` at which that much is alive. The bytes by role
    and by dtype are those of that moment and add up to `lower_bound_bytes`. `chunked_losses` are
    those computed in chunks of rows for a `memory_budget`, `sent_nbytes` the bytes of each bucket
    that ranks exchange: a range of the arena from its first gradient to its last use. `reruns` is
    the number of calls that run a second time instead of their results being held, `recomputed`
    what that saves and costs; `timeline` marks them.
    """

    peak_bytes: int
    lower_bound_bytes: int
    state_bytes: int
    peak_call: int
    timeline: tuple[Moment, ...] = attrs.field(repr=False)
    live_at_peak: tuple[HeldValue, ...] = attrs.field(repr=False)
    nbytes_by_role: Mapping[str, int] = attrs.field(repr=False)
    nbytes_by_dtype: Mapping[str, int] = attrs.field(repr=False)
    balance: AmpBalance | None = None
    chunked_losses: tuple[ChunkedLoss, ...] = ()
    sent_nbytes: tuple[int, ...] = ()
    reruns: int = 0
    recomputed: Recomputation | None = None

    splits = Renamed("chunked_losses")

    @property
    def gap_bytes(self) -> int:
        """Return the bytes that the placement wastes between tensors at the peak."""
        return self.peak_bytes - self.lower_bound_bytes

    def to_json(self) -> str:
        """Return everything as a JSON document."""
        document = attrs.asdict(self) | {"gap_bytes": self.gap_bytes}
        document["splits"] = document["chunked_losses"]  # the name in amp_ir 0.1
        if self.balance is not None:
            sums = {"saved_bytes": self.balance.saved_bytes, "cost_bytes": self.balance.cost_bytes}
            document["balance"] |= sums
        return strict_json(document)

    def __rich__(self) -> RenderableType:
        """Return lines and tables for a terminal."""
        parts: list[RenderableType] = [escape(self.headline())]
        parts += [*(escape(str(one)) for one in self.chunked_losses)]
        if self.sent_nbytes:
            count = len(self.sent_nbytes)
            buckets = "1 bucket" if count == 1 else f"{count} buckets"
            total = mebibytes(sum(self.sent_nbytes))
            parts.append(f"ranks exchange {buckets}, {total} in the arena")
        if self.recomputed is not None:
            parts.append(escape(self.rerun_line()))
        parts.append("")
        parts += [_role_table(self), "", _live_table(self), "", _timeline_table(self)]
        if self.balance is not None:
            parts += ["", escape(str(self.balance))]
        return Group(*parts)

    def __str__(self) -> str:
        """Return the same as plain text, 120 columns wide."""
        console = Console(file=io.StringIO(), width=120, record=True)
        console.print(self)
        return console.export_text().rstrip()

    def headline(self) -> str:
        """Return peak, lower bound and gap in one line."""
        share = self.gap_bytes / max(self.lower_bound_bytes, 1)
        moment = self.timeline[self.peak_call] if self.timeline else None
        where = "" if moment is None else f", at call {self.peak_call} ({moment.call})"
        return (
            f"peak {mebibytes(self.peak_bytes)}{where}; lower bound "
            f"{mebibytes(self.lower_bound_bytes)}, gap {mebibytes(self.gap_bytes)} ({share:.2%}); "
            f"state {mebibytes(self.state_bytes)}"
        )

    def rerun_line(self) -> str:
        """Return which calls run a second time, what that saves and costs; "" for none."""
        if self.recomputed is None:
            return ""
        names = Counter(", ".join(one.ops) for one in self.timeline if one.is_rerun)
        shown = [f"{count} x {name}" for name, count in names.most_common(_SHOWN_RERUNS)]
        shown += ["..."] if len(names) > _SHOWN_RERUNS else []
        calls = "1 call runs" if self.reruns == 1 else f"{self.reruns} calls run"
        return (
            f"{calls} a second time: {mebibytes(self.recomputed.saved_nbytes)} less at the peak "
            f"for {self.recomputed.time_share:.1%} more of the estimated time; {'; '.join(shown)}"
        )


def report_memory(plan: MemoryPlan, baseline: MemoryPlan | None = None) -> MemoryReport:
    """Return the report of a plan; with the plan without casts, what AMP saved and cost too."""
    fixed = [value for value in plan.values if value.offset_bytes is None]
    fixed_bytes = sum(value.nbytes for value in fixed)
    live = plan.live_bytes
    peak_call = max(range(len(live)), key=live.__getitem__, default=0)
    held = [value for value in plan.values if value.first_use <= peak_call <= value.last_use]
    held = fixed + [value for value in held if value.offset_bytes is not None]
    report = MemoryReport(
        peak_bytes=plan.peak_bytes,
        lower_bound_bytes=fixed_bytes + plan.lower_bound_bytes,
        state_bytes=plan.state_bytes,
        peak_call=peak_call,
        timeline=tuple(_moments(plan, fixed)),
        live_at_peak=tuple(_held(one) for one in sorted(held, key=lambda one: -one.nbytes)),
        nbytes_by_role=_sums((value.role.value, value.nbytes) for value in held),
        nbytes_by_dtype=_sums((value.dtype, value.nbytes) for value in held),
        chunked_losses=plan.chunked_losses,
        sent_nbytes=plan.sent_nbytes,
        reruns=sum(call.is_rerun for call in plan.calls),
        recomputed=plan.recomputed,
    )
    if baseline is None:
        return report
    return attrs.evolve(report, balance=_balance(report, report_memory(baseline)))


def _balance(report: MemoryReport, baseline: MemoryReport) -> AmpBalance:
    after = {**report.nbytes_by_role, "gap": report.gap_bytes}
    before = {**baseline.nbytes_by_role, "gap": baseline.gap_bytes}
    changes = {
        role: after.get(role, 0) - before.get(role, 0)
        for role in [*(one.value for one in MemoryRole), "gap"]
    }
    return AmpBalance(baseline.peak_bytes, {role: n for role, n in changes.items() if n})


def _held(value: PlannedValue) -> HeldValue:
    place = value.location
    is_made = value.offset_bytes is not None
    return HeldValue(
        name=value.name,
        op=value.op,
        module=place.module if is_made else "",
        phase=place.phase if is_made else "",
        line=f"{place.file}:{place.line}" if place.file else "",
        role=value.role.value,
        dtype=value.dtype,
        nbytes=value.nbytes,
    )


def _moments(plan: MemoryPlan, fixed: Sequence[PlannedValue]) -> Iterator[Moment]:
    changes: list[Counter[str]] = [Counter() for _ in range(len(plan.calls) + 1)]
    for value in plan.values:
        if value.offset_bytes is not None:
            changes[value.first_use][value.role.value] += value.nbytes
            changes[value.last_use + 1][value.role.value] -= value.nbytes
    alive = Counter(_sums((value.role.value, value.nbytes) for value in fixed))
    for call, change in zip(plan.calls, changes, strict=False):
        for role, nbytes in change.items():
            alive[role] += nbytes
        yield Moment(
            call=call.name,
            ops=call.ops,
            modules=tuple(dict.fromkeys(place.module for place in call.locations if place.module)),
            phase=call.locations[0].phase if call.locations else "",
            nbytes=sum(alive.values()),
            nbytes_by_role={role: nbytes for role, nbytes in alive.items() if nbytes},
            is_rerun=call.is_rerun,
        )


def _sums(pairs: Iterator[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for name, nbytes in pairs:
        total[name] += nbytes
    return dict(total.most_common())


def _role_table(report: MemoryReport) -> Table:
    table = _table("at the peak, by role", right=("bytes", "share"))
    rows = [*report.nbytes_by_role.items(), ("gap between tensors", report.gap_bytes)]
    for role, nbytes in rows:
        table.add_row(role, mebibytes(nbytes), f"{nbytes / max(report.peak_bytes, 1):.1%}")
    for dtype, nbytes in report.nbytes_by_dtype.items():
        table.add_row(f"[dim]of it {dtype}[/]", f"[dim]{mebibytes(nbytes)}[/]", "")
    return table


def _live_table(report: MemoryReport) -> Table:
    table = _table("alive at the peak", "role", "phase", "dtype", right=("bytes",))
    for one in report.live_at_peak[:_SHOWN_VALUES]:
        name = f"{one.name} in {one.module}" if one.module else one.name
        table.add_row(escape(name), one.role, one.phase, one.dtype, mebibytes(one.nbytes))
    rest = report.live_at_peak[_SHOWN_VALUES:]
    if rest:
        total = sum(one.nbytes for one in rest)
        table.add_row(f"[dim]{len(rest)} smaller ones[/]", "", "", "", mebibytes(total))
    return table


def _timeline_table(report: MemoryReport) -> Table:
    """Return the calls in at most _TIMELINE_BARS stretches, the highest call of each."""
    table = _table("over time: call", "what", "phase", "", right=("bytes",))
    count = len(report.timeline)
    stretch = -(-count // _TIMELINE_BARS) or 1
    for begin in range(0, count, stretch):
        position = max(
            range(begin, min(begin + stretch, count)), key=lambda k: report.timeline[k].nbytes
        )
        moment = report.timeline[position]
        bar = "█" * round(30 * moment.nbytes / max(report.peak_bytes, 1))
        mark = " [bold]peak[/]" if position == report.peak_call else ""
        what = ", ".join(moment.ops[:3])
        table.add_row(f"{position}{mark}", what, moment.phase, bar, mebibytes(moment.nbytes))
    return table


def _table(first: str, *left: str, right: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (first, *left):
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
