# SPDX-License-Identifier: Apache-2.0
"""About how long a call takes, to compare what could be computed again; no clock is read."""

from __future__ import annotations

from amp_ir.passes.call_cost import library_flop
from amp_ir.passes.step_slots import Step

# Rates of two cores of a present CPU. Only their ratio matters: what a matmul costs beside a copy.
_GFLOP_PER_SECOND = {"float32": 400.0, "bfloat16": 800.0, "float16": 400.0}
_GIGABYTES_PER_SECOND = 30.0
_CALL_MILLISECONDS = 0.002


def rerun_milliseconds(step: Step) -> float:
    """The larger of arithmetic (of library calls) and memory traffic, and the call itself."""
    nbytes = sum(slot.nbytes for slot in {id(s): s for s in step.reads}.values())
    nbytes += sum(slot.nbytes for slot in step.results)
    spent = nbytes / _GIGABYTES_PER_SECOND
    if step.function is None:
        rate = _GFLOP_PER_SECOND.get(step.reads[0].dtype, _GFLOP_PER_SECOND["float32"])
        flop = library_flop(step.symbol, list(step.call.args[1].fields))
        spent = max(spent, flop / rate)
    return spent / 1e6 + _CALL_MILLISECONDS
