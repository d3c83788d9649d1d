# SPDX-License-Identifier: Apache-2.0
"""Estimate the time of a call, to compare what could be computed again; reads no clock."""

from __future__ import annotations

from collections.abc import Iterable

from amp_ir.ir.library_call import read
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.memory.buffers import Call
from amp_ir.memory.call_cost import flop_of_calls, library_flop

# Rates of two cores of a present CPU. Only their ratio matters: what a matmul costs beside a copy.
_GFLOP_PER_SECOND = {"float32": 400.0, "bfloat16": 800.0, "float16": 400.0}
_GIGABYTES_PER_SECOND = 30.0
_CALL_MILLISECONDS = 0.002


def rerun_milliseconds(call: Call) -> float:
    """Return the larger of (library) arithmetic and memory traffic, plus the call itself."""
    if call.rerun_milliseconds is None:
        call.rerun_milliseconds = _estimate(call)
    return call.rerun_milliseconds


def rerun_share(calls: Iterable[Call]) -> float:
    """Return the estimated time of the calls that run again over that of all the others."""
    spent = {False: 0.0, True: 0.0}
    for call in calls:
        spent[call.is_rerun] += rerun_milliseconds(call)
    return spent[True] / max(spent[False], _CALL_MILLISECONDS)


def _estimate(call: Call) -> float:
    nbytes = sum(buffer.nbytes for buffer in {id(s): s for s in call.reads}.values())
    nbytes += sum(buffer.nbytes for buffer in call.results)
    flop = 0
    if call.function is None:
        flop = library_flop(read(call.expr))
    return _milliseconds(nbytes, flop, call.reads[0].dtype if flop else "float32")


def step_milliseconds(step: PlannedStep) -> float:
    """Estimate the time of all calls of a step, to compare plans of one step."""
    return sum(
        _milliseconds(call.read_nbytes + call.written_nbytes, flop, call.compute_dtype)
        for call, flop in zip(step.plan.calls, flop_of_calls(step), strict=True)
    )


def _milliseconds(nbytes: int, flop: int, dtype: str) -> float:
    rate = _GFLOP_PER_SECOND.get(dtype, _GFLOP_PER_SECOND["float32"])
    return max(nbytes / _GIGABYTES_PER_SECOND, flop / rate) / 1e6 + _CALL_MILLISECONDS
