# SPDX-License-Identifier: Apache-2.0
"""Find when a planned step writes its state, and what to save to roll back a failed step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amp_ir.ir.memory_plan import StateWrites
from amp_ir.ir.step_module import InputSpec, Role
from amp_ir.memory.buffers import Buffer, BufferizedStep
from amp_ir.memory.write_planned import Destinations

# The state of scalers and random generators is always saved: it is small, and nobody loads it.
_ALWAYS = (Role.SCALER_STATE, Role.RANDOM_STATE)
# One byte is saved where the step reads and writes so many, so that the copy costs too little to
# measure.
_MOVED_A_BYTE = 100
_LEAST, _MOST = 2**12, 2**20


def state_writes(
    program: BufferizedStep,
    destinations: Destinations,
    inputs: Sequence[InputSpec],
    *,
    keeps_state: bool,
) -> StateWrites:
    """Choose the state to save: what is written first, as far as it is small.

    Requires: destinations are chosen, and the order of the calls is final.
    Ensures:  without `keeps_state` nothing is saved.
    """
    order = list(_writes(program, destinations))
    always = [k for _, k in order if inputs[k].role in _ALWAYS] if keeps_state else []
    kept = dict.fromkeys(always)
    nbytes = sum(program.inputs[k].nbytes for k in kept)
    room = max(_LEAST, min(_MOST, _moved(program) // _MOVED_A_BYTE)) if keeps_state else -1
    for call, position in order:
        # A tensor without elements has nothing to keep; its memory has one, which nobody reads.
        if position in kept or not program.inputs[position].nbytes:
            continue
        room -= program.inputs[position].nbytes
        if room < 0:
            return StateWrites(tuple(kept), nbytes, call)
        kept[position] = None
        nbytes += program.inputs[position].nbytes
    calls = len(program.calls) + len(destinations.first_copies) + len(destinations.last_copies)
    return StateWrites(tuple(kept), nbytes, calls)


def _moved(program: BufferizedStep) -> int:
    """Return the bytes that all calls read and write, each tensor counted at each."""
    return sum(buffer.nbytes for call in program.calls for buffer in (*call.reads, *call.results))


def _writes(program: BufferizedStep, destinations: Destinations) -> Iterator[tuple[int, int]]:
    """Return every write of an input, as (call, position of the input), in call order."""
    position_of = {buffer.parameter: k for k, buffer in enumerate(program.inputs)}
    written: list[list[Buffer]] = [[target] for _, target in destinations.first_copies]
    written += [call.results for call in program.calls]
    written += [[target] for _, target in destinations.last_copies]
    for call, buffers in enumerate(written):
        for buffer in buffers:
            if buffer.parameter is not None and buffer.parameter in position_of:
                yield call, position_of[buffer.parameter]
