# SPDX-License-Identifier: Apache-2.0
"""`amp-ir explain`: the cast plan of a step as a table on the terminal, and as HTML pages."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from amp_ir.errors import OptionError
from amp_ir.files.atomic_file import write_text
from amp_ir.report.explain_graph import graph_page
from amp_ir.report.explain_page import page
from amp_ir.report.wide_console import wide_console

# One colour a dtype, on the terminal; explain_page.py has the same for browsers.
STYLES = {"float32": "blue", "bfloat16": "green", "float16": "green", "float64": "magenta"}


class Cast(Protocol):
    """A cast of a plan; see amp_ir.amp.plan.PlannedCast."""

    from_dtype: str
    to_dtype: str
    consumer: int
    source: int
    is_shared: bool
    is_alone: bool

    @property
    def nbytes(self) -> int:
        """The bytes that it moves."""


class Plan(Protocol):
    """The part of a plan to show; see amp_ir.amp.plan.CastPlan."""

    @property
    def amp_dtype(self) -> str:
        """The low dtype."""

    @property
    def ops(self) -> Sequence[Any]:
        """The ops of the step."""

    @property
    def casts(self) -> Sequence[Any]:
        """The casts that were made."""

    @property
    def loops(self) -> Sequence[Any]:
        """The plans of the bodies of loops."""

    def summary(self) -> str:
        """Return two lines of numbers, then one line per op name."""


@attrs.frozen
class Row:
    """One op with the casts made for it.

    `steps` is how often it runs: 1, or in the body of a loop the number of its steps.
    """

    op: Any
    casts: tuple[Cast, ...]
    steps: int = 1
    is_in_loop: bool = False

    @property
    def name(self) -> str:
        """Return the op's name, and how often it runs in a loop."""
        return f"{self.op.name} (in {self.steps} steps)" if self.is_in_loop else str(self.op.name)

    @property
    def nbytes(self) -> int:
        """Return the bytes that its casts move by themselves, in all steps of a loop."""
        return self.steps * sum(cast.nbytes for cast in self.casts)

    @property
    def phrases(self) -> tuple[str, ...]:
        """Describe its casts, equal ones once with their number."""
        counts = Counter(_phrase(cast) for cast in self.casts)
        return tuple(text if n == 1 else f"{n} x {text}" for text, n in counts.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `amp-ir explain` that say what to show."""
    parser.add_argument(
        "--module", default="*", metavar="GLOB", help='modules or ops, such as "*.attention"'
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser")
    parser.add_argument(
        "--graph", type=Path, metavar="FILE", help="draw a graph of it on a page for a browser"
    )
    parser.add_argument("--views", action="store_true", help="ops that only move elements, too")


def show(plan: Plan, arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Print the part of a plan that the arguments select; return the exit code.

    Raises:
        OptionError: `--module` matches nothing.
    """
    console = console or wide_console()
    rows = rows_of(plan, arguments.module, views=arguments.views)
    console.print(table(rows))
    console.print()
    console.print(reasons(rows))
    console.print()
    console.print("\n".join(plan.summary().splitlines()[:2]), highlight=False)
    if arguments.html is not None:
        write_text(arguments.html, page(_title(plan, arguments), plan, rows))
        console.print(f"wrote {arguments.html}", highlight=False)
    if arguments.graph is not None:
        write_text(arguments.graph, graph_page(_title(plan, arguments), plan, rows))
        console.print(f"wrote {arguments.graph}", highlight=False)
    return 0


def _title(plan: Plan, arguments: argparse.Namespace) -> str:
    part = "" if arguments.module == "*" else f", {arguments.module}"
    return f"{Path(arguments.training).name} in {plan.amp_dtype}{part}"


def rows_of(plan: Plan, what: str = "*", *, views: bool = False) -> list[Row]:
    """Return the ops that `what` matches by module (inner modules included) or name, with casts.

    Raises:
        OptionError: it matches nothing.
    """
    bodies = {one.id: one for one in plan.loops}
    rows: list[Row] = []
    for row in _rows(plan):
        rows.append(row)
        if row.op.id in bodies:
            body = bodies[row.op.id]
            rows += _rows(body.plan, steps=body.length, is_in_loop=True)
    rows = [row for row in rows if _is_meant(row.op, what)]
    rows = [row for row in rows if views or row.op.reads or row.op.results]
    if not rows:
        modules = sorted({op.module.split(".")[0] for op in plan.ops if op.module})
        raise OptionError(
            f"no module or op of the step matches {what!r}; modules begin with {', '.join(modules)}"
        )
    return rows


def _rows(plan: Plan, **place: Any) -> list[Row]:
    casts: dict[int, list[Cast]] = {}
    for cast in plan.casts:
        casts.setdefault(cast.consumer, []).append(cast)
    return [Row(op, tuple(casts.get(op.id, ())), **place) for op in plan.ops]


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table for a terminal, below the name of their module."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("op", "phase", "dtypes", "rule", "casts for it"):
        result.add_column(name, overflow="fold")
    result.add_column("bytes", justify="right")
    result.add_column("kernel", justify="right")
    for module, group in itertools.groupby(rows, key=lambda row: row.op.module):
        # A long name in a cell would widen the column of ops; folded, it stays whole.
        result.add_row(f"[bold]{module or 'outside of modules'}[/]")
        for row in group:
            op = row.op
            result.add_row(
                "  " + row.name.removeprefix("relax.").removeprefix("amp_ir."),
                op.phase,
                f"{_coloured(op.reads)} -> {_coloured(op.results)}",
                op.rule,
                "\n".join(row.phrases),
                f"{row.nbytes:,}" if row.nbytes else "",
                str(op.kernel) if op.kernel >= 0 else "-",
            )
    return result


def reasons(rows: Sequence[Row]) -> Table:
    """Return the reasons of the rows' rules, each once, with the number of ops."""
    counts = Counter((row.op.rule, row.op.reason) for row in rows)
    result = Table(box=None, pad_edge=False, header_style="bold")
    result.add_column("rule")
    result.add_column("ops", justify="right")
    result.add_column("why")
    for (rule, reason), number in sorted(counts.items()):
        result.add_row(rule, str(number), escape(reason))
    return result


def _coloured(dtypes: Sequence[str]) -> str:
    return " ".join(f"[{STYLES.get(one, 'default')}]{one}[/]" for one in _distinct(dtypes)) or "-"


def _distinct(dtypes: Sequence[str]) -> Iterator[str]:
    return iter(dict.fromkeys(dtypes))


def _phrase(cast: Cast) -> str:
    shared = "shared" if cast.is_shared else "private"
    return (
        f"{cast.from_dtype} to {cast.to_dtype}, {shared}, {'alone' if cast.is_alone else 'fused'}"
    )


def _is_meant(op: Any, what: str) -> bool:
    inside = fnmatchcase(op.module, what) or fnmatchcase(op.module, f"{what}.*")
    return inside or fnmatchcase(op.name, what)
