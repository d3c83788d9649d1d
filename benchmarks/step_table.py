# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m benchmarks`, and what its columns mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich import box
from rich.table import Table

from benchmarks.step_row import Row

_NONE = "-"
_MARK = "*"  # marks a PyTorch time in another memory layout than the default
# All columns need 115 characters, and this many more with another space between them.
_AIRY_COLUMNS = 135
Cell = Callable[[Row], str]


def table_of(rows: Sequence[Row], width: int) -> Table:
    """Return one row per workload and dtype, for a terminal, without columns without numbers."""
    space = 1 if width >= _AIRY_COLUMNS else 0
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, space, 0, 0))
    for heading in ("", ""):
        table.add_column(heading, no_wrap=True)
    full = {row.workload: row.ours for row in rows if row.dtype == "float32"}
    columns = [
        (heading, [cell(row) for row in rows])
        for heading, cell in _columns(full)
        if any(cell(row) != _NONE for row in rows)
    ]
    for heading, _ in columns:
        is_result = heading in ("ms\nours", "x\nbest")
        table.add_column(heading, justify="right", no_wrap=True, style="bold" if is_result else "")
    before = ""
    for k, row in enumerate(rows):
        name = row.workload if row.workload != before else ""
        before = row.workload
        is_last = k + 1 == len(rows) or rows[k + 1].workload != row.workload
        cells = (column[k] for _, column in columns)
        table.add_row(name, _short(row.dtype), *cells, end_section=is_last)
    return table


def _columns(full: Mapping[str, float]) -> Iterator[tuple[str, Cell]]:
    yield "ms\nours", lambda row: _three_digits(row.ours)
    yield "\neager", lambda row: _peer(row, "eager")
    yield "\ncomp", lambda row: _peer(row, "compile")
    yield "x\neager", lambda row: _ratio(row.ratio("eager"))
    yield "x\ncomp", lambda row: _ratio(row.ratio("compile"))
    yield "x\nbest", lambda row: _ratio(row.ratio())
    yield "AMP\ngain", lambda row: _gain(row, full)
    yield "build\nours", lambda row: _seconds(row, "ours")
    yield "\ncold", lambda row: _seconds(row, "compile")
    yield "MiB\nplan", lambda row: _three_digits(row.planned_mib)
    yield "\nours", lambda row: _mib(row, "ours")
    yield "\neager", lambda row: _mib(row, "eager")
    yield "\ncomp", lambda row: _mib(row, "compile")
    yield "roof\nline", lambda row: _percent(row.speed_of_light_share, 0)
    yield "\nhost", lambda row: _percent(row.outside_share, 1)
    yield "grad\nerror", lambda row: _NONE if row.error is None else _small(row.error.ours)
    yield "x\ntorch", lambda row: _ratio(None if row.error is None else row.error.ratio)
    yield "calls\n(casts)", lambda row: f"{row.calls} ({row.casts})"


def footnotes(rows: Sequence[Row]) -> list[str]:
    """Return what the columns mean, for those in the table."""
    peers = "eager's, torch.compile's and the better one's"
    if not any(row.best("compile") for row in rows):
        peers = "eager's"
    lines = [
        f"ms: medians of a step, variants in turns. x: our time over {peers}; below 1 is faster."
    ]
    full = {row.workload: row.ours for row in rows if row.dtype == "float32"}
    if any(_gain(row, full) != _NONE for row in rows):
        lines.append("AMP gain: our own float32's time over ours.")
    marked = sorted({name for row in rows for variant in ("eager", "compile")
                     if (name := _name(row, variant)).endswith("channels_last")})  # fmt: skip
    if marked:
        lines.append(
            f"{_MARK}: in channels_last, which was faster there than the usual layout; "
            "both were tried."
        )
    if any("compile" in name for row in rows for name in row.compile_seconds):
        lines.append(
            "build: seconds from nothing to steps at full speed: ours, and torch.compile with "
            "empty caches."
        )
    if any(row.measured_mib for row in rows):
        lines.append(
            "MiB: peak of a step with its state: our plan, then the resident set's rise, ours, "
            "eager's and torch.compile's alike."
        )
    if any(row.speed_of_light_share is not None for row in rows):
        lines.append(
            "roofline: the larger of FLOP / rate of a large matmul and bytes / rate of a large "
            "copy, both measured between the steps, over our time. host: our step outside of "
            "kernels and libraries."
        )
    draws = {row.error.draws for row in rows if row.error is not None}
    if draws:
        lines.append(
            f"grad error: of our compiled step, relative, against float64, small shapes, "
            f"median of {max(draws)} draws; x torch: over PyTorch's (autocast), geometric mean."
        )
    for row in rows:
        for name, why in row.failed.items():
            lines.append(f"{row.workload} {row.dtype}: {name} failed: {why[:200]}")
    lines.append("calls: kernels and library calls a step, and how many of them only cast.")
    return lines


def _short(dtype: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)


def _name(row: Row, variant: str) -> str:
    best = row.best(variant)
    return "" if best is None else best[0]


def _peer(row: Row, variant: str) -> str:
    best = row.best(variant)
    if best is None:
        return "failed" if any(name.startswith(variant) for name in row.failed) else _NONE
    return _three_digits(best[1]) + (_MARK if best[0].endswith("channels_last") else "")


def _gain(row: Row, full: Mapping[str, float]) -> str:
    if row.dtype == "float32" or row.workload not in full:
        return _NONE
    return f"{full[row.workload] / row.ours:.2f}"


def _seconds(row: Row, variant: str) -> str:
    name = variant if variant == "ours" else _name(row, variant)
    return f"{row.compile_seconds[name]:.1f}" if name in row.compile_seconds else _NONE


def _mib(row: Row, variant: str) -> str:
    name = variant if variant == "ours" else _name(row, variant)
    return _three_digits(row.measured_mib[name]) if name in row.measured_mib else _NONE


def _ratio(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _percent(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}%}"


def _small(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
