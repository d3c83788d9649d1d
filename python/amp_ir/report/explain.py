# SPDX-License-Identifier: Apache-2.0
"""`amp-ir explain`: the cast plan of a step as a table on the terminal, and as HTML pages."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from amp_ir.errors import OptionError
from amp_ir.files.atomic_file import write_text
from amp_ir.ir.near_names import inside_of_others, near_names
from amp_ir.ir.selection import is_inside, names_of_op
from amp_ir.report.explain_graph import graph_page
from amp_ir.report.explain_page import page
from amp_ir.report.plan_table import table
from amp_ir.report.wide_console import wide_console

_MOVES = "data_movement"  # the rule of the ops that only move elements


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
    parser.add_argument("--all", action="store_true", help="all ops, the optimizer's too, unfolded")


def show(plan: Plan, arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Print the part of a plan that the arguments select; return the exit code.

    Raises:
        OptionError: `--module` matches nothing.
    """
    console = console or wide_console()
    rows = rows_of(plan, arguments.module, views=arguments.views or arguments.all)
    shown = rows if arguments.all else _worth_a_row(rows, arguments)
    for part in table(shown, console.width, folds=not arguments.all):
        console.print(part)
    console.print()
    if len(shown) < len(rows):
        console.print(_hidden(rows, shown), style="dim", highlight=False)
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


def _worth_a_row(rows: Sequence[Row], arguments: argparse.Namespace) -> list[Row]:
    """Return the rows without those that only move data or, unless asked for, are optimizers'."""
    hides_optimizer = arguments.module == "*"
    found = [
        row
        for row in rows
        if (arguments.views or row.op.rule != _MOVES or any(one.is_alone for one in row.casts))
        and not (hides_optimizer and row.op.phase == "optimizer")
    ]
    return found or list(rows)


def _hidden(rows: Sequence[Row], shown: Sequence[Row]) -> str:
    """Say how many rows are hidden, and which option shows them."""
    left = [row for row in rows if row not in shown]
    moves = sum(row.op.phase != "optimizer" for row in left)
    counts = {
        "of the optimizer, whose dtypes stay": len(left) - moves,
        "that only move data (--views)": moves,
    }
    said = " and ".join(f"{count} ops {what}" for what, count in counts.items() if count)
    return f"not shown: {said}; --all shows every op of every layer"


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
    if not rows and not plan.ops:
        raise OptionError(
            "the step computes nothing: it has no op to show; its results and gradients are its "
            "inputs, or are not there"
        )
    if not rows:
        modules = sorted({op.module.split(".")[0] for op in plan.ops if op.module})
        known = {name for row in _rows(plan) for name in (row.op.name, row.op.module) if name}
        nothing = (
            f"no module or op of the step matches {what!r}{near_names(what, known)}; modules begin "
            f"with {', '.join(modules)}"
        )
        raise OptionError(". ".join([nothing, *inside_of_others(what, known)]))
    return rows


def _rows(plan: Plan, **place: Any) -> list[Row]:
    casts: dict[int, list[Cast]] = {}
    for cast in plan.casts:
        casts.setdefault(cast.consumer, []).append(cast)
    return [Row(op, tuple(casts.get(op.id, ())), **place) for op in plan.ops]


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


def _phrase(cast: Cast) -> str:
    shared = "shared" if cast.is_shared else "private"
    return (
        f"{cast.from_dtype} to {cast.to_dtype}, {shared}, {'alone' if cast.is_alone else 'fused'}"
    )


def _is_meant(op: Any, what: str) -> bool:
    return is_inside(op.module, what) or any(fnmatchcase(one, what) for one in names_of_op(op.name))
