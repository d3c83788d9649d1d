# SPDX-License-Identifier: Apache-2.0
"""Hold less of a step where that costs next to no time."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import attrs
from tvm import relax

from amp_ir.memory.buffers import Buffer, BufferizedStep, Call
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
    best: list[tuple[Call, list[Buffer | relax.Expr]]] = []
    most_gained = share = 0.0
    while share < _MOST_TIME and again.lower_peak():
        share = rerun_share(other.program.calls)
        gained = (live.most - other.most) / step_nbytes - _LEAST_GAIN * share
        if gained > most_gained:
            # A liveness changes the order of calls, and gives them other lists of arguments.
            best = [(call, call.arguments) for call in other.program.calls]
            most_gained = gained
    if not best:
        return live
    calls = [_with_arguments(call, arguments) for call, arguments in best]
    return Liveness(attrs.evolve(other.program, calls=calls), live.outputs)


def _copy(program: BufferizedStep) -> BufferizedStep:
    """Return the program with calls of its own; buffers are shared."""
    return attrs.evolve(
        program, calls=[_with_arguments(call, call.arguments) for call in program.calls]
    )


def _with_arguments(call: Call, arguments: Sequence[Buffer | relax.Expr]) -> Call:
    """Return a copy of a call, with what was read of it once, and arguments of its own."""
    own = copy.copy(call)
    own.arguments = list(arguments)
    return own
