# SPDX-License-Identifier: Apache-2.0
"""Begin collectives as early, and wait for them as late, as the step's data allow."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from amp_ir.ir.collective_call import read_collective
from amp_ir.memory.buffers import Call
from amp_ir.memory.liveness import Liveness

Before = Mapping[int, Mapping[int, Call]]


def order_collectives(live: Liveness) -> None:
    """Put each start right after its last argument, and each wait after all independent calls.

    Before:  g1 = ...; f1 = start(g1); s1 = wait(f1); p1 = update(s1); g0 = ...; f0 = start(g0); ...
    After:   g1 = ...; f1 = start(g1); g0 = ...; f0 = start(g0); s1 = wait(f1); s0 = wait(f0);
             p1 = update(s1); p0 = update(s0)

    All ranks have to start in one order: that of the buckets. A call that writes an output of the
    step comes after the waits that do not need it, so that a step whose exchange fails has changed
    nothing.

    Requires: nothing is placed. Ensures: other calls keep their order, each value is written before
              it is read, and old state is read before it is overwritten wherever it was.
    """
    if not any(call.collective for call in live.program.calls):
        return
    for place, call in enumerate(_scheduled(live)):
        position = live.position[id(call)]
        if position != place:
            live.move(position, place)
    live.find_destinations()


def _scheduled(live: Liveness) -> list[Call]:
    calls = list(live.program.calls)
    before = _dependencies(live)
    left = {id(call): len(before[id(call)]) for call in calls}
    after: dict[int, list[int]] = {id(call): [] for call in calls}
    for key, needed in before.items():
        for one in needed:
            after[one].append(key)
    position = {id(call): k for k, call in enumerate(calls)}
    outputs = {id(buffer) for buffer in live.program.results}
    ready: list[tuple[int, int]] = []

    def push(call: Call) -> None:
        heapq.heappush(ready, (_urgency(call, outputs), position[id(call)]))

    for call in calls:
        if not left[id(call)]:
            push(call)
    made = []
    while ready:
        call = calls[heapq.heappop(ready)[1]]
        made.append(call)
        for key in after[id(call)]:
            left[key] -= 1
            if not left[key]:
                push(calls[position[key]])
    assert len(made) == len(calls)
    return made


def _urgency(call: Call, outputs: set[int]) -> int:
    """Return which of two calls that are ready runs first: the smaller number."""
    if call.collective == "start":
        return 0
    if call.collective == "wait":
        return 2
    return 3 if any(id(one) in outputs for one in call.results) else 1


def _dependencies(live: Liveness) -> dict[int, dict[int, Call]]:
    """Return for each call those that have to come before it."""
    before: dict[int, dict[int, Call]] = {}
    for call in live.program.calls:
        writers = [live.writer[id(b)] for b in call.reads if id(b) in live.writer]
        before[id(call)] = {id(one): one for one in writers}
    for old, update in live.overwrites.since.items():
        for reader in live.readers.get(old, ()):
            if live.position[id(reader)] < update:
                before[id(live.program.calls[update])][id(reader)] = reader
    for key, needed in collective_order(live).items():
        before[key].update(needed)
    return before


def collective_order(live: Liveness) -> dict[int, dict[int, Call]]:
    """Return what must come before each start: the one of the bucket before.

    Fusion may have ordered them otherwise, and on another rank in another way.
    """
    starts = [call for call in live.program.calls if call.collective == "start"]
    starts.sort(key=_bucket_of)
    return {
        id(later): {id(earlier): earlier}
        for earlier, later in zip(starts, starts[1:], strict=False)
    }


def _bucket_of(call: Call) -> int:
    found = read_collective(call.expr)
    assert found is not None, call
    return found.bucket
