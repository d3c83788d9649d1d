# SPDX-License-Identifier: Apache-2.0
"""Describe what each value and each call of a planned step is to the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from amp_ir.ir.collective_call import read_collective
from amp_ir.ir.external_call import SYMBOL as EXTERNAL
from amp_ir.ir.library_call import WRITTEN_OVER
from amp_ir.ir.location import Location, from_span
from amp_ir.ir.memory_plan import ROLE_OF_STATE, MemoryRole, PlannedCall, PlannedValue
from amp_ir.ir.step_module import InputSpec, Role
from amp_ir.ir.tensor_layout import dtype_nbytes
from amp_ir.ir.workspace import with_workspace
from amp_ir.memory.buffers import Buffer, BufferizedStep, Call
from amp_ir.memory.liveness import Liveness
from amp_ir.memory.write_planned import Destinations, copy_symbol

CASTS = {"cast", "astype"}
# Ops that read single elements of a table, wherever their ids point.
_GATHERS = {"embedding", "index", "take", "gather_elements"}
_TABLE_GRADIENT = "embedding_backward"


def planned_calls(program: BufferizedStep, destinations: Destinations) -> tuple[PlannedCall, ...]:
    """Return the calls in the order of the planned `main`, copies included."""
    calls = [_copy(*pair) for pair in destinations.first_copies]
    calls += [_call(call) for call in program.calls]
    calls += [_copy(*pair) for pair in destinations.last_copies]
    return tuple(calls)


def is_cast(call: Call) -> bool:
    """Return whether a kernel does nothing but change dtypes."""
    return call.function is not None and set(call.ops) <= CASTS


def _call(call: Call) -> PlannedCall:
    is_library = call.function is None
    is_external = call.symbol == EXTERNAL or bool(call.collective)
    return PlannedCall(
        name=call.ops[0] if is_external else call.symbol.removeprefix("amp_ir."),
        symbol=with_workspace(call.symbol) if call.workspace is not None else call.symbol,
        ops=call.ops,
        locations=call.locations,
        read_nbytes=sum(_read_nbytes(call)),
        written_nbytes=sum(_written_nbytes(call)),
        is_cast=not is_library and is_cast(call),
        is_rerun=call.is_rerun,
        result_count=len(call.results),
        sent_nbytes=_sent_nbytes(call),
        compute_dtype=(
            call.reads[0].dtype if is_library and call.reads and not is_external else "float32"
        ),
    )


def _sent_nbytes(call: Call) -> int:
    """Return the bytes of all tensors of a bucket, or of its range where ranks split it."""
    found = read_collective(call.expr) if call.collective else None
    return 0 if found is None else found.size * dtype_nbytes(found.dtype)


def _read_nbytes(call: Call) -> Iterator[int]:
    written = sum(_written_nbytes(call))
    gathers = bool(_GATHERS & set(call.ops)) or _adds_rows(call)
    for buffer in {id(buffer): buffer for buffer in call.reads}.values():
        # Of a table no more is read than what comes of it.
        yield min(buffer.nbytes, written) if gathers else buffer.nbytes


def _written_nbytes(call: Call) -> Iterator[int]:
    """Yield the bytes that are written of each result: of a table in place, the rows of items."""
    if not _adds_rows(call):
        yield from (buffer.nbytes for buffer in call.results)
        return
    table, grad = call.results[0], call.reads[0]  # the other results are lists of items
    rows = grad.nbytes // dtype_nbytes(grad.dtype) * dtype_nbytes(table.dtype)
    yield min(table.nbytes, rows)


def _adds_rows(call: Call) -> bool:
    """Return whether the call adds rows to a table that it may write over."""
    return call.ops == (_TABLE_GRADIENT,) and bool(call.inplace_pairs())


def _copy(source: Buffer, target: Buffer) -> PlannedCall:
    symbol = copy_symbol(target)
    return PlannedCall(symbol, symbol, ("copy",), (), source.nbytes, target.nbytes)


def planned_values(
    live: Liveness,
    destinations: Destinations,
    in_arena: Mapping[Buffer, tuple[int, int]],
    specs: Sequence[InputSpec],
    undo_nbytes: int,
) -> tuple[PlannedValue, ...]:
    """Return everything that is held: state, the batch and results, then the arena.

    `in_arena` has the first and last use of each value there, copies before the step left out.
    `undo_nbytes` is the size of the state that is saved to roll back a failed step.
    """
    program = live.program
    lead = len(destinations.first_copies)
    last = lead + len(program.calls) + len(destinations.last_copies) - 1
    values = [
        _resident(buffer, spec.role, last)
        for buffer, spec in zip(program.inputs, specs, strict=True)
    ]
    returned = [spec for spec in live.outputs if spec.updates is None]
    for buffer, result in zip(destinations.results, returned, strict=True):
        values.append(_resident(buffer, result.role, last))
    persistent = max((call.persistent_nbytes for call in program.calls), default=0)
    if persistent:
        role, name = MemoryRole.WORKSPACE, "gemm workspace"
        values.append(PlannedValue(name, "", Location(), role, "uint8", persistent, 0, last))
    if undo_nbytes:
        other = MemoryRole.OTHER_STATE
        name = "state before the step"
        values.append(PlannedValue(name, "", Location(), other, "uint8", undo_nbytes, 0, last))
    roles = _Roles(live)
    taken_at = {id(b.over): first for b, (first, _) in in_arena.items() if b.over is not None}
    for buffer, (first, end) in in_arena.items():
        end = taken_at[id(buffer)] - 1 if id(buffer) in taken_at else end
        is_kept = end >= len(program.calls)
        values.append(
            PlannedValue(
                name=buffer.name,
                op=buffer.op,
                location=from_span(buffer.span),
                role=roles.of(buffer),
                dtype=buffer.dtype,
                nbytes=buffer.nbytes,
                first_use=first + (0 if buffer.op == "copy" else lead),
                last_use=last if is_kept else end + lead,
                offset_bytes=buffer.offset_bytes,
            )
        )
    return tuple(values)


def _resident(buffer: Buffer, role: Role, last: int) -> PlannedValue:
    name = buffer.name.removeprefix("result.")
    held_as = ROLE_OF_STATE.get(role, MemoryRole.OTHER_STATE)
    return PlannedValue(name, "", Location(), held_as, buffer.dtype, buffer.nbytes, 0, last)


def _phases_of_read(call: Call) -> set[str]:
    """Return the phases in which a call reads; a matmul's operands are not read by the update."""
    makes_gradient = call.symbol in WRITTEN_OVER and "backward" in call.phases
    return {"backward"} if makes_gradient else call.phases


class _Roles:
    """The rules that give a value in the arena its role, by the phases that write and read it."""

    def __init__(self, live: Liveness) -> None:
        self.live = live
        inputs = live.program.inputs
        self.parameters = {id(one) for one in inputs if one.op == Role.PARAMETER.value}

    def of(self, buffer: Buffer) -> MemoryRole:
        """Return why the buffer is held."""
        call = self.live.writer.get(id(buffer))
        if call is None:
            return MemoryRole.TEMPORARY if buffer.op == "copy" else MemoryRole.WORKSPACE
        if call.is_rerun:
            return MemoryRole.TEMPORARY
        if self._is_low_copy(call, buffer):
            return MemoryRole.LOW_COPY
        if buffer.op == "pack":
            return MemoryRole.WORKSPACE
        if buffer.root.part_of is not None and self._is_gradient(call):
            return MemoryRole.GRADIENT
        readers = set().union(*map(_phases_of_read, self.live.readers.get(id(buffer), ())))
        if "backward" in call.phases and "optimizer" in readers:
            return MemoryRole.GRADIENT
        if call.phases == {"forward"} and "backward" in readers:
            return MemoryRole.SAVED_ACTIVATION
        return MemoryRole.TEMPORARY

    def _is_gradient(self, call: Call) -> bool:
        """Return whether a value in a bucket is a gradient, and no buffer of rank 0."""
        return "backward" in call.phases

    def _is_low_copy(self, call: Call, buffer: Buffer) -> bool:
        """Test for a parameter in a smaller dtype, a kernel's only result of its size."""
        if buffer.op not in CASTS:
            return False
        sizes = [(one.size, one.nbytes) for one in call.reads if id(one) in self.parameters]
        return any(size == buffer.size and nbytes > buffer.nbytes for size, nbytes in sizes)
