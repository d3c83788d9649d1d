# SPDX-License-Identifier: Apache-2.0
"""The exchanges of a profile: how long each bucket took, and how much of that was hidden."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol

import attrs


class Traffic(Protocol):
    """One collective of a run, in seconds; see amp_ir.distributed.exchange.Traffic."""

    @property
    def collective(self) -> object:
        """What was exchanged; its text is a line."""

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

    `milliseconds` is from its start to its end in the process group, in which it may wait for
    buckets before it and for other ranks; `exposed_milliseconds` is what the step was idle for it.
    """

    name: str
    nbytes: int
    milliseconds: float
    exposed_milliseconds: float

    @property
    def hidden_milliseconds(self) -> float:
        """Return the time in which the step computed meanwhile."""
        return max(0.0, self.milliseconds - self.exposed_milliseconds)


def exchange_profiles(runs: Sequence[Sequence[Traffic]]) -> tuple[ExchangeProfile, ...]:
    """Return a profile of each bucket, in the order in which they begin; a run is a step."""
    if not runs:
        return ()
    by_bucket: dict[str, list[Traffic]] = {}
    for run in runs:
        for one in run:
            by_bucket.setdefault(str(one.collective), []).append(one)
    ordered = sorted(by_bucket.items(), key=lambda item: item[1][0].begun)
    return tuple(
        ExchangeProfile(
            name,
            found[0].nbytes,
            statistics.median(one.ended - one.begun for one in found) * 1e3,
            statistics.median(map(_idle, found)) * 1e3,
        )
        for name, found in ordered
    )


def _idle(one: Traffic) -> float:
    return one.launched - one.begun + one.waited_to - one.waited_from


def exchange_lines(exchanges: Sequence[ExchangeProfile]) -> list[str]:
    """Return the sum of all buckets in a line, and a line for each."""
    if not exchanges:
        return []
    whole = sum(one.milliseconds for one in exchanges)
    exposed = sum(one.exposed_milliseconds for one in exchanges)
    hidden = sum(one.hidden_milliseconds for one in exchanges)
    nbytes = sum(one.nbytes for one in exchanges)
    share = hidden / whole if whole else 0.0
    lines = [
        f"exchange of {nbytes / 2**20:.2f} MiB with other ranks: {exposed:.3g} ms exposed, "
        f"{hidden:.3g} ms hidden ({share:.0%})"
    ]
    lines += [
        f"  {one.name}: {one.nbytes / 2**20:.2f} MiB, {one.milliseconds:.3g} ms, of which "
        f"{one.exposed_milliseconds:.3g} ms exposed"
        for one in exchanges
    ]
    return lines
