# SPDX-License-Identifier: Apache-2.0
"""The ops of a plan as lines for a terminal, below the names of their modules."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from amp_ir.report.short_places import cut, short_dtype, short_nbytes

if TYPE_CHECKING:
    from amp_ir.report.explain import Cast, Row

# One colour a dtype, on the terminal; explain_page.py has the same for browsers.
STYLES = {"float32": "blue", "bfloat16": "green", "float16": "green", "float64": "magenta"}
_HEADER = ("op", "phase", "dtypes", "rule", "casts", "bytes", "kernel")
# Columns of each at most, with a space between; a narrower terminal has short names of dtypes.
_WIDTHS = (28, 9, 30, 18, 35, 8, 6)
_COLUMNS_OF_ALL = sum(_WIDTHS) + 6
_NARROW_WIDTHS = (20, 8, 17, 12, 9, 9)
_COLUMNS_AT_LEAST = sum(_NARROW_WIDTHS) + 5


def table(rows: Sequence[Row], columns: int, *, folds: bool = True) -> Iterator[Any]:
    """Yield the rows below the names of their modules, for a terminal of so many columns.

    Modules with equal rows whose names differ in numbers, as layers do, are one with `folds`.
    """
    is_wide = columns >= _COLUMNS_OF_ALL
    groups: dict[Any, tuple[list[str], list[tuple[str, ...]]]] = {}
    for place, (module, group) in enumerate(itertools.groupby(rows, key=lambda row: row.op.module)):
        cells = [_cells(row, is_wide=is_wide) for row in group]
        # The last cell is the number of a kernel, which no two have in common.
        alike = re.sub(r"\d+", "#", module), tuple(one[:-1] for one in cells)
        groups.setdefault(alike if folds else place, ([], cells))[0].append(module)
    header = [name for name in _HEADER if is_wide or name != "kernel"]
    everything = [header, *(one for _, cells in groups.values() for one in cells)]
    widths = [
        max(min(Text.from_markup(one[k]).cell_len, most) for one in everything)
        for k, most in enumerate(_most_columns(columns))
    ]
    yield _grid([header], widths, "bold")
    for modules, cells in groups.values():
        more = _alike(modules)
        module = cut(modules[0] or "outside of modules", columns - len(more))
        yield Text.assemble((module, "bold"), (more, "dim"))
        yield _grid([(cut(name, widths[0]), *rest) for name, *rest in cells], widths)


def _alike(modules: Sequence[str]) -> str:
    """Say how many modules have the same rows as the first; "" if none."""
    others = len(set(modules)) - 1
    if others:
        return f" and {others} alike"
    return f", {len(modules)} times" if len(modules) > 1 else ""


def _most_columns(columns: int) -> Sequence[int]:
    """Return the widths of a table's columns at most; what a narrow one has left is for words."""
    if columns >= _COLUMNS_OF_ALL:
        return _WIDTHS
    op, phase, dtypes, rule, casts, nbytes = _NARROW_WIDTHS
    left = max(columns - _COLUMNS_AT_LEAST, 0)
    return op + left // 2, phase, dtypes + left // 4, rule + left // 4, casts, nbytes


def _cells(row: Row, *, is_wide: bool) -> tuple[str, ...]:
    op = row.op
    name = "  " + row.name.removeprefix("relax.").removeprefix("amp_ir.")
    phrases = row.phrases if is_wide else _short_phrases(row.casts)
    return (
        name,
        op.phase,
        " ".join(_coloured(one, is_wide=is_wide) for one in (op.reads, ("->",), op.results)),
        op.rule,
        "\n".join(phrases),
        short_nbytes(row.nbytes) if row.nbytes else "",
        str(op.kernel) if op.kernel >= 0 else "-",
    )


def _short_phrases(casts: Sequence[Cast]) -> list[str]:
    counts = Counter(short_dtype(one.to_dtype) for one in casts)
    return [f"{n} to {dtype}" for dtype, n in counts.items()]


def _grid(rows: Sequence[Sequence[str]], widths: Sequence[int], style: str = "") -> Table:
    grid = Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False, row_styles=[style]
    )
    for name, width in zip(_HEADER, widths, strict=False):
        is_number = name in ("bytes", "kernel")
        is_fixed = name != "casts"
        grid.add_column(
            width=width,
            justify="right" if is_number else "left",
            no_wrap=is_fixed,
            overflow="ellipsis" if is_fixed else "fold",
        )
    for row in rows:
        grid.add_row(*row[: len(widths)])
    return grid


def _coloured(dtypes: Sequence[str], *, is_wide: bool) -> str:
    names = {one: one if is_wide else short_dtype(one) for one in _distinct(dtypes)}
    return (
        " ".join(f"[{STYLES.get(one, 'default')}]{name}[/]" for one, name in names.items()) or "-"
    )


def _distinct(dtypes: Sequence[str]) -> Iterator[str]:
    return iter(dict.fromkeys(dtypes))
