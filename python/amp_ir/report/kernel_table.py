# SPDX-License-Identifier: Apache-2.0
"""A profile by kernel as text: the step in a few lines, and one row per kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from amp_ir.report.short_places import cut, short_dtype

if TYPE_CHECKING:
    from amp_ir.report.kernel_profile import KernelProfile, KernelTotal

_SHOWN_KERNELS = 25
# A terminal narrower than this shows of a kernel's figures only calls, time and share.
_COLUMNS_OF_ALL, _FIGURES_OF_TIME = 120, 3
# Where a step is shorter than this, kernels take microseconds.
_SHORT_MILLISECONDS = 10.0
# Smaller shares would be printed as 0.0 %.
LEAST_SHARE = 0.0005


def headline(profile: KernelProfile) -> str:
    """Return the step's times: three lines, and one more for a GPU."""
    phases = ", ".join(
        f"{name} {step_time(profile, spent)}"
        for name, spent in profile.milliseconds_by_phase.items()
        if spent >= LEAST_SHARE * profile.step_milliseconds
    )
    return (
        f"{_whole_step(profile)}{step_time(profile, profile.kernel_milliseconds)} ms: {phases}\n"
        f"{_shares(profile)}{profile.speed_of_light_share:.0%} of the speed of light at this "
        f"machine's peaks ({profile.peaks})"
    )


def _shares(profile: KernelProfile) -> str:
    """Return what the step spends beside its work, where that is not nothing."""
    shares = {"casts alone": profile.cast_share, "outside of kernels": profile.overhead_share}
    shown = [f"{name} {share:.1%}, " for name, share in shares.items() if share >= LEAST_SHARE]
    return "".join(shown)


def _whole_step(profile: KernelProfile) -> str:
    step = f"{step_time(profile, profile.step_milliseconds)} ms a step"
    steps = f"median of {profile.steps}"
    if profile.gpu is None:
        return f"{step} ({steps}), in kernels "
    launched = step_time(profile, profile.gpu.launched_milliseconds)
    if profile.gpu.is_graph:
        step += f" as one CUDA graph, {launched} ms launch by launch ({steps} each)"
    else:
        step += f" launch by launch ({steps}); its CUDA graph could not be recorded"
    return f"{step}\n{how_timed(profile)}; in kernels "


def how_timed(profile: KernelProfile) -> str:
    """Explain how the times of kernels were taken on a GPU; "" for a CPU."""
    if profile.gpu is None:
        return ""
    return (
        "kernels are timed by CUDA events around each launch, outside of the graph; an event adds "
        f"{profile.gpu.event_milliseconds * 1e3:.1f} us"
    )


def step_time(profile: KernelProfile, milliseconds: float) -> str:
    """Format milliseconds with the digits that are significant for the step's length."""
    digits = 1 if profile.step_milliseconds >= _SHORT_MILLISECONDS else 3
    return f"{milliseconds:.{digits}f}"


def kernel_time(profile: KernelProfile, milliseconds: float) -> str:
    """Format milliseconds of a kernel: a digit more than those of the step."""
    digits = 2 if profile.step_milliseconds >= _SHORT_MILLISECONDS else 4
    return f"{milliseconds:.{digits}f}"


def rounded(milliseconds: float) -> str:
    """Format milliseconds with the three digits that a measurement has."""
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def rate_unit(profile: KernelProfile) -> str:
    """Return the unit of `rate`."""
    return "GFLOP/s" if profile.gpu is None else "TFLOP/s"


def rate(profile: KernelProfile, one: KernelTotal) -> str:
    """Return how much a kernel computes per second."""
    if profile.gpu is None:
        return f"{one.gflop_per_second:.0f}"
    return f"{one.gflop_per_second / 1e3:.2f}"


def kernel_table(profile: KernelProfile, columns: int) -> Table:
    """Return a row for each of the longest kernels; on a narrow terminal only the times."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    is_wide = columns >= _COLUMNS_OF_ALL
    table.add_column("kernel", overflow="ellipsis", no_wrap=True)
    widths = _widths(columns, is_wide=is_wide)
    for name in ("ops", "modules", "phase"):
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    figures = ["calls", "ms", "share", "MiB", "GFLOP", rate_unit(profile), "roofline"]
    count = len(figures) if is_wide else _FIGURES_OF_TIME
    for name in figures[:count]:
        table.add_column(name, justify="right", no_wrap=True)
    kernels = profile.kernels
    for one in kernels[:_SHOWN_KERNELS]:
        figures = [
            str(one.calls),
            kernel_time(profile, one.milliseconds),
            f"{one.milliseconds / profile.step_milliseconds:.1%}",
            f"{one.nbytes / 2**20:.1f}",
            f"{one.flop / 1e9:.2f}",
            rate(profile, one),
            f"{one.roofline_share:.0%}",
        ]
        table.add_row(
            f"{cut(one.name, widths[0])} [dim]{short_dtype(one.dtype)}[/]",
            _within(one.ops, widths[1]),
            escape(_within(one.modules, widths[2])),
            one.phase or "-",
            *figures[:count],
        )
    rest = kernels[_SHOWN_KERNELS:]
    if rest:
        spent = sum(one.milliseconds for one in rest)
        share = f"{spent / profile.step_milliseconds:.1%}"
        calls = str(sum(one.calls for one in rest))
        shown = kernel_time(profile, spent)
        table.add_row(f"[dim]{len(rest)} shorter[/]", "", "", "", calls, shown, share)
    return table


def _widths(columns: int, *, is_wide: bool) -> tuple[int, int, int]:
    """Return the columns of names of kernels, ops and modules at most, beside the figures."""
    name, figures = (21, 76) if is_wide else (13, 38)
    left = columns - name - figures
    return name, left * 4 // 9, left - left * 4 // 9


def _within(names: Sequence[str], columns: int) -> str:
    """Return as many of the names as fit into `columns`, one at least, and how many there are."""
    for count in range(min(len(names), 3), 0, -1):
        text = shortened(names, count)
        if len(text) <= columns:
            return text
    rest = f" +{len(names) - 1}" if len(names) > 1 else ""
    return cut(names[0], columns - len(rest)) + rest if names else ""


def shortened(names: Sequence[str], count: int) -> str:
    """Return at most `count` of the names, and how many there are besides."""
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" +{rest}" if rest > 0 else "")
