# SPDX-License-Identifier: Apache-2.0
"""A cast plan as an outline of modules on one HTML page: what a drawing is too large for.

A line is a module, with what its forward pass does at the left and its backward pass at the right;
it opens to the modules inside, then to its ops. Layers that are alike are one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import attrs

from amp_ir.report.expression_text import short_dtype

_PASSES = ("forward", "backward")
OUTLINE_STYLE = """
.outline { margin-top: 1rem; border: 1px solid var(--soft); border-radius: .4rem }
.outline .line { display: grid; grid-template-columns: 1.2fr 1fr 1fr; gap: 0 1.2rem;
  padding: .4rem .8rem; border-top: 1px solid var(--soft); align-items: start }
.outline > .line { border-top: 0; font-weight: 600; color: var(--other) }
.outline summary { cursor: pointer; list-style: none }
.outline summary::-webkit-details-marker { display: none }
.outline summary:hover { background: color-mix(in srgb, var(--soft) 35%, transparent) }
.outline .name { overflow-wrap: anywhere; font-weight: 600 }
.outline summary .name::before { content: "▸"; display: inline-block; width: 1.1rem;
  color: var(--other) }
.outline details[open] > summary .name::before { content: "▾" }
.outline .name { padding-left: calc(var(--depth, 0) * 1.1rem) }
.outline .bar { display: block; height: 5px; max-width: 16rem; background: var(--full);
  margin: .3rem 0 } .outline .bar i { display: block; height: 5px; background: var(--low) }
.outline .quiet { color: var(--other); font-weight: 400 }
.outline .casts { color: var(--cast) } summary .casts { white-space: nowrap }
.outline .op { border-left: 4px solid var(--tone); padding: 0 .45rem; margin: .15rem 0;
  font-size: 12.5px; overflow-wrap: anywhere }
.outline .alone { font-weight: 600 } .outline .late { grid-column: 2 / -1 }
.outline .late .bar { max-width: none }
@media (max-width: 45rem) {
  .outline .line { grid-template-columns: repeat(2, minmax(0, 1fr)); padding: .4rem .5rem;
    gap: 0 .7rem }
  .outline .late { grid-column: 1 / -1 }
  .outline .name { grid-column: 1 / -1; padding-left: calc(var(--depth, 0) * .6rem) } }
"""


@attrs.define(eq=False)
class Part:
    """A module: its own rows of the plan, and the modules inside."""

    name: str
    rows: list[Any] = attrs.field(factory=list)
    parts: dict[str, Part] = attrs.field(factory=dict)

    def all_rows(self) -> Iterator[Any]:
        """Yield its rows and those of all modules inside."""
        yield from self.rows
        for part in self.parts.values():
            yield from part.all_rows()

    def likeness(self) -> Any:
        """Return what two modules that compute alike have in common."""
        own = tuple(
            (row.op.name, row.op.phase, tuple(row.op.reads), tuple(row.op.results), row.phrases)
            for row in self.rows
        )
        return own, tuple((name, part.likeness()) for name, part in self.parts.items())


def outline_of(rows: Sequence[Any]) -> Part:
    """Return the rows of a plan, without the optimizer's, as a tree of modules."""
    root = Part("")
    for row in rows:
        if row.op.phase not in _PASSES:
            continue
        part = root
        for name in filter(None, row.op.module.split(".")):
            part = part.parts.setdefault(name, Part(name))
        part.rows.append(row)
    return root


def outline(rows: Sequence[Any], low: str) -> str:
    """Return the outline as HTML."""
    root = outline_of(rows)
    late = [row for row in rows if row.op.phase not in _PASSES]
    lines = "".join(_groups(root, low, 0))
    if root.rows:
        own = _ops(root.rows, low, 1)
        lines += f"<details>{_summary('outside of modules', root.rows, low, 0)}{own}</details>"
    if late:
        lines += (
            '<div class="line"><span class="name">optimizer</span>'
            f'<span class="late">{_cell(late, low)}</span></div>'
        )
    return (
        '<div class="outline"><div class="line"><span class="name">module</span>'
        f"<span>forward</span><span>backward</span></div>{lines}</div>"
    )


def _groups(part: Part, low: str, depth: int) -> Iterator[str]:
    """Yield the modules inside of one; neighbours with numbers that are alike once."""
    parts = list(part.parts.values())
    while parts:
        first = parts.pop(0)
        alike = [first]
        kind = first.likeness() if first.name.isdigit() else None
        while parts and parts[0].name.isdigit() and parts[0].likeness() == kind:
            alike.append(parts.pop(0))
        yield _module(alike, low, depth)


def _module(alike: Sequence[Part], low: str, depth: int) -> str:
    """Return a module as one line that opens; of several that are alike the first is shown."""
    name, part = alike[0].name, alike[0]
    # Of a module with one module inside only the inner one says something.
    while len(alike) == 1 and not part.rows and len(part.parts) == 1:
        (part,) = part.parts.values()
        name += "." + part.name
    if len(alike) > 1:
        name = f"{name} – {alike[-1].name}, {len(alike)} alike"
    rows = [row for one in (alike if len(alike) > 1 else [part]) for row in one.all_rows()]
    inside = "".join(_groups(part, low, depth + 1)) + _ops(part.rows, low, depth + 1)
    # What holds the rest, and what holds the layers.
    is_open = ' open=""' if depth == 0 or any(one.isdigit() for one in part.parts) else ""
    return f"<details{is_open}>{_summary(name, rows, low, depth)}{inside}</details>\n"


def _summary(name: str, rows: Sequence[Any], low: str, depth: int) -> str:
    cells = "".join(
        f"<span>{_cell([row for row in rows if _pass_of(row) == one], low)}</span>"
        for one in _PASSES
    )
    return (
        f'<summary class="line" style="--depth:{depth}"><span class="name">{escape(name)}</span>'
        f"{cells}</summary>"
    )


def _pass_of(row: Any) -> str:
    return "backward" if row.op.phase == "backward" else "forward"


def _cell(rows: Sequence[Any], low: str) -> str:
    """Return how many ops there are, how many of them touch the low dtype, and their casts."""
    if not rows:
        return '<span class="quiet">-</span>'
    count = sum(low in (*row.op.reads, *row.op.results) for row in rows)
    casts = sum(len(row.casts) for row in rows)
    alone = sum(cast.is_alone for row in rows for cast in row.casts)
    text = f"{len(rows)} op{'s' if len(rows) > 1 else ''}"
    text += f", {count} in {short_dtype(low)}" if count else ""
    marks = f"{casts} cast{'s' if casts > 1 else ''}" + (f", {alone} alone" if alone else "")
    return (
        f'<span class="bar"><i style="width:{count / len(rows):.0%}"></i></span>'
        f'<span class="quiet">{text}</span>'
        + (f' <span class="casts">{marks}</span>' if casts else "")
    )


def _ops(rows: Sequence[Any], low: str, depth: int) -> str:
    """Return a module's own ops: the forward pass beside the backward pass."""
    if not rows:
        return ""
    columns = "".join(
        "<div>" + "".join(_op(row, low) for row in rows if _pass_of(row) == one) + "</div>"
        for one in _PASSES
    )
    return (
        f'<div class="line" style="--depth:{depth}"><span class="name quiet">ops</span>'
        f"{columns}</div>"
    )


def _op(row: Any, low: str) -> str:
    op = row.op
    dtypes = {*op.reads, *op.results}
    tone = "low" if low in dtypes else "full" if "float32" in dtypes else "other"
    name = op.name.removeprefix("relax.").removeprefix("amp_ir.").removeprefix("nn.")
    ways = f"{_words(op.reads)} → {_words(op.results)}"
    casts = "".join(
        f'<br/><span class="casts{" alone" if "alone" in one else ""}">cast {escape(one)}</span>'
        for one in row.phrases
    )
    why = escape(f"{op.module} {op.line}\n{op.reason}".strip())
    return (
        f'<div class="op {tone}" title="{why}">{escape(name)} <span class="quiet">{ways}</span>'
        f"{casts}</div>"
    )


def _words(dtypes: Sequence[str]) -> str:
    return "+".join(dict.fromkeys(map(short_dtype, dtypes))) or "-"
