# SPDX-License-Identifier: Apache-2.0
"""Estimated time of a planned step: the arithmetic and bytes of its calls on a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs
import tvm
from tvm import relax

from amp_ir.api.compile import lower
from amp_ir.api.library_times import library_milliseconds
from amp_ir.host.machine_model import MachineModel
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.library_call import (
    LibraryAttention,
    LibraryCall,
    LibraryConvolution,
    LibraryMatmul,
    LibraryRecurrence,
    read,
    written_by,
)
from amp_ir.ir.loop_call import planned_loop
from amp_ir.ir.memory_plan import PlannedCall
from amp_ir.ir.step_module import StepModule
from amp_ir.ir.target import parse_target
from amp_ir.memory.call_cost import flop_of_calls


@attrs.frozen
class EstimatedCall:
    """One kernel or library call: its arithmetic, bytes and time.

    Attributes:
        call: what is planned.
        flop: floating-point operations.
        extents: rows, columns and terms of a matmul, or channels of a convolution; () for others.
        pieces: the equal matmuls that a library call consists of.
        arithmetic_milliseconds: of its arithmetic; of a library call that was timed, of all of it.
        memory_milliseconds: of its bytes; the longer of the two counts.
        call_milliseconds: what it takes beside its work.
    """

    call: PlannedCall
    flop: int
    extents: tuple[int, ...]
    pieces: int
    arithmetic_milliseconds: float
    memory_milliseconds: float
    call_milliseconds: float

    @property
    def milliseconds(self) -> float:
        """Return the time of the call."""
        work = max(self.arithmetic_milliseconds, self.memory_milliseconds)
        return work + self.call_milliseconds

    @property
    def nbytes(self) -> int:
        """Return the bytes that it reads and writes."""
        return self.call.read_nbytes + self.call.written_nbytes


@attrs.frozen
class StepEstimate:
    """The calls of a planned step; nothing was compiled or run."""

    calls: tuple[EstimatedCall, ...] = attrs.field(repr=False)
    peak_nbytes: int

    @property
    def milliseconds(self) -> float:
        """Return the time of all calls."""
        return sum(one.milliseconds for one in self.calls)

    def milliseconds_of(self) -> dict[tuple[str, str, str], float]:
        """Return the time of the calls that compute an op, by its name, module and phase."""
        found: dict[tuple[str, str, str], float] = {}
        for one in self.calls:
            for place in one.call.locations:
                for op in one.call.ops:
                    key = op, place.module, place.phase
                    found[key] = found.get(key, 0.0) + one.milliseconds
        return found


def estimate_step(mod: StepModule, machine: MachineModel) -> StepEstimate:
    """Plan a step for a machine's target and estimate its time there."""
    planned = lower(mod, target=parse_target(machine.target))
    libraries = _libraries(planned.ir)
    calls = zip(planned.plan.calls, flop_of_calls(planned), libraries, strict=True)
    found = tuple(_estimated(*one, machine) for one in calls)
    return StepEstimate(found, planned.plan.peak_bytes)


def _libraries(ir: tvm.IRModule) -> Iterator[tuple[LibraryCall | None, Sequence[relax.Expr]]]:
    """Yield the library call of each call of the plan, in order, with the buffers that it fills.

    None for kernels and loops.
    """
    for value in Dataflow(ir).values.values():
        if planned_loop(ir, value) is not None or isinstance(value.op, tvm.ir.GlobalVar):
            yield None, ()
        elif str(value.op.global_symbol) != "amp_ir.view":
            yield read(value), written_by(value)[1]


def _estimated(
    call: PlannedCall,
    flop: int,
    library_and_buffers: tuple[LibraryCall | None, Sequence[relax.Expr]],
    machine: MachineModel,
) -> EstimatedCall:
    library, results = library_and_buffers
    nbytes = call.read_nbytes + call.written_nbytes
    extents, pieces = _extents(library), _pieces(library)
    arithmetic, memory = machine.work_milliseconds(
        flop, nbytes, call.compute_dtype, is_library=library is not None, pieces=pieces
    )
    own = machine.call_microseconds / 1e3
    if machine.times_library_calls and library is not None:
        # All of the call, its bytes too.
        arithmetic = max(library_milliseconds(library, list(results)) - own, 0.0)
        memory = min(memory, arithmetic)
    return EstimatedCall(call, flop, extents, pieces, arithmetic, memory, own)


def _extents(call: LibraryCall | None) -> tuple[int, ...]:
    if isinstance(call, LibraryMatmul):
        return (*call.out.shape[-2:], call.a.shape[-1])
    if isinstance(call, LibraryConvolution):
        weight = call.w.shape if call.w is not None else call.out.shape
        return tuple(weight[:2])
    return ()


def _pieces(call: LibraryCall | None) -> int:
    if isinstance(call, LibraryMatmul):
        return max(1, math.prod(call.out.shape[:-2]))
    if isinstance(call, LibraryRecurrence):
        return max(1, int(call.dims[0]))
    if isinstance(call, LibraryAttention):
        return max(1, math.prod(call.q.shape[:-2]))
    return 1
