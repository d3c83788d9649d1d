# SPDX-License-Identifier: Apache-2.0
"""The replay of a step: what of its exchanges is hidden, by hand and for any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ir.distributed.simulate_schedule import (
    Compute,
    Event,
    Start,
    Wait,
    simulate_schedule,
)


def test_two_buckets_by_hand():
    # The channel has bucket 0 from 4 to 10 and bucket 1 from 10 to 13. The stream waits from 7 to
    # 10 for the first, computes until 11, and waits until 13 for the second.
    events = [
        Compute(4.0), Start(0, 6.0), Compute(3.0), Start(1, 3.0), Wait(0), Compute(1.0), Wait(1),
        Compute(2.0),
    ]  # fmt: skip
    found = simulate_schedule(events)
    assert found.milliseconds == 15 and found.compute_milliseconds == 10
    assert found.channel_milliseconds == {0: 6, 1: 3}
    assert found.exposed_milliseconds == {0: 3, 1: 2}
    assert (found.exposed, found.hidden) == (5, 4)


def test_waiting_for_a_later_bucket_exposes_those_before_it():
    events = [Start(0, 6.0), Start(1, 3.0), Compute(1.0), Wait(1), Wait(0)]
    found = simulate_schedule(events)
    assert found.milliseconds == 9
    assert found.exposed_milliseconds == {0: 5, 1: 3}


TIMES = st.floats(0.0, 50.0)


@st.composite
def schedules(draw: st.DrawFn) -> list[Event]:
    """Buckets that are started in one order and waited for in another, with work between."""
    count = draw(st.integers(0, 6))
    events: list[Event] = []
    open_buckets: list[int] = []
    left = list(range(count))
    while left or open_buckets:
        events.append(Compute(draw(TIMES)))
        if left and (not open_buckets or draw(st.booleans())):
            open_buckets.append(left.pop(0))
            events.append(Start(open_buckets[-1], draw(TIMES)))
        else:
            events.append(Wait(open_buckets.pop(draw(st.integers(0, len(open_buckets) - 1)))))
    return [*events, Compute(draw(TIMES))]


@given(schedules())
def test_hidden_and_exposed_are_all_of_the_exchange(events):
    found = simulate_schedule(events)
    computed = sum(one.milliseconds for one in events if isinstance(one, Compute))
    sent = sum(one.milliseconds for one in events if isinstance(one, Start))
    assert found.compute_milliseconds == pytest.approx(computed)
    assert found.milliseconds == pytest.approx(computed + found.exposed, abs=1e-9)
    assert found.hidden + found.exposed == pytest.approx(sent, abs=1e-9)
    for bucket, milliseconds in found.channel_milliseconds.items():
        assert -1e-9 <= found.exposed_milliseconds[bucket] <= milliseconds + 1e-9


@given(schedules(), st.floats(0.0, 1.0))
def test_faster_exchanges_are_never_slower(events, factor):
    faster = [
        Start(one.bucket, one.milliseconds * factor) if isinstance(one, Start) else one
        for one in events
    ]
    slow, fast = simulate_schedule(events), simulate_schedule(faster)
    assert fast.milliseconds <= slow.milliseconds + 1e-9
    without = [one for one in events if isinstance(one, Compute)]
    assert simulate_schedule(without).milliseconds <= fast.milliseconds + 1e-9
