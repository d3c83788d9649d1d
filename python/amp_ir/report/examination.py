# SPDX-License-Identifier: Apache-2.0
"""What of a step is compiled, what is PyTorch's own op, and what is refused: text and JSON."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from amp_ir.files.strict_json import strict_json
from amp_ir.ir.short_list import short_list
from amp_ir.report.short_places import cut, short_nbytes, short_place
from amp_ir.report.wide_console import FILE_COLUMNS

_MOST_OPS = 20
# What only moves data: of little interest in a list of what is compiled.
_MOVES = frozenset(
    f"relax.{name}"
    for name in (
        "reshape", "permute_dims", "expand_dims", "squeeze", "flatten", "broadcast_to",
        "strided_slice", "concat", "split", "astype",
    )
)  # fmt: skip


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
        return strict_json(data)

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

    def show(self, console: Console, *, everything: bool = False) -> None:
        """Print the headline, what is refused, and the ops; those of the most bytes, or all."""
        # A sentence is one line of a file, and wrapped between words by a terminal.
        say = functools.partial(
            console.print, highlight=False, markup=False, soft_wrap=not console.is_terminal
        )
        say(self.headline())
        for number, one in enumerate(self._refused_together(), 1):
            say(f"  {number}. {one}")
        if self.external:
            console.print()
            console.print(_table("PyTorch's own ops", self.external, console.width))
        compiled = sorted((one for one in self.ops if not one.is_external), key=_by_bytes)
        shown = compiled
        if not everything:
            shown = [one for one in compiled if one.name not in _MOVES][:_MOST_OPS]
        if shown:
            console.print()
            console.print(_table("compiled", shown, console.width))
        if len(shown) < len(compiled):
            left = [one for one in compiled if one not in shown]
            calls = f"{sum(one.calls for one in left)} calls"
            hidden = f"{len(left)} more kinds of ops, {calls}, which move data or few bytes"
            say(f"not shown: {hidden}; --all shows them", style="dim")
        if self.notes:
            console.print()
            for note in self.notes:
                say(f"note: {note}")

    def __repr__(self) -> str:
        """Return the headline; `print` shows all of it."""
        return f"Examination({self.headline()})"

    def __str__(self) -> str:
        """Return all of it as text."""
        console = Console(width=FILE_COLUMNS, no_color=True)
        with console.capture() as capture:
            self.show(console, everything=True)
        return capture.get().rstrip()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _by_bytes(one: ExaminedOp) -> int:
    return -one.nbytes


def _table(title: str, ops: Sequence[ExaminedOp], columns: int) -> Table:
    """Return a line for each op: its calls, its bytes, and the first place of its calls."""
    names = [cut(one.name, columns * 2 // 5) for one in ops]
    width = max(len(one) for one in (title, *names))
    more = [f" +{len(one.places) - 1}" if len(one.places) > 1 else "" for one in ops]
    # Calls, bytes, and the spaces between the columns.
    left = columns - width - 6 - 11 - 6 - max(map(len, more))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title, no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("where", no_wrap=True)
    for name, one, rest in zip(names, ops, more, strict=True):
        place = short_place(one.places[0], left) if one.places else ""
        table.add_row(name, str(one.calls), short_nbytes(one.nbytes), escape(place + rest))
    return table


def refused_places(error: Any) -> tuple[RefusedPlace, ...]:
    """Return the places that an error lists, or the error itself as one."""
    places = getattr(error, "places", ())
    if not places:
        return (RefusedPlace(str(error)),)
    return tuple(RefusedPlace(one.what, str(one.location), one.advice) for one in places)
