# SPDX-License-Identifier: Apache-2.0
"""A cast plan as a graph on one HTML page: no scripts, fonts or pictures from elsewhere.

A box is an op. The forward pass runs down at the left; the backward pass runs up at the right,
beside what it differentiates; the optimizer is one box. The browser lays the boxes out in the cells
of a grid, and the script draws the edges. A step with more ops is an outline of its modules instead
(module_outline.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import attrs

from amp_ir.report.expression_text import short_dtype
from amp_ir.report.module_outline import OUTLINE_STYLE, outline

# More ops than this are no picture that one can follow.
MAX_OPS = 40
LANES = ("forward", "backward", "optimizer")
_MAX_OPS_IN_TOOLTIP = 24
_STYLE = """
:root { color-scheme: light dark; --full: #2563eb; --low: #15803d; --other: #71717a;
  --cast: #c2410c; --paper: #fff; --ink: #18181b; --soft: #e4e4e7; }
@media (prefers-color-scheme: dark) { :root { --full: #60a5fa; --low: #4ade80; --other: #a1a1aa;
  --cast: #fb923c; --paper: #18181b; --ink: #f4f4f5; --soft: #3f3f46; } }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem; background: var(--paper);
  color: var(--ink) }
h1 { font-size: 1.3rem; margin: 0 0 .3rem } p { margin: .25rem 0 }
.key span { margin-right: 1.3rem; white-space: nowrap }
.key i { display: inline-block; width: 1.6rem; border-top: 3px solid; vertical-align: middle;
  margin-right: .35rem }
.low { --tone: var(--low) } .full { --tone: var(--full) } .other { --tone: var(--other) }
.drawing { position: relative; overflow: auto; border: 1px solid var(--soft); margin-top: .8rem;
  border-radius: .4rem; padding: 1rem; display: grid; gap: 2.4rem 3.5rem; justify-content: start }
.drawing b { grid-row: 1; color: var(--other) }
.cell { display: flex; gap: 1.6rem } .cell.forward { justify-content: center }
.node { width: 11.5rem; flex: none; border: 1.6px solid var(--tone); border-radius: 5px;
  background: var(--paper); padding: .2rem .45rem; font-size: 12px; line-height: 1.25; z-index: 1 }
.node div { overflow: hidden; white-space: nowrap; text-overflow: ellipsis }
.node small { color: var(--other) }
.node .bar { height: 4px } .node .bar i { display: block; height: 4px; background: var(--low) }
svg { position: absolute; left: 0; top: 0 }
.edge path { fill: none; stroke: var(--tone); stroke-width: 1.3; opacity: .55 }
.edge.cast path { stroke: var(--cast); stroke-dasharray: 5 3; opacity: .9 }
.edge.alone path { stroke-width: 2.6; stroke-dasharray: none } .edge.late path { opacity: .2 }
.edge text { font-size: 10px; fill: var(--cast); paint-order: stroke; stroke: var(--paper);
  stroke-width: 3px }
.edge circle { fill: var(--cast) }
.drawing:has(.node:hover) .edge:not(.near) { opacity: .15 }
.edge.near path { opacity: 1; stroke-width: 2.4 }
"""
# Hovering a box brings out its edges.
_SCRIPT = """
const drawing = document.querySelector(".drawing"), lines = drawing.querySelector("svg");
const edges = [...lines.querySelectorAll(".edge")];
const point = (box, x, y) =>
  [box.offsetLeft + x * box.offsetWidth, box.offsetTop + y * box.offsetHeight];
for (const edge of edges) {
  const [a, b] = edge.dataset.ends.split(" ").map(id => document.getElementById(id));
  const aside = a.dataset.lane !== b.dataset.lane, down = b.offsetTop >= a.offsetTop;
  const [x1, y1] = aside ? point(a, 1, .5) : point(a, .5, down ? 1 : 0);
  const [x2, y2] = aside ? point(b, 0, .5) : point(b, .5, down ? 0 : 1);
  const x = aside ? 40 : 0, y = aside ? 0 : (y2 - y1) / 2;
  edge.querySelector("path").setAttribute("d",
    `M${x1} ${y1} C${x1 + x} ${y1 + y} ${x2 - x} ${y2 - y} ${x2} ${y2}`);
  edge.querySelector("g").setAttribute("transform",
    `translate(${(x1 + x2) / 2} ${(y1 + y2) / 2})`);
  for (const box of [a, b]) {
    box.addEventListener("mouseenter", () => edge.classList.add("near"));
    box.addEventListener("mouseleave", () => edge.classList.remove("near"));
  }
}
lines.setAttribute("width", drawing.scrollWidth);
lines.setAttribute("height", drawing.scrollHeight);
"""


@attrs.define(eq=False)
class Node:
    """A box: ops of one phase, and the row of the grid it is in, from 0."""

    number: int
    label: str
    phase: str
    ops: list[Any]
    row: int = 0


@attrs.frozen
class Edge:
    """Tensors from one node to another; `casts` counts those that are cast in between."""

    source: Node
    target: Node
    tensors: int
    dtypes: tuple[str, ...]
    casts: Counter[tuple[str, str]]
    is_alone: bool


@attrs.define
class Graph:
    """A drawing."""

    nodes: list[Node]
    edges: list[Edge]


def graph_of(plan: Any, rows: Sequence[Any]) -> Graph:
    """Return the rows of a plan as a graph, in which a loop is one op."""
    ops = [row.op for row in rows if (row.op.results or row.op.reads) and not row.is_in_loop]
    inside = [op for op in ops if op.phase != "optimizer"]
    last = [op for op in ops if op.phase == "optimizer"]
    runs = [(_short(op.name), [op]) for op in inside]
    runs += [("optimizer", last)] if last else []
    nodes = [Node(k, label, group[0].phase, group) for k, (label, group) in enumerate(runs)]
    edges = _edges(plan, nodes)
    _set_rows(nodes, edges)
    return Graph(nodes, edges)


def _short(name: str) -> str:
    return name.removeprefix("relax.").removeprefix("amp_ir.").removeprefix("nn.")


def _edges(plan: Any, nodes: Sequence[Node]) -> list[Edge]:
    home = {op.id: node for node in nodes for op in node.ops}
    alone = {(cast.source, cast.to_dtype) for cast in plan.casts if cast.is_alone}
    found: dict[tuple[int, int], list[tuple[str, str, bool]]] = {}
    for node in nodes:
        for op in node.ops:
            for source, left, read in zip(op.sources, op.left, op.reads, strict=True):
                maker = home.get(source)
                if maker is not None and maker is not node:
                    tensor = (left, read, left != read and (source, read) in alone)
                    found.setdefault((maker.number, node.number), []).append(tensor)
    return [
        Edge(
            nodes[a],
            nodes[b],
            len(tensors),
            tuple(dict.fromkeys(read for _, read, _ in tensors)),
            Counter((left, read) for left, read, _ in tensors if left != read),
            any(is_alone for _, _, is_alone in tensors),
        )
        for (a, b), tensors in found.items()
    ]


def _set_rows(nodes: Sequence[Node], edges: Iterable[Edge]) -> None:
    """Set each row to the longest path inside its pass; the backward pass counts from below."""
    for edge in sorted(edges, key=lambda edge: (edge.target.number, edge.source.number)):
        if edge.source.phase == edge.target.phase:
            edge.target.row = max(edge.target.row, edge.source.row + 1)
    bottom = max((node.row for node in nodes), default=0)
    for node in nodes:
        if node.phase == "backward":
            node.row = bottom - node.row


def graph_page(title: str, plan: Any, rows: Sequence[Any]) -> str:
    """Draw the rows of a plan: colours for dtypes, marks for casts; many rows as an outline."""
    low = plan.amp_dtype
    numbers = "".join(f"<p>{escape(line)}</p>" for line in plan.summary().splitlines()[:2])
    key = (
        f'<span><i style="color:var(--low)"></i>{escape(low)}</span>'
        '<span><i style="color:var(--full)"></i>float32</span>'
        '<span><i style="color:var(--other)"></i>other</span>'
    )
    inside = [
        row for row in rows if row.op.phase != "optimizer" and (row.op.reads or row.op.results)
    ]
    if len(inside) > MAX_OPS:
        key += '<span style="color:var(--cast)">casts; "alone" is a kernel of its own</span>'
        drawn = outline(rows, low)
    else:
        key += (
            '<span><i style="color:var(--cast);border-top-style:dashed"></i>cast on the way, in a '
            'kernel</span><span><i style="color:var(--cast)"></i>cast that is a kernel of its own'
            "</span>"
        )
        drawn = f"{drawing(graph_of(plan, rows), low)}<script>{_SCRIPT}</script>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        '</title><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}{OUTLINE_STYLE}</style></head><body><h1>{escape(title)}</h1>{numbers}"
        f'<p class="key">{key}</p>{drawn}</body></html>\n'
    )


def drawing(graph: Graph, low: str) -> str:
    """Return the boxes, and the edges without their ends, which only the browser knows."""
    cells: dict[tuple[int, int], str] = {}
    for node in graph.nodes:
        place = (node.row + 2, LANES.index(node.phase) + 1)
        cells[place] = cells.get(place, "") + _box(node, low)
    boxes = "".join(
        f'<div class="cell {LANES[lane - 1]}" style="grid-area:{row}/{lane}">{inside}</div>\n'
        for (row, lane), inside in cells.items()
    )
    used = sorted({lane for _, lane in cells})
    heads = "".join(f'<b style="grid-column:{lane}">{LANES[lane - 1]}</b>' for lane in used)
    # Casts come last, so that no other line crosses their words.
    lines = "".join(_line(one, low) for one in sorted(graph.edges, key=lambda one: bool(one.casts)))
    return f'<div class="drawing">{heads}{boxes}<svg>{lines}</svg></div>'


def _box(node: Node, low: str) -> str:
    share = sum(low in (*op.reads, *op.results) for op in node.ops) / len(node.ops)
    reads_full = any("float32" in (*op.reads, *op.results) for op in node.ops)
    rest = "full" if reads_full else "other"
    caption = f"{len(node.ops)} ops" if len(node.ops) > 1 else _dtypes_of(node.ops[0])
    return (
        f'<div class="node {"low" if share >= 0.5 else rest}" id="n{node.number}" '
        f'data-lane="{node.phase}" title="{escape(_tooltip(node))}">'
        f"<div>{escape(_fitted(node.label, 24))}</div><small>{escape(caption)}</small>"
        f'<div class="bar" style="background:var(--{rest})">'
        f'<i style="width:{share:.0%}"></i></div></div>'
    )


def _dtypes_of(op: Any) -> str:
    return f"{_words(op.reads)} → {_words(op.results)}"


def _words(dtypes: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(map(short_dtype, dtypes))) or "-"


def _tooltip(node: Node) -> str:
    lines = [f"{node.label} ({node.phase})"]
    if len(node.ops) == 1:
        lines.append(f"{node.ops[0].module} {node.ops[0].line}".strip())
    shown = node.ops[:_MAX_OPS_IN_TOOLTIP]
    lines += [f"{op.name}: {_dtypes_of(op)}. {op.reason}" for op in shown]
    if len(node.ops) > len(shown):
        lines.append(f"and {len(node.ops) - len(shown)} more")
    return "\n".join(lines)


def _fitted(text: str, length: int) -> str:
    """Shorten a long module path from the left: its end says most."""
    return text if len(text) <= length else "…" + text[1 - length :].lstrip(".")


def _line(edge: Edge, low: str) -> str:
    """Return an edge; its casts as a mark with their number and dtypes."""
    a, b, count = edge.source, edge.target, edge.casts.total()
    kind = "low" if low in edge.dtypes else "full" if "float32" in edge.dtypes else "other"
    words = f"{a.label} to {b.label}: {edge.tensors} in {', '.join(edge.dtypes)}"
    mark = ""
    if edge.casts:
        kind += " cast alone" if edge.is_alone else " cast"
        each = [_times(n, f"{left} to {read}") for (left, read), n in edge.casts.items()]
        words += f"; cast {', '.join(each)}"
        (left, read), *others = edge.casts
        text = f"{count} casts" if others else _times(count, f"{_words([left])} → {_words([read])}")
        mark = f'<circle r="4"/><text x="6" y="-5">{text}</text>'
    kind += " late" if b.phase == "optimizer" else ""
    return (
        f'<g class="edge {kind}" data-ends="n{a.number} n{b.number}"><title>{escape(words)}'
        f"</title><path/><g>{mark}</g></g>\n"
    )


def _times(count: int, text: str) -> str:
    return text if count == 1 else f"{count} x {text}"
