# SPDX-License-Identifier: Apache-2.0
"""Give every intermediate value its bytes in one arena, and every result its destination."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import attrs
import tvm
import tvm_ffi

from amp_ir.errors import BudgetError
from amp_ir.host import native
from amp_ir.ir.memory_plan import Interval, MemoryPlan, PlannedStep, Recomputation
from amp_ir.ir.step_module import InputSpec, OutputSpec
from amp_ir.ir.tensor_layout import ALIGNMENT_BYTES, dtype_nbytes
from amp_ir.memory.bucket_ranges import BucketRange, find_buckets, spans_of_buckets
from amp_ir.memory.buffers import Buffer, bufferize, parameter_buffer
from amp_ir.memory.fuse_input_kernels import KernelMerger, fuse_input_kernels
from amp_ir.memory.liveness import Liveness
from amp_ir.memory.order_calls import order_calls
from amp_ir.memory.order_collectives import order_collectives
from amp_ir.memory.rematerialize import Rematerialization
from amp_ir.memory.rerun_cheaply import rerun_cheaply
from amp_ir.memory.rerun_cost import rerun_share
from amp_ir.memory.roles import planned_calls, planned_values
from amp_ir.memory.state_writes import state_writes
from amp_ir.memory.write_planned import CopyKernel, Destinations, write_planned

# Where values are small beside the alignment of their places, running calls again can go on
# without end: each run lowers one call and adds another.
_MOST_ROUNDS_IN_VAIN = 40


def plan_memory(
    ir: tvm.IRModule,
    inputs: tuple[InputSpec, ...],
    outputs: tuple[OutputSpec, ...],
    *,
    copy_kernel: CopyKernel,
    merger: KernelMerger | None = None,
    memory_budget: int | None = None,
    keeps_state: bool = True,
    reruns_cheaply: bool = True,
    bodies: Mapping[str, PlannedStep] | None = None,
) -> PlannedStep:
    """Fix the address of every value and pass it there by destination.

    Before:  y = call_tir(kernel_0, (x, p)); return (y,)         # y updates input p
    After:   kernel_0(x, p, p)                                   # written over p

    Requires: the loops stage has run (only call_tir, call_dps_packed, tuples, result reshapes);
              `copy_kernel` writes kernels for the same device, and so does `merger`: where there is
              one, calls that read only inputs are fused, unless `memory_budget` is given:
              calls that may run twice are not merged, so that with `reruns_cheaply` there is
              none; `bodies` has the planned body of each loop.
    Ensures:  values alive at the same time never share a byte, except an output that a kernel may
              write over an input it reads for the last time; a state input is overwritten only
              after its last reader; one arena holds everything else, oneDNN's workspace
              included; with `memory_budget`, all bytes of the step are at most that many; with
              `keeps_state`, `plan.writes` says which state is saved before the step.
    Errors:   BudgetError where the budget cannot be held.
    Source:   offsets by src/passes/memory_plan.cc.
    """
    program = bufferize(ir, inputs)
    ir, buckets = find_buckets(ir, program, copy_kernel)
    live = Liveness(program, outputs)
    order_collectives(live)
    order_calls(live)
    if memory_budget is None and merger is not None:
        ir = fuse_input_kernels(ir, live, merger)
    most = live.most
    if memory_budget is None and reruns_cheaply:
        live = rerun_cheaply(live)
        program = live.program
    new_planner = functools.partial(_Planner, live, inputs, buckets, keeps_state=keeps_state)
    planner = new_planner()
    plan = planner.run()
    if memory_budget is not None and plan.peak_bytes > memory_budget:
        planner, plan = _plan_within(live, new_planner, plan, memory_budget)
    plan = attrs.evolve(plan, recomputed=_recomputed(live, most))
    planned = write_planned(
        ir, program, planner.destinations, plan.arena_bytes, copy_kernel, bodies
    )
    return PlannedStep(planned, plan)


def _plan_within(
    live: Liveness,
    new_planner: Callable[[], _Planner],
    plan: MemoryPlan,
    budget: int,
) -> tuple[_Planner, MemoryPlan]:
    """Return the plan after moving and rerunning calls, until it needs at most `budget` bytes.

    What is alive at once may fit while its placement has gaps: then the target is lowered by them;
    and where the highest call cannot be lowered, the others are, which leaves fewer gaps.
    """
    outside = plan.peak_bytes - plan.arena_bytes
    target = budget - outside
    least = plan
    _forget_plan(live)
    order_calls(live, together=True)
    again = Rematerialization(live)
    rounds_in_vain = 0
    while rounds_in_vain < _MOST_ROUNDS_IN_VAIN:
        # What a plan put outside of the arena may have to be in it in a later order.
        _forget_plan(live)
        is_reached = again.reach(target)
        planner = new_planner()
        plan = planner.run()
        if plan.peak_bytes <= budget:
            return planner, plan
        rounds_in_vain = 0 if plan.peak_bytes < least.peak_bytes else rounds_in_vain + 1
        least = min(least, plan, key=lambda one: one.peak_bytes)
        if is_reached:
            target = min(target - (plan.peak_bytes - budget), plan.lower_bound_bytes - 1)
        elif plan.lower_bound_bytes + outside > budget or not again.lower():
            break
    raise BudgetError(_budget_message(least, budget), least.peak_bytes)


def _recomputed(live: Liveness, most: int) -> Recomputation | None:
    """Return what second runs of calls save and cost; `most` bytes were alive without them."""
    calls = live.program.calls
    if not any(call.is_rerun for call in calls):
        return None
    return Recomputation(most - live.most, rerun_share(calls))


def _forget_plan(live: Liveness) -> None:
    """Find the destinations of the present order, whatever an earlier plan decided."""
    for buffer in (one for call in live.program.calls for one in call.results):
        buffer.parameter = buffer.over = None
    live.find_destinations()


def _budget_message(least: MemoryPlan, budget: int) -> str:
    live = least.live_bytes
    at = max(range(len(live)), key=live.__getitem__, default=0)
    call = least.calls[at]
    held = sorted(
        (v for v in least.values if v.offset_bytes is not None and v.first_use <= at <= v.last_use),
        key=lambda value: -value.nbytes,
    )
    largest = ", ".join(f"{v.name} ({v.nbytes} bytes, {v.location})" for v in held[:3])
    return (
        f"memory_budget={budget} bytes cannot be held: state, batch and results take "
        f"{least.peak_bytes - least.arena_bytes} bytes, and the least that was found for the rest "
        f"is {least.arena_bytes}, at call {at} ({', '.join(call.ops)}), which needs {largest}. "
        f"Pass memory_budget={least.peak_bytes} or more, or make the batch smaller"
    )


class _Planner:
    def __init__(
        self,
        live: Liveness,
        inputs: tuple[InputSpec, ...],
        buckets: Sequence[BucketRange] = (),
        *,
        keeps_state: bool = True,
    ) -> None:
        self.buckets = buckets
        self.live = live
        self.program = live.program
        self.keeps_state = keeps_state
        self.inputs = inputs
        self.outputs = live.outputs
        self.calls = live.program.calls
        self.destinations = Destinations()
        self.old_values: list[Buffer] = []

    def run(self) -> MemoryPlan:
        _forget_plan(self.live)
        self._choose_destinations()
        self._reuse_inputs()
        return self._place()

    def _reuse_inputs(self) -> None:
        """Let a kernel write a result over an argument that dies there."""
        for call in self.calls:
            for new, old in self.live.taken_over(call):
                # What is sent has its place in its bucket.
                if new.part_of is None:
                    new.over = old

    def _choose_destinations(self) -> None:
        """Write each output where it belongs, at once where that is safe, else by a copy."""
        overwrites = self.live.overwrites
        targets = []
        for index, (spec, buffer) in enumerate(
            zip(self.outputs, self.program.results, strict=True)
        ):
            if spec.updates is None:
                target = parameter_buffer(f"result.{spec.name}", spec)
                self.destinations.results.append(target)
            else:
                target = self.program.inputs[spec.updates]
            targets.append(target)
            if overwrites.output_of.get(id(buffer)) != index:
                self._send(buffer, target)
        for buffer in overwrites.buffers:
            buffer.parameter = targets[overwrites.output_of[id(buffer)]].parameter

    def _send(self, buffer: Buffer, target: Buffer) -> None:
        """Copy an output to where it belongs, before the step or after it."""
        if buffer is target:
            return
        if any(buffer is old for old in self.program.inputs):
            self._send_old_value(buffer, target)
        else:
            self.destinations.last_copies.append((buffer, target))

    def _send_old_value(self, source: Buffer, target: Buffer) -> None:
        """Send what an input holds before the step, which the step may overwrite."""
        if any(target is result for result in self.destinations.results):
            self.destinations.first_copies.append((source, target))
            return
        # Another input takes it: its own old value may be needed until the end of the step.
        kept = Buffer(source.dtype, source.size, f"old_{source.name}", "copy")
        self.old_values.append(kept)
        self.destinations.first_copies.append((source, kept))
        self.destinations.last_copies.append((kept, target))

    def _place(self) -> MemoryPlan:
        spans: dict[Buffer, tuple[int, int]] = {}
        for buffer in (one for call in self.calls for one in call.results if one.is_in_arena):
            spans[buffer] = self.live.written(buffer), self.live.ends(buffer)
        for position, call in enumerate(self.calls):
            if call.workspace is not None:
                spans[call.workspace] = position, position
        spans |= {buffer: (0, len(self.calls)) for buffer in self.old_values}
        # A chain of values that take over each other's bytes is one live interval of the first.
        ends = {buffer: last for buffer, (_, last) in spans.items()}
        for buffer, (_, last) in spans.items():
            ends[buffer.root] = max(ends[buffer.root], last)
        buffers = [one for one in spans if one.over is None and one.part_of is None]
        ranges = spans_of_buckets(
            self.buckets, ends, {one: first for one, (first, _) in spans.items()}
        )
        buffers += ranges
        ends |= {one: last for one, (_, last) in ranges.items()}
        spans |= ranges
        shapes = [
            tvm_ffi.Shape(tuple(one.nbytes for one in buffers)),
            tvm_ffi.Shape(tuple(spans[one][0] for one in buffers)),
            tvm_ffi.Shape(tuple(ends[one] for one in buffers)),
        ]
        planned = list(native.function("amp_ir.plan_memory")(*shapes, ALIGNMENT_BYTES))
        peak, lower_bound, offsets = planned[0], planned[1], planned[2:]
        for buffer, offset in zip(buffers, offsets, strict=True):
            buffer.offset_bytes = int(offset)
        for buffer in spans:
            root = buffer.root
            inside = root if root.part_of is None else root.part_of
            buffer.offset_bytes = inside.offset_bytes + root.part_offset
        intervals = tuple(
            Interval(s.name, s.nbytes, spans[s][0], ends[s], s.offset_bytes, s.dtype, s.span)
            for s in buffers
        )
        writes = state_writes(
            self.program, self.destinations, self.inputs, keeps_state=self.keeps_state
        )
        return MemoryPlan(
            arena_bytes=int(peak),
            lower_bound_bytes=int(lower_bound),
            intervals=intervals,
            state_bytes=sum(_nbytes(spec) for spec in self.inputs if spec.is_state),
            batch_bytes=sum(_nbytes(spec) for spec in self.inputs if not spec.is_state),
            library_bytes=max((call.persistent_nbytes for call in self.calls), default=0),
            result_bytes=sum(_nbytes(spec) for spec in self.outputs if spec.updates is None),
            values=planned_values(
                self.live,
                self.destinations,
                {one: span for one, span in spans.items() if one not in ranges},
                self.inputs,
                writes.kept_nbytes,
            ),
            calls=planned_calls(self.program, self.destinations),
            writes=writes,
        )


def _nbytes(spec: InputSpec | OutputSpec) -> int:
    return math.prod(spec.shape) * dtype_nbytes(spec.dtype)
