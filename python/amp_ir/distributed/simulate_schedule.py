# SPDX-License-Identifier: Apache-2.0
"""Replay a step's own order of computing, starts and waits, with given times of its exchanges.

One stream computes, and one channel exchanges, one bucket after the other in the order in which
they were started. A wait is idle until its bucket is done. That is the order of the program as it
was compiled, so what is hidden is what its schedule hides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs


@attrs.frozen
class Compute:
    """The stream works."""

    milliseconds: float


@attrs.frozen
class Start:
    """The stream hands a bucket to the channel, which takes so long for it."""

    bucket: int
    milliseconds: float


@attrs.frozen
class Wait:
    """The stream goes on when the channel is done with a bucket."""

    bucket: int


Event = Compute | Start | Wait


@attrs.frozen
class Schedule:
    """A simulated step: its time, what of it is computed, and of each bucket by its number.

    `channel_milliseconds` is what a bucket takes, `exposed_milliseconds` the part of it in which
    the stream is idle. The channel is busy whenever the stream waits, so every idle moment is in
    the part of one bucket.
    """

    milliseconds: float
    compute_milliseconds: float
    channel_milliseconds: Mapping[int, float]
    exposed_milliseconds: Mapping[int, float]

    @property
    def exposed(self) -> float:
        """Return the milliseconds in which the stream is idle."""
        return sum(self.exposed_milliseconds.values())

    @property
    def hidden(self) -> float:
        """Return the milliseconds of exchange in which the stream computes."""
        return sum(self.channel_milliseconds.values()) - self.exposed


def simulate_schedule(events: Sequence[Event]) -> Schedule:
    """Return what a step takes, of its events in order.

    Requires: each bucket is started, then waited for, once.
    """
    now = busy_until = computed = 0.0
    # When the channel works on a bucket, in the order of starts.
    sent: dict[int, tuple[float, float]] = {}
    exposed: dict[int, float] = {}
    for event in events:
        if isinstance(event, Compute):
            now += event.milliseconds
            computed += event.milliseconds
        elif isinstance(event, Start):
            begin = max(now, busy_until)
            busy_until = begin + event.milliseconds
            sent[event.bucket] = begin, busy_until
            exposed[event.bucket] = 0.0
        else:
            until = sent[event.bucket][1]
            for bucket, (begin, end) in sent.items():
                exposed[bucket] += max(0.0, min(end, until) - max(begin, now))
            now = max(now, until)
    times = {bucket: end - begin for bucket, (begin, end) in sent.items()}
    return Schedule(now, computed, times, exposed)
