# SPDX-License-Identifier: Apache-2.0
"""Find when a planned step writes its state, and what to keep to undo a failed step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amp_ir.ir.memory_plan import StateWrites
from amp_ir.ir.step_module import InputSpec, Role
from amp_ir.memory.buffers import Slot, StepSlots
from amp_ir.memory.write_planned import Destinations

# Tensors about the steps themselves are kept in any case: they are small, and nobody loads them.
_ALWAYS = (Role.SCALER_STATE, Role.RANDOM_STATE)
# One byte is kept where the step reads and writes so many, so that copying is not to be measured.
_MOVED_A_BYTE = 100
_LEAST, _MOST = 2**12, 2**20


def state_writes(
    program: StepSlots,
    destinations: Destinations,
    inputs: Sequence[InputSpec],
    *,
    keeps_state: bool,
) -> StateWrites:
    """Keep what is written first, if that is little; statistics of the forward pass are.

    Requires: destinations are chosen, and the order of the calls is final.
    Ensures:  without `keeps_state` nothing is kept.
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
    calls = len(program.steps) + len(destinations.first_copies) + len(destinations.last_copies)
    return StateWrites(tuple(kept), nbytes, calls)


def _moved(program: StepSlots) -> int:
    """Return the bytes that all calls read and write, each tensor counted at each."""
    return sum(slot.nbytes for step in program.steps for slot in (*step.reads, *step.results))


def _writes(program: StepSlots, destinations: Destinations) -> Iterator[tuple[int, int]]:
    """Return every write of an input, as (call, position of the input), in call order."""
    position_of = {slot.parameter: k for k, slot in enumerate(program.inputs)}
    written: list[list[Slot]] = [[target] for _, target in destinations.first_copies]
    written += [step.results for step in program.steps]
    written += [[target] for _, target in destinations.last_copies]
    for call, slots in enumerate(written):
        for slot in slots:
            if slot.parameter is not None and slot.parameter in position_of:
                yield call, position_of[slot.parameter]
