# SPDX-License-Identifier: Apache-2.0
"""Describe what each value and each call of a planned step is to the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amp_ir.ir.library_call import WRITTEN_OVER
from amp_ir.ir.location import Location, from_span
from amp_ir.ir.memory_plan import ROLE_OF_STATE, MemoryRole, PlannedCall, PlannedValue
from amp_ir.ir.step_module import InputSpec, OutputSpec, Role
from amp_ir.ir.workspace import with_scratch
from amp_ir.memory.buffers import Slot, Step, StepSlots
from amp_ir.memory.write_planned import Destinations, copy_symbol

CASTS = {"cast", "astype"}
# Ops that read single elements of a table, wherever their ids point.
_GATHERS = {"embedding", "index", "take", "gather_elements"}


def planned_calls(program: StepSlots, destinations: Destinations) -> tuple[PlannedCall, ...]:
    """Return the calls in the order of the planned `main`, copies included."""
    calls = [_copy(*pair) for pair in destinations.first_copies]
    calls += [_call(step) for step in program.steps]
    calls += [_copy(*pair) for pair in destinations.last_copies]
    return tuple(calls)


def is_cast(step: Step) -> bool:
    """Return whether a kernel does nothing but change dtypes."""
    return step.function is not None and set(step.ops) <= CASTS


def _call(step: Step) -> PlannedCall:
    is_library = step.function is None
    return PlannedCall(
        name=step.symbol.removeprefix("amp_ir."),
        symbol=with_scratch(step.symbol) if step.scratch is not None else step.symbol,
        ops=step.ops,
        locations=step.locations,
        read_nbytes=sum(_read_nbytes(step)),
        written_nbytes=sum(slot.nbytes for slot in step.results),
        is_cast=not is_library and is_cast(step),
        is_rerun=step.is_rerun,
        result_count=len(step.results),
        compute_dtype=step.reads[0].dtype if is_library and step.reads else "float32",
    )


def _read_nbytes(step: Step) -> Iterator[int]:
    written = sum(slot.nbytes for slot in step.results)
    gathers = bool(_GATHERS & set(step.ops))
    for slot in {id(slot): slot for slot in step.reads}.values():
        # Of a table no more is read than what comes of it.
        yield min(slot.nbytes, written) if gathers else slot.nbytes


def _copy(source: Slot, target: Slot) -> PlannedCall:
    symbol = copy_symbol(target)
    return PlannedCall(symbol, symbol, ("copy",), (), source.nbytes, target.nbytes)


def planned_values(
    program: StepSlots,
    outputs: Sequence[OutputSpec],
    destinations: Destinations,
    in_arena: Sequence[Slot],
    specs: Sequence[InputSpec],
    undo_nbytes: int,
) -> tuple[PlannedValue, ...]:
    """Return everything that is held: state, the batch and results, then the arena.

    `undo_nbytes` is what is kept of the state to undo a failed step.
    """
    lead = len(destinations.first_copies)
    last = lead + len(program.steps) + len(destinations.last_copies) - 1
    values = [
        _resident(slot, spec.role, last) for slot, spec in zip(program.inputs, specs, strict=True)
    ]
    returned = [spec for spec in outputs if spec.updates is None]
    for slot, result in zip(destinations.results, returned, strict=True):
        values.append(_resident(slot, result.role, last))
    kept = max((step.kept_nbytes for step in program.steps), default=0)
    if kept:
        workspace = MemoryRole.WORKSPACE
        values.append(PlannedValue("gemm's own", "", Location(), workspace, "uint8", kept, 0, last))
    if undo_nbytes:
        other = MemoryRole.OTHER_STATE
        name = "state before the step"
        values.append(PlannedValue(name, "", Location(), other, "uint8", undo_nbytes, 0, last))
    roles = _Roles(program)
    taken_at = {id(slot.over): slot.first_use for slot in in_arena if slot.over is not None}
    for slot in in_arena:
        end = taken_at[id(slot)] - 1 if id(slot) in taken_at else slot.last_use
        is_kept = end >= len(program.steps)
        values.append(
            PlannedValue(
                name=slot.name,
                op=slot.op,
                location=from_span(slot.span),
                role=roles.of(slot),
                dtype=slot.dtype,
                nbytes=slot.nbytes,
                first_use=slot.first_use + (0 if slot.op == "copy" else lead),
                last_use=last if is_kept else end + lead,
                offset_bytes=slot.offset_bytes,
            )
        )
    return tuple(values)


def _resident(slot: Slot, role: Role, last: int) -> PlannedValue:
    name = slot.name.removeprefix("result.")
    held_as = ROLE_OF_STATE.get(role, MemoryRole.OTHER_STATE)
    return PlannedValue(name, "", Location(), held_as, slot.dtype, slot.nbytes, 0, last)


def _phases_of_read(step: Step) -> set[str]:
    """Return the phases in which a call reads; a matmul's operands are not read by the update."""
    makes_gradient = step.symbol in WRITTEN_OVER and "backward" in step.phases
    return {"backward"} if makes_gradient else step.phases


class _Roles:
    """The role of a value in the arena: by the phases that write and read it."""

    def __init__(self, program: StepSlots) -> None:
        self.written_by: dict[int, Step] = {}
        self.read_in: dict[int, set[str]] = {}
        self.parameters = {id(slot) for slot in program.inputs if slot.op == Role.PARAMETER.value}
        for step in program.steps:
            self.written_by |= {id(slot): step for slot in step.results}
            for slot in step.reads:
                self.read_in.setdefault(id(slot), set()).update(_phases_of_read(step))

    def of(self, slot: Slot) -> MemoryRole:
        """Return why the buffer is held."""
        step = self.written_by.get(id(slot))
        if step is None:
            return MemoryRole.TEMPORARY if slot.op == "copy" else MemoryRole.WORKSPACE
        if step.is_rerun:
            return MemoryRole.TEMPORARY
        if self._is_low_copy(step, slot):
            return MemoryRole.LOW_COPY
        if slot.op == "pack":
            return MemoryRole.WORKSPACE
        readers = self.read_in.get(id(slot), set())
        if "backward" in step.phases and "optimizer" in readers:
            return MemoryRole.GRADIENT
        if step.phases == {"forward"} and "backward" in readers:
            return MemoryRole.SAVED_ACTIVATION
        return MemoryRole.TEMPORARY

    def _is_low_copy(self, step: Step, slot: Slot) -> bool:
        """Test for a parameter in a smaller dtype, a kernel's only result of its size."""
        if slot.op not in CASTS:
            return False
        sizes = [(one.size, one.nbytes) for one in step.reads if id(one) in self.parameters]
        return any(size == slot.size and nbytes > slot.nbytes for size, nbytes in sizes)
