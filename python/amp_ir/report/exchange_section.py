# SPDX-License-Identifier: Apache-2.0
"""The exchanges with other ranks as a section of a step's page: a table, and when each runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from amp_ir.report.exchange_profile import ExchangeProfile, exchange_table, exchange_total


def exchange_section(exchanges: Sequence[ExchangeProfile], step_milliseconds: float) -> str:
    """Return the section; "" for a step that exchanges nothing."""
    if not exchanges:
        return ""
    titles, *rows = exchange_table(exchanges)
    ends = [one.begin_milliseconds + one.milliseconds for one in exchanges]
    length = max(step_milliseconds, *ends)
    body = "".join(
        f'<tr title="{escape(one.name)}">{_cells("td", row)}<td>{_track(one, length)}</td></tr>'
        for one, row in zip(exchanges, rows, strict=True)
    )
    total = exchange_total(exchanges, step_milliseconds)
    return (
        f"<h2>Exchange with other ranks</h2><p>{escape(total[0].upper() + total[1:])}.</p>"
        f'<div class="wide"><table id="exchanges"><thead><tr>{_cells("th", titles)}'
        f"<th>0 to {length:.3g} ms of the step</th></tr></thead><tbody>{body}</tbody></table></div>"
        '<p class="key"><span><i class="swatch phase-forward"></i>under way while the step '
        'computes</span><span><i class="swatch phase-backward"></i>the step waits</span></p>'
        '<p class="quiet">"Start" is when a bucket is handed to the process group, "wait" when the '
        "step begins to wait for it. Before its bytes move it may wait for buckets before it and "
        "for other ranks.</p>"
    )


def _cells(tag: str, row: Sequence[str]) -> str:
    """Return the cells of a row, whose first two are words and the others numbers."""
    kinds = ["", "", *(' class="number"' for _ in row[2:])]
    cells = zip(kinds, row, strict=True)
    return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in cells)


def _track(one: ExchangeProfile, length: float) -> str:
    """Return the step as a line, with the exchange on it: what is hidden, then what is exposed."""
    begin, end = one.begin_milliseconds, one.begin_milliseconds + one.milliseconds
    waited = min(max(begin, begin + one.wait_milliseconds), end)
    parts = (("phase-forward", begin, waited), ("phase-backward", waited, end))
    shown = "".join(
        f'<i class="{tone}" style="left:{first / length:.2%};width:{(last - first) / length:.2%}">'
        "</i>"
        for tone, first, last in parts
        if last > first
    )
    return f'<span class="track">{shown}</span>'
