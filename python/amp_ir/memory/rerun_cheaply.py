# SPDX-License-Identifier: Apache-2.0
"""Hold less of a step where that costs next to no time."""

from __future__ import annotations

import attrs

from amp_ir.memory.buffers import BufferizedStep, Call
from amp_ir.memory.liveness import Liveness
from amp_ir.memory.order_calls import order_calls
from amp_ir.memory.rematerialize import Rematerialization
from amp_ir.memory.rerun_cost import rerun_share

# Of a step's estimated time, about what running calls again may take.
_MOST_TIME = 0.035
# A share of time is worth so many times that share of the peak.
_LEAST_GAIN = 3.0
# Smaller steps are not short of memory, and planning them is not to take longer.
_LEAST_BYTES = 32 << 20


def rerun_cheaply(live: Liveness) -> Liveness:
    """Return the program with cheap calls run again instead of their results being held.

    Before:  a = gelu(x); ...; g = backward(a)
    After:   a = gelu(x); ...; a2 = gelu(x); g = backward(a2)      # a is not held in between

    Of the plans on the way to `_MOST_TIME`, the one is taken that saves the most beyond
    `_LEAST_GAIN` times what it costs: cheap calls come first, so each further one gains less.

    Requires: the calls are in their final order, and none is on a GPU.
    Ensures:  results are bit-identical. The estimated time grows by some `_MOST_TIME` at most, and
              the peak falls by `_LEAST_GAIN` times that share; else `live` is returned as it was.
    """
    if live.most < _LEAST_BYTES:
        return live
    other = Liveness(_copy(live.program), live.outputs)
    order_calls(other, together=True)
    again = Rematerialization(other)
    step_nbytes = sum(buffer.nbytes for buffer in live.program.inputs) + live.most
    best, most_gained, share = live.program, 0.0, 0.0
    while share < _MOST_TIME and again.lower_peak():
        share = rerun_share(other.program.calls)
        gained = (live.most - other.most) / step_nbytes - _LEAST_GAIN * share
        if gained > most_gained:
            best, most_gained = _copy(other.program), gained
    return live if best is live.program else Liveness(best, live.outputs)


def _copy(program: BufferizedStep) -> BufferizedStep:
    """Return the program with calls of its own; buffers are shared."""
    return attrs.evolve(program, calls=list(map(_copied, program.calls)))


def _copied(call: Call) -> Call:
    return attrs.evolve(call, arguments=list(call.arguments))
