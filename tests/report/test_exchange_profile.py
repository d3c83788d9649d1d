# SPDX-License-Identifier: Apache-2.0
"""Exchanges in profiles and traces: what was exposed, and what was hidden."""

from __future__ import annotations

import attrs
import pytest

from amp_ir.distributed.exchange import Traffic
from amp_ir.ir.collective_call import Collective
from amp_ir.report.exchange_profile import exchange_lines, exchange_profiles
from amp_ir.report.trace import trace_events

FIRST = Collective("all_reduce", 0, 0, 2, "float32", (1024, 16))
SECOND = attrs.evolve(FIRST, bucket=1, sizes=(2**18,))


def run(late: float) -> list[Traffic]:
    """A step in seconds: the second bucket is waited for, the first one was done by then."""
    return [
        Traffic(FIRST, 4160, 1.0, 1.001, 1.010, 1.020, 1.020),
        Traffic(SECOND, 2**20, 1.004, 1.004, 1.024 + late, 1.020, 1.024 + late),
    ]


def test_what_a_step_waits_for_is_exposed_and_the_rest_hidden() -> None:
    first, second = exchange_profiles([run(0.0), run(0.002), run(0.1)])
    assert (first.name, first.nbytes) == ("all_reduce of bucket 0, float32[1040]", 4160)
    assert first.milliseconds == pytest.approx(10) and first.exposed_milliseconds == pytest.approx(
        1
    )
    assert first.hidden_milliseconds == pytest.approx(9)
    assert second.milliseconds == pytest.approx(22)
    assert second.exposed_milliseconds == pytest.approx(6)
    assert (first.kind, first.dtype, first.ranks) == ("all_reduce", "float32", 2)
    assert first.wait_milliseconds == pytest.approx(20)
    begun = exchange_profiles([run(0.0), run(0.002), run(0.1)], [3.0, 7.0])
    assert exchange_lines(begun, 140.0) == [
        "exchange of 1.00 MiB with other ranks: 7 ms exposed, 5.0% of the step, 25 ms hidden (78%)",
        "  op          dtype    ranks   MiB  start ms  wait ms  took ms  exposed  hidden",
        "  all_reduce  float32      2  0.00         3       23       10        1       9",
        "  all_reduce  float32      2  1.00         7       23       22        6      16",
    ]
    assert exchange_lines(begun)[0] == (
        "exchange of 1.00 MiB with other ranks: 7 ms exposed, 25 ms hidden (78%)"
    )
    assert exchange_profiles([]) == () and exchange_lines(()) == []


def test_a_trace_has_a_track_of_exchanges() -> None:
    @attrs.frozen
    class Call:
        name: str
        begin_milliseconds: float
        phase: str = "backward"
        ops: tuple[str, ...] = ("op",)
        modules: tuple[str, ...] = ()
        shown_milliseconds: float = 1.0
        nbytes: int = 0
        flop: int = 0
        speed_of_light_milliseconds: float = 0.0
        is_cast: bool = False

    calls = [Call("kernel", 0.0), Call("all_reduce_start", 2.0), Call("all_reduce_wait", 5.0)]
    events = trace_events(calls, [0, 0, 0], exchange_profiles([run(0.0)])[:1])["traceEvents"]
    tracks = {one["args"]["name"]: one["tid"] for one in events if one["ph"] == "M"}
    (sent,) = (one for one in events if one.get("cat") == "exchange")
    assert sent["tid"] == tracks["exchange"]
    assert sent["ts"] == 2000.0 and sent["dur"] == pytest.approx(10_000)
    assert sent["args"]["exposed_ms"] == pytest.approx(1)
    assert (sent["args"]["dtype"], sent["args"]["ranks"]) == ("float32", 2)
    alone = trace_events(calls, [0, 0, 0])["traceEvents"]
    assert "exchange" not in {one["args"]["name"] for one in alone if one["ph"] == "M"}
