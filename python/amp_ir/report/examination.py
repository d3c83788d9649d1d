# SPDX-License-Identifier: Apache-2.0
"""What of a step is compiled, what is PyTorch's own op, and what is refused: text and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import attrs
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table

from amp_ir.ir.short_list import short_list

_COLUMNS = 1000  # of text that is no terminal's


@attrs.frozen
class ExaminedOp:
    """The calls of one op: their places in the program, and the bytes that they read and write."""

    name: str
    is_external: bool
    calls: int
    nbytes: int
    places: tuple[str, ...]


@attrs.frozen
class RefusedPlace:
    """One thing that keeps a step from being compiled, where it is, and what to do about it."""

    what: str
    place: str = ""
    advice: str = ""

    def __str__(self) -> str:
        """Return one line."""
        return ": ".join(filter(None, (self.place, f"{self.what}. {self.advice}".rstrip(". "))))


@attrs.frozen
class Examination:
    """The result of `amp_ir.examine`; nothing was trained for it.

    `ops` has an entry for each kind of op of the captured step, none where it could not be
    captured. `machine` are the versions and the machine, for an issue report.
    """

    step: str
    ops: tuple[ExaminedOp, ...]
    refused: tuple[RefusedPlace, ...]
    notes: tuple[str, ...] = ()
    machine: str = ""

    @property
    def external(self) -> tuple[ExaminedOp, ...]:
        """The ops that PyTorch runs inside of the compiled step."""
        return tuple(one for one in self.ops if one.is_external)

    @property
    def compiled_share(self) -> float:
        """The share of the calls that amp_ir compiles, from 0 to 1; 0 where a place is refused."""
        return self._share([one.calls for one in self.ops])

    @property
    def compiled_share_of_bytes(self) -> float:
        """The same, each call weighed by the bytes that it reads and writes."""
        return self._share([one.nbytes for one in self.ops])

    def _share(self, weights: Sequence[int]) -> float:
        if self.refused or not self.ops:
            return 0.0
        ours = sum(w for w, one in zip(weights, self.ops, strict=True) if not one.is_external)
        return ours / max(sum(weights), 1)

    def headline(self) -> str:
        """Return one sentence."""
        if self.refused:
            places = "1 place" if len(self.refused) == 1 else f"{len(self.refused)} places"
            return f"{self.step} cannot be compiled: {places}"
        calls = sum(one.calls for one in self.ops)
        external = sum(one.calls for one in self.external)
        ours = f"{self.step} can be compiled: {calls - external} of {calls} ops"
        shares = (
            f"{_percent(self.compiled_share)}, {_percent(self.compiled_share_of_bytes)} of bytes"
        )
        rest = f"{external} are PyTorch's own" if external else "none is PyTorch's own"
        return f"{ours} ({shares}), {rest}"

    def to_json(self) -> str:
        """Return all of it as JSON."""
        data = {
            "headline": self.headline(),
            "compiled_share": self.compiled_share,
            "compiled_share_of_bytes": self.compiled_share_of_bytes,
            **attrs.asdict(self),
        }
        return json.dumps(data, indent=1)

    def issue_text(self) -> str:
        """Return a text for an issue report: versions, and what is external or refused."""
        lines = ["### amp-ir examine", "", self.headline(), "", self.machine, ""]
        lines += [f"- refused: {one}" for one in self._refused_together()]
        for one in self.external:
            times = "call" if one.calls == 1 else "calls"
            lines.append(f"- PyTorch's own: {one.name}, {one.calls} {times}")
        lines += [f"- note: {note}" for note in self.notes]
        return "\n".join(lines).rstrip() + "\n"

    def _refused_together(self) -> list[RefusedPlace]:
        """Return what is refused, each kind once, with its first places."""
        places: dict[tuple[str, str], list[str]] = {}
        for one in self.refused:
            places.setdefault((one.what, one.advice), []).append(one.place)
        return [RefusedPlace(what, short_list(at), how) for (what, how), at in places.items()]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show the headline, what is refused, and the ops."""
        yield escape(self.headline())
        for number, one in enumerate(self._refused_together(), 1):
            yield escape(f"  {number}. {one}")
        if self.external:
            yield ""
            yield _table("PyTorch's own ops", self.external)
        compiled = [one for one in self.ops if not one.is_external]
        if compiled:
            yield ""
            yield _table("compiled", compiled)
        if self.notes:
            yield ""
            yield from (escape(f"note: {note}") for note in self.notes)

    def __repr__(self) -> str:
        """Return the headline; `print` shows all of it."""
        return f"Examination({self.headline()})"

    def __str__(self) -> str:
        """Return what a terminal shows."""
        console = Console(width=_COLUMNS, no_color=True)
        with console.capture() as capture:
            console.print(self, highlight=False)
        return capture.get().rstrip()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _size(nbytes: int) -> str:
    if nbytes >= 2**20:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**10:.1f} KiB"


def _table(title: str, ops: Sequence[ExaminedOp]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title, overflow="fold")
    table.add_column("calls", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("where", overflow="fold")
    for one in sorted(ops, key=lambda one: -one.nbytes):
        table.add_row(one.name, str(one.calls), _size(one.nbytes), escape(short_list(one.places)))
    return table


def refused_places(error: Any) -> tuple[RefusedPlace, ...]:
    """Return the places that an error lists, or the error itself as one."""
    places = getattr(error, "places", ())
    if not places:
        return (RefusedPlace(str(error)),)
    return tuple(RefusedPlace(one.what, str(one.location), one.advice) for one in places)
