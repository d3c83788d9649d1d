# SPDX-License-Identifier: Apache-2.0
"""A step as a trace that chrome://tracing and ui.perfetto.dev show.

Source: "Trace Event Format", the document of the Chrome project; times are microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PROCESS = 1
_TRACKS = ("forward", "backward", "optimizer")


def trace_events(
    calls: Sequence[Any], held_nbytes: Sequence[int], exchanges: Sequence[Any] = ()
) -> dict[str, Any]:
    """Return the calls as events on a track per phase, with the arena's bytes as a counter.

    Args:
        calls: see amp_ir.report.kernel_profile.CallProfile.
        held_nbytes: bytes of the arena in use during each call.
        exchanges: see amp_ir.report.exchange_profile.ExchangeProfile; each begins with its start.
    """
    tracks = (*_TRACKS, "other", *(["exchange"] if exchanges else []))
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": _PROCESS,
            "tid": track,
            "args": {"name": name},
        }
        for track, name in enumerate(tracks, start=1)
    ]
    starts = [call for call in calls if call.name.endswith("_start")]
    for call, one in zip(starts, exchanges, strict=False):
        events.append(_exchange(call, one))
    for call, nbytes in zip(calls, held_nbytes, strict=True):
        events.append(_event(call))
        begin = call.begin_milliseconds * 1e3
        held = {"MiB": round(nbytes / 2**20, 3)}
        events.append({"ph": "C", "name": "arena", "pid": _PROCESS, "ts": begin, "args": held})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(call: Any) -> dict[str, Any]:
    track = _TRACKS.index(call.phase) if call.phase in _TRACKS else len(_TRACKS)
    return {
        "ph": "X",
        "name": ", ".join(call.ops[:3]) or call.name,
        "cat": "cast" if call.is_cast else "kernel",
        "pid": _PROCESS,
        "tid": track + 1,
        "ts": call.begin_milliseconds * 1e3,
        "dur": call.shown_milliseconds * 1e3,
        "args": {
            "kernel": call.name,
            "modules": ", ".join(call.modules),
            "ops": ", ".join(call.ops),
            "MiB": round(call.nbytes / 2**20, 3),
            "GFLOP": round(call.flop / 1e9, 6),
            "speed_of_light_ms": round(call.speed_of_light_milliseconds, 6),
        },
    }


def _exchange(start: Any, one: Any) -> dict[str, Any]:
    """Return a bucket on its way, from its start."""
    return {
        "ph": "X",
        "name": one.name,
        "cat": "exchange",
        "pid": _PROCESS,
        "tid": len(_TRACKS) + 2,
        "ts": start.begin_milliseconds * 1e3,
        "dur": one.milliseconds * 1e3,
        "args": {
            "MiB": round(one.nbytes / 2**20, 3),
            "dtype": one.dtype,
            "ranks": one.ranks,
            "exposed_ms": round(one.exposed_milliseconds, 6),
            "hidden_ms": round(one.hidden_milliseconds, 6),
        },
    }
