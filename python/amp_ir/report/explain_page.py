# SPDX-License-Identifier: Apache-2.0
"""A cast plan as one HTML file: no scripts from elsewhere, no fonts, no pictures."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --full: #2563eb; --low: #15803d;
  --other: #71717a; --alone: #c2410c; }
@media (prefers-color-scheme: dark) {
  :root { --full: #60a5fa; --low: #4ade80; --other: #a1a1aa; --alone: #fb923c; } }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem } p { margin: .3rem 0 }
.key, .find { margin: .8rem 0 } .key > span { margin-right: 1.2rem }
input { font: inherit; padding: .3rem .5rem; width: 22rem; max-width: 100% }
table { border-collapse: collapse; width: 100% }
th { text-align: left; position: sticky; top: 0; background: Canvas; padding: .35rem .6rem }
td { padding: .3rem .6rem; border-top: 1px solid var(--line); vertical-align: top }
td.op { border-left: 5px solid var(--other); font-family: ui-monospace, monospace;
  white-space: nowrap }
tr.low td.op { border-left-color: var(--low) } tr.full td.op { border-left-color: var(--full) }
tr.module td { background: var(--soft); font-weight: 600; padding-top: .6rem }
.bar { display: inline-block; width: 8rem; height: .6rem; background: var(--full);
  margin-right: .6rem }
.bar i { display: block; height: 100%; background: var(--low) }
.dtype { border-radius: .25rem; padding: 0 .35rem; border: 1px solid; white-space: nowrap;
  font-family: ui-monospace, monospace; font-size: .85em; color: var(--other) }
.dtype.low { color: var(--low) } .dtype.full { color: var(--full) }
.cast { white-space: nowrap } .alone { color: var(--alone); font-weight: 600 }
.rule, .kernel { color: var(--other) } .number { text-align: right; white-space: nowrap }
@media (max-width: 50rem) {
  thead { display: none } table, tbody, tr.module, tr.module td { display: block }
  tr.row:not([hidden]) { display: flex; flex-wrap: wrap; gap: 0 .8rem; padding-bottom: .5rem }
  tr.row td { border-top: 0; padding: .1rem 0 } tr.row td.op { padding-left: .6rem }
  tr.row td:nth-child(n + 5) { flex-basis: 100%; text-align: left; padding-left: 1rem }
  td:nth-child(3)::after { content: " \\2192" } tr.row td:empty { display: none }
  .cast { white-space: normal }
  td.number:not(.kernel)::after { content: " bytes" } td.kernel::before { content: "kernel " }
}
"""
_SCRIPT = """
const find = document.querySelector("input");
find.addEventListener("input", () => {
  const word = find.value.toLowerCase();
  for (const part of document.querySelectorAll("tbody")) {
    let any = false;
    for (const row of part.querySelectorAll("tr.row")) {
      row.hidden = !row.textContent.toLowerCase().includes(word)
        && !part.dataset.module.toLowerCase().includes(word);
      any = any || !row.hidden;
    }
    part.hidden = !any;
  }
});
"""
_HEAD = "".join(
    f"<th>{name}</th>"
    for name in ("Op", "Phase", "Reads", "Leaves", "Why", "Casts for it", "Cast bytes", "Kernel")
)


def page(title: str, plan: Any, rows: Sequence[Any]) -> str:
    """Return the rows of a plan as a page: a block per module, colours for dtypes, a search box."""
    numbers = "".join(f"<p>{escape(line)}</p>" for line in plan.summary().splitlines()[:2])
    low = plan.amp_dtype
    blocks = "".join(
        _block(module, list(group), low)
        for module, group in itertools.groupby(rows, key=lambda row: row.op.module)
    )
    key = (
        f'<p class="key"><span>{_dtype(low, low)} low</span><span>{_dtype("float32", low)} full'
        '</span><span class="alone">alone</span> a cast that is a kernel of its own; '
        "the others fuse and move no bytes</p>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f'</title><meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"</head><body><h1>{escape(title)}</h1>{numbers}{key}"
        '<p class="find"><input type="search" placeholder="module, op, rule, dtype ..." '
        'aria-label="Search"></p>'
        f"<table><thead><tr>{_HEAD}</tr></thead>{blocks}</table><script>{_SCRIPT}</script>"
        "</body></html>\n"
    )


def _block(module: str, rows: list[Any], low: str) -> str:
    share = sum(_leaning(row.op, low) == "low" for row in rows) / len(rows)
    bar = f'<span class="bar"><i style="width:{share:.0%}"></i></span>'
    name = escape(module or "outside of modules")
    head = f'<tr class="module"><td colspan="8">{bar}{name}</td></tr>'
    body = "".join(_row(row, low) for row in rows)
    return f'<tbody data-module="{name}">{head}{body}</tbody>\n'


def _row(row: Any, low: str) -> str:
    op = row.op
    nbytes = f"{row.nbytes:,}" if row.nbytes else ""
    casts = "<br>".join(_casts(row.phrases))
    kernel = str(op.kernel) if op.kernel >= 0 else ""
    return (
        f'<tr class="row {_leaning(op, low)}"><td class="op" title="{escape(op.line)}">'
        f"{escape(row.name)}</td><td>{op.phase}</td><td>{_dtypes(op.reads, low)}</td>"
        f"<td>{_dtypes(op.results, low)}</td>"
        f'<td>{escape(op.reason)} <span class="rule">{escape(op.rule)}</span></td>'
        f'<td>{casts}</td><td class="number">{nbytes}</td>'
        f'<td class="number kernel">{kernel}</td></tr>\n'
    )


def _leaning(op: Any, low: str) -> str:
    """Return whether an op touches the low dtype, else float32, else neither."""
    dtypes = {*op.reads, *op.results}
    return "low" if low in dtypes else "full" if "float32" in dtypes else "other"


def _casts(phrases: Iterable[str]) -> Iterator[str]:
    for phrase in phrases:
        text = escape(phrase).replace("alone", '<span class="alone">alone</span>')
        yield f'<span class="cast">{text}</span>'


def _dtypes(dtypes: Iterable[str], low: str) -> str:
    return " ".join(_dtype(one, low) for one in dict.fromkeys(dtypes))


def _dtype(dtype: str, low: str) -> str:
    kind = "low" if dtype == low else "full" if dtype == "float32" else ""
    return f'<span class="dtype {kind}">{escape(dtype)}</span>'
