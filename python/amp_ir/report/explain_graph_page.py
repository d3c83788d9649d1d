# SPDX-License-Identifier: Apache-2.0
"""A cast plan as a drawing in one HTML file: SVG, no scripts, fonts or pictures from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from amp_ir.report.explain_graph import Edge, Graph, Node, casts_in, graph_of

_WIDTH, _HEIGHT = 184, 40
_GAP_X, _GAP_Y = 26, 44
_MARGIN = 24
_STYLE = """
:root { color-scheme: light dark; --full: #2563eb; --low: #15803d; --other: #71717a;
  --cast: #c2410c; --paper: #fff; --ink: #18181b; --soft: #e4e4e7; }
@media (prefers-color-scheme: dark) { :root { --full: #60a5fa; --low: #4ade80; --other: #a1a1aa;
  --cast: #fb923c; --paper: #18181b; --ink: #f4f4f5; --soft: #3f3f46; } }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem; background: var(--paper);
  color: var(--ink) }
h1 { font-size: 1.3rem; margin: 0 0 .3rem } p { margin: .25rem 0 }
.key span { margin-right: 1.3rem; white-space: nowrap }
.key i { display: inline-block; width: 1.6rem; height: 0; border-top: 3px solid;
  vertical-align: middle; margin-right: .35rem }
.drawing { overflow: auto; border: 1px solid var(--soft); border-radius: .4rem; margin-top: .8rem }
svg { display: block } svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
.lane { font-weight: 600; fill: var(--other) !important }
.node rect.box { fill: var(--paper); stroke: var(--other); stroke-width: 1.6 }
.node.low rect.box { stroke: var(--low) } .node.full rect.box { stroke: var(--full) }
.node .low { fill: var(--low) } .node .full { fill: var(--full) }
.node .other { fill: var(--other) }
.node .small { font-size: 10.5px; fill: var(--other) }
.edge path { fill: none; stroke: var(--other); stroke-width: 1.3; opacity: .55 }
.edge.low path { stroke: var(--low) } .edge.full path { stroke: var(--full) }
.edge.cast path { stroke: var(--cast); stroke-dasharray: 5 3; opacity: .9 }
.edge.alone path { stroke-width: 2.6; stroke-dasharray: none }
.edge .mark { fill: var(--cast) } .edge text { font-size: 10px; fill: var(--cast);
  paint-order: stroke; stroke: var(--paper); stroke-width: 3px }
.edge.late path { opacity: .2 }
svg:has(.node:hover) .edge { opacity: .15 } svg .edge.near { opacity: 1 !important }
.edge.near path { opacity: 1; stroke-width: 2.4 }
"""
# Hovering a box brings out its edges.
_SCRIPT = """
const edges = [...document.querySelectorAll(".edge")];
for (const node of document.querySelectorAll(".node")) {
  const mine = edges.filter(e => e.dataset.a === node.id || e.dataset.b === node.id);
  node.addEventListener("mouseenter", () => mine.forEach(e => e.classList.add("near")));
  node.addEventListener("mouseleave", () => mine.forEach(e => e.classList.remove("near")));
}
"""


def graph_page(title: str, plan: Any, rows: Sequence[Any]) -> str:
    """Draw the rows of a plan: colours for dtypes, dashed marked edges for casts."""
    graph = graph_of(plan, rows)
    low = plan.amp_dtype
    numbers = "".join(f"<p>{escape(line)}</p>" for line in plan.summary().splitlines()[:2])
    what = "a run of ops of one module" if graph.is_folded else "an op"
    key = (
        f'<p class="key"><span>a box is {what}</span>'
        f'<span><i style="color:var(--low)"></i>{escape(low)}</span>'
        '<span><i style="color:var(--full)"></i>float32</span>'
        '<span><i style="color:var(--other)"></i>other</span>'
        '<span><i style="color:var(--cast);border-top-style:dashed"></i>cast on the way, in a '
        "kernel</span>"
        '<span><i style="color:var(--cast)"></i>cast that is a kernel of its own</span></p>'
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f'</title><meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"</head><body><h1>{escape(title)}</h1>{numbers}{key}"
        f'<div class="drawing">{svg(graph, low)}</div><script>{_SCRIPT}</script></body></html>\n'
    )


def svg(graph: Graph, low: str) -> str:
    """Return the drawing."""
    top = min((node.row for node in graph.nodes), default=0)
    right = max((_x(node) for node in graph.nodes), default=0) + _WIDTH + _MARGIN
    bottom = max((_y(node, top) for node in graph.nodes), default=0) + _HEIGHT + _MARGIN
    lanes = "".join(
        f'<text class="lane" x="{_left_of(graph, phase)}" y="16">{phase}</text>'
        for phase in ("forward", "backward")
        if any(node.phase == phase for node in graph.nodes)
    )
    edges = [_edge(edge, top, low) for edge in sorted(graph.edges, key=_is_cast)]
    # Words above all lines, so that none is struck through.
    lines = "".join(line for line, _ in edges) + "".join(words for _, words in edges)
    nodes = "".join(_node(node, top, low) for node in graph.nodes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right:.0f}" height="{bottom:.0f}" '
        f'viewBox="0 0 {right:.0f} {bottom:.0f}">{lanes}{lines}{nodes}</svg>'
    )


def _is_cast(edge: Edge) -> bool:
    return bool(edge.casts)


def _left_of(graph: Graph, phase: str) -> float:
    return min(_x(node) for node in graph.nodes if node.phase == phase)


def _x(node: Node) -> float:
    return _MARGIN + node.column * (_WIDTH + _GAP_X)


def _y(node: Node, top: int) -> float:
    return _MARGIN + (node.row - top) * (_HEIGHT + _GAP_Y)


def _node(node: Node, top: int, low: str) -> str:
    x, y = _x(node), _y(node, top)
    share = node.leaning(low)
    reads_full = any("float32" in (*op.reads, *op.results) for op in node.ops)
    kind = "low" if share >= 0.5 else "full" if reads_full else "other"
    bar = max(_WIDTH - 12, 0)
    rest = "full" if reads_full else "other"
    return (
        f'<g class="node {kind}" id="n{node.number}"><title>{escape(_tooltip(node))}</title>'
        f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{x + 7:.1f}" y="{y + 16:.1f}">{escape(_fitted(node.label, 24))}</text>'
        f'<text class="small" x="{x + 7:.1f}" y="{y + 29:.1f}">'
        f"{escape(_fitted(_caption(node), 30))}</text>"
        f'<rect class="{rest}" x="{x + 6:.1f}" y="{y + 33:.1f}" width="{bar}" height="4"/>'
        f'<rect class="low" x="{x + 6:.1f}" y="{y + 33:.1f}" width="{bar * share:.1f}" '
        'height="4"/></g>\n'
    )


def _caption(node: Node) -> str:
    if len(node.ops) > 1:
        return f"{len(node.ops)} ops"
    op = node.ops[0]
    return f"{_words(op.reads)} → {_words(op.results)}"


def _words(dtypes: Sequence[str]) -> str:
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
    return "+".join(dict.fromkeys(short.get(one, one) for one in dtypes)) or "-"


def _tooltip(node: Node) -> str:
    lines = [f"{node.label} ({node.phase})"]
    for op in node.ops[:24]:
        lines.append(f"{op.name}: {_words(op.reads)} -> {_words(op.results)}. {op.reason}")
    if len(node.ops) > 24:
        lines.append(f"and {len(node.ops) - 24} more")
    if len(node.ops) == 1:
        lines.insert(1, f"{node.ops[0].module} {node.ops[0].line}".strip())
    return "\n".join(lines)


def _fitted(text: str, length: int) -> str:
    """Shorten a long module path from the left: its end says most."""
    return text if len(text) <= length else "…" + text[1 - length :].lstrip(".")


def _edge(edge: Edge, top: int, low: str) -> tuple[str, str]:
    """Return the line of an edge, and the mark of its casts with their description."""
    a, b = edge.source, edge.target
    x1, y1, x2, y2 = _ends(a, b, top)
    bend = max(abs(y2 - y1) / 2, 18) * (1 if y2 >= y1 else -1)
    kind = "low" if low in edge.dtypes else "full" if "float32" in edge.dtypes else "other"
    middle = ((x1 + x2) / 2, (y1 + y2) / 2)
    if a.phase != b.phase:
        # Between the lanes: sideways out of one box and into the other.
        path = (
            f"M{x1:.1f} {y1:.1f} C{x1 + 40:.1f} {y1:.1f} {x2 - 40:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
        )
    else:
        path = (
            f"M{x1:.1f} {y1:.1f} C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} "
            f"{x2:.1f} {y2:.1f}"
        )
    mark = ""
    if edge.casts:
        kind += " cast alone" if edge.is_alone else " cast"
        mark = (
            f'<circle class="mark" cx="{middle[0]:.1f}" cy="{middle[1]:.1f}" r="4"/>'
            f'<text x="{middle[0] + 6:.1f}" y="{middle[1] - 5:.1f}">{_cast_words(edge)}</text>'
        )
    kind += " late" if b.phase == "optimizer" else ""
    words = f"{a.label} to {b.label}: {edge.tensors} in {', '.join(edge.dtypes)}"
    words += f"; cast {casts_in(edge)}" if edge.casts else ""
    group = f'<g class="edge {kind}" data-a="n{a.number}" data-b="n{b.number}">'
    group += f"<title>{escape(words)}</title>"
    return f'{group}<path d="{path}"/></g>\n', f"{group}{mark}</g>\n" if mark else ""


def _ends(a: Node, b: Node, top: int) -> tuple[float, float, float, float]:
    """Return where an edge leaves and enters: below and above in a lane, at the sides otherwise."""
    ax, ay, bx, by = _x(a), _y(a, top), _x(b), _y(b, top)
    if a.phase != b.phase:
        return ax + _WIDTH, ay + _HEIGHT / 2, bx, by + _HEIGHT / 2
    down = by >= ay
    return (
        ax + _WIDTH / 2,
        ay + (_HEIGHT if down else 0),
        bx + _WIDTH / 2,
        by + (0 if down else _HEIGHT),
    )


def _cast_words(edge: Edge) -> str:
    kinds = {tuple(cast.split(" to ")) for cast in edge.casts}
    if len(kinds) > 1:
        return f"{len(edge.casts)} casts"
    ((left, read),) = kinds
    number = f"{len(edge.casts)} x " if len(edge.casts) > 1 else ""
    return f"{number}{_words([left])} → {_words([read])}"
