# SPDX-License-Identifier: Apache-2.0
"""The exchanges of a profile: how long each bucket took, and how much of that was hidden."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol

import attrs


class Exchanged(Protocol):
    """What was exchanged; its text is a line. See amp_ir.ir.collective_call.Collective."""

    @property
    def kind(self) -> str:
        """The op: "all_reduce", "broadcast", ..."""

    @property
    def dtype(self) -> str:
        """The dtype between the ranks."""

    @property
    def group(self) -> int:
        """The number of the group."""

    @property
    def ranks(self) -> int:
        """The size of the group."""


class Traffic(Protocol):
    """One collective of a run, in seconds; see amp_ir.distributed.exchange.Traffic."""

    @property
    def collective(self) -> Exchanged:
        """What was exchanged."""

    @property
    def nbytes(self) -> int:
        """The bytes of the bucket."""

    @property
    def begun(self) -> float:
        """When the group got it."""

    @property
    def launched(self) -> float:
        """When the step went on after that."""

    @property
    def ended(self) -> float:
        """When the group was done with it."""

    @property
    def waited_from(self) -> float:
        """When the step began to wait for it."""

    @property
    def waited_to(self) -> float:
        """When the step went on."""


@attrs.frozen
class ExchangeProfile:
    """One bucket. Milliseconds are medians over the timed steps.

    `kind` is the op, `dtype` that between the ranks, `ranks` how many exchange. `milliseconds` is
    from its start to its end in the process group, in which it may wait for buckets before it and
    for other ranks; `exposed_milliseconds` is what the step was idle for it. The step began to wait
    for it `wait_milliseconds` after its start; `begin_milliseconds` is its start in the shown step.
    """

    name: str
    nbytes: int
    milliseconds: float
    exposed_milliseconds: float
    kind: str = ""
    dtype: str = ""
    ranks: int = 0
    wait_milliseconds: float = 0.0
    begin_milliseconds: float = 0.0

    @property
    def hidden_milliseconds(self) -> float:
        """Return the time in which the step computed meanwhile."""
        return max(0.0, self.milliseconds - self.exposed_milliseconds)


def exchange_profiles(
    runs: Sequence[Sequence[Traffic]], begins: Sequence[float] = ()
) -> tuple[ExchangeProfile, ...]:
    """Return a profile of each bucket, in the order in which they begin; a run is a step.

    `begins` are the milliseconds in a step at which they do.
    """
    if not runs:
        return ()
    by_bucket: dict[tuple[int, str], list[Traffic]] = {}
    for run in runs:
        for one in run:
            by_bucket.setdefault((one.collective.group, str(one.collective)), []).append(one)
    ordered = sorted(by_bucket.items(), key=lambda item: item[1][0].begun)
    return tuple(
        ExchangeProfile(
            name,
            found[0].nbytes,
            statistics.median(one.ended - one.begun for one in found) * 1e3,
            statistics.median(map(_idle, found)) * 1e3,
            found[0].collective.kind,
            found[0].collective.dtype,
            found[0].collective.ranks,
            statistics.median(one.waited_from - one.begun for one in found) * 1e3,
            begin,
        )
        for ((_, name), found), begin in zip(ordered, begins or [0.0] * len(ordered), strict=True)
    )


def _idle(one: Traffic) -> float:
    return one.launched - one.begun + one.waited_to - one.waited_from


def exchange_lines(
    exchanges: Sequence[ExchangeProfile], step_milliseconds: float | None = None
) -> list[str]:
    """Return the sum of all buckets in a line, and a table with a row for each."""
    if not exchanges:
        return []
    rows = exchange_table(exchanges)
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    total = exchange_total(exchanges, step_milliseconds)
    return [total, *(_aligned(row, widths) for row in rows)]


def exchange_total(
    exchanges: Sequence[ExchangeProfile], step_milliseconds: float | None = None
) -> str:
    """Return the sum of all buckets in a line."""
    whole = sum(one.milliseconds for one in exchanges)
    exposed = sum(one.exposed_milliseconds for one in exchanges)
    hidden = sum(one.hidden_milliseconds for one in exchanges)
    nbytes = sum(one.nbytes for one in exchanges)
    share = hidden / whole if whole else 0.0
    of_step = f", {exposed / step_milliseconds:.1%} of the step" if step_milliseconds else ""
    return (
        f"exchange of {nbytes / 2**20:.2f} MiB with other ranks: {exposed:.3g} ms exposed{of_step}"
        f", {hidden:.3g} ms hidden ({share:.0%})"
    )


def exchange_table(exchanges: Sequence[ExchangeProfile]) -> list[list[str]]:
    """Return the titles, and a row for each bucket; the last five are milliseconds."""
    titles = ["op", "dtype", "ranks", "MiB", "start ms", "wait ms", "took ms", "exposed", "hidden"]
    return [titles, *(_row(one) for one in exchanges)]


def _row(one: ExchangeProfile) -> list[str]:
    times = (
        one.begin_milliseconds,
        one.begin_milliseconds + one.wait_milliseconds,
        one.milliseconds,
        one.exposed_milliseconds,
        one.hidden_milliseconds,
    )
    sent = [one.kind, one.dtype, str(one.ranks), f"{one.nbytes / 2**20:.2f}"]
    return [*sent, *(f"{milliseconds:.3g}" for milliseconds in times)]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Return a row whose first two columns are words, and the others numbers."""
    cells = [
        cell.ljust(width) if k < 2 else cell.rjust(width)
        for k, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return f"  {'  '.join(cells)}".rstrip()
