# SPDX-License-Identifier: Apache-2.0
"""Compute a loss in chunks of rows, so that its largest tensor is never held as a whole."""

from __future__ import annotations

import math
from typing import Protocol

import attrs
import tvm
from tvm import relax

from amp_ir.dialect.losses import LOSSES
from amp_ir.dialect.registry import call_op, options_of
from amp_ir.errors import BudgetError
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.location import from_span
from amp_ir.ir.memory_plan import ChunkedLoss, PlannedStep
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.tensor_layout import dtype_nbytes
from amp_ir.memory.chunking.chunk import Bindings, Chunk
from amp_ir.memory.chunking.row_region import NLL_LOSS, RowRegion, find_region
from amp_ir.memory.rerun_cost import step_milliseconds

_LOSSES = tuple(f"amp_ir.{name}" for name in LOSSES)
# Of the elements of the largest matmul. That may be the gradient of a head's weight, which is
# larger than the head's scores where the batch has fewer rows than the weight is wide.
_LEAST_SHARE = 0.25


# Each doubles the calls of the head and halves what is held of its scores.
CHUNK_COUNTS = (2, 4, 8, 16)
# Smaller matmuls are slower, which rerun_cost.py does not see: where it saw 2 % less time for
# twice as many chunks (bert1 in bfloat16), none was measured.
_WORTH = 0.95


class Plan(Protocol):
    """A function that plans a step; `in_chunks` says that its matmuls may be parts of one."""

    def __call__(self, ir: tvm.IRModule, *, in_chunks: bool) -> PlannedStep:
        """Plan `ir` within the budget, or raise BudgetError."""


def plan_in_chunks(ir: tvm.IRModule, plan: Plan) -> PlannedStep:
    """Return the plan of the step; where it exceeds its budget, of the step in chunks.

    A step that fits is left unchanged. Of the numbers of chunks that fit, the fewest are taken, or
    twice as many where that saves enough of the calls that fewer chunks run again.

    Raises:
        BudgetError: that of the attempt which needs the least.
    """
    try:
        return plan(ir, in_chunks=False)
    except BudgetError as error:
        exceeded = error
    best: PlannedStep | None = None
    tried: tuple[ChunkedLoss, ...] = ()
    for chunks in CHUNK_COUNTS:
        chunked, losses = chunk_losses(ir, chunks)
        if losses == tried:  # none, or no more rows to tell apart
            break
        tried = losses
        try:
            planned = plan(chunked, in_chunks=True)
        except BudgetError as error:
            exceeded = min(exceeded, error, key=lambda one: one.least_bytes)
            continue
        planned = attrs.evolve(planned, plan=attrs.evolve(planned.plan, chunked_losses=losses))
        if best is not None and step_milliseconds(planned) > _WORTH * step_milliseconds(best):
            break
        best = planned
        if not any(call.is_rerun for call in planned.plan.calls):
            break
    if best is None:
        raise exceeded
    return best


def chunk_losses(ir: tvm.IRModule, chunks: int) -> tuple[tvm.IRModule, tuple[ChunkedLoss, ...]]:
    """Compute the largest matmul of the step, and all that is as large, in chunks of rows.

    Before:  s = matmul(x, w); y = log_softmax(s); loss, n = nll_loss(y, t)
             g = log_softmax_backward(nll_loss_backward(1, t, n), y)
             dx = matmul(g, w^T); dw = matmul(x^T, g)
    After:   n = sum(t != -100)
             s0 = matmul(x[:k], w); ...; dx0 = matmul(g0, w^T); dw0 = matmul(x[:k]^T, g0)
             s1 = matmul(x[k:], w); ...; dx1 = matmul(g1, w^T); dw1 = matmul(x[k:]^T, g1)
             loss = (l0 + l1) / n; dx = concat([dx0, dx1]); dw = dw0 + dw1

    row_rules.py says which ops can be computed in chunks, row_region.py what goes into them.
    Matmuls of other weights that are about as large are chunked too, each with its own chunks.

    Requires: one function `main`, one dataflow block, static shapes; no library calls yet.
    Ensures:  rows are as before, bit-identical where a matmul's are; sums over rows (gradients of
              weights and biases, losses) are added up chunk by chunk in float32 or wider, and
              rounded once; results keep their variables; a step without such a matmul is returned
              unchanged, with no chunked loss.
    Source:   as the fused linear cross entropy of Hsu et al. 2024, "Liger Kernel", section 3.2.
    """
    losses: list[ChunkedLoss] = []
    for root in _large_matmuls(ir):
        flow = Dataflow(ir)
        value = flow.values.get(root)
        region = None if value is None else find_region(flow.bindings, flow.result, root)
        if region is not None and value is not None:
            count = min(chunks, region.units)
            ir = _Writer(flow, region, count).run()
            nbytes = _elements(root) * dtype_nbytes(str(root.ty.dtype))
            losses.append(ChunkedLoss(from_span(value.span), count, nbytes))
    return ir, tuple(losses)


def _large_matmuls(ir: tvm.IRModule) -> list[relax.Var]:
    """Return the largest results of matmuls, in order of their elements."""
    found = Dataflow(ir).calls("relax.matmul")
    least = _LEAST_SHARE * max(map(_elements, found), default=0)
    return sorted((one for one in found if _elements(one) >= least), key=_elements, reverse=True)


def _elements(variable: relax.Expr) -> int:
    return math.prod(shape_of(variable))


class _Writer:
    """Write the step with one region in chunks."""

    def __init__(self, flow: Dataflow, region: RowRegion, chunks: int) -> None:
        self.flow = flow
        self.region = region
        self.chunks = chunks
        self.values = flow.values
        self.out = Bindings()
        self.parts: dict[relax.Var, list[relax.Var]] = {one: [] for one in region.live_outs}

    def run(self) -> tvm.IRModule:
        region, out = self.region, self.out
        last = max(k for k, one in enumerate(self.flow.bindings) if one.var in region.axis)
        late: list[relax.VarBinding] = []
        for position, binding in enumerate(self.flow.bindings):
            if binding.var in region.totals:
                loss = self.values[region.totals[binding.var]]
                out.bind(binding.var, self._total_weight(loss), loss)
            elif binding.var in region.late:
                late.append(binding)
            elif binding.var not in region.axis:
                out.all.append(binding)
            if position == last:
                self._write_chunks()
            if position >= last:
                out.all += late
                late.clear()
        return self.flow.finish(out.all)

    def _total_weight(self, loss: relax.Call) -> relax.Call:
        """Return the total weight of an nll loss's targets: the number of those not ignored."""
        options, target, dtype = options_of(loss), loss.args[1], str(loss.ty.fields[1].dtype)
        index = str(target.ty.dtype)
        ignored = relax.const(options["ignore_index"], index)
        kept = self.out.emit(relax.op.not_equal(target, ignored), loss, "kept")
        if options["has_weight"]:
            classes = relax.op.where(kept, target, relax.const(0, index))
            each = relax.op.take(loss.args[2], self.out.emit(classes, loss, "classes"), 0)
            wide = call_op("amp_ir.cast", [each], dtype=dtype)
            weights = relax.op.where(kept, self.out.emit(wide, loss, "w"), relax.const(0.0, dtype))
        else:
            weights = relax.op.astype(kept, dtype)
        return relax.op.sum(self.out.emit(weights, loss, "weights"))

    def _write_chunks(self) -> None:
        inside = (self.region.axis, self.region.sunk)
        ordered = [b.var for b in self.flow.bindings if any(b.var in group for group in inside)]
        for number in range(self.chunks):
            chunk = Chunk(self.region, self.values, self.out, number, self.chunks)
            for variable in ordered:
                part = chunk.add(variable)
                if variable in self.parts:
                    self._add_part(variable, part, is_last=number == self.chunks - 1)
        for variable in ordered:
            if variable in self.parts:
                self._join(variable)

    def _add_part(self, live_out: relax.Var, part: relax.Var, *, is_last: bool) -> None:
        """Take a chunk's part of a live-out value; sums are added up at once, so one is held."""
        parts = self.parts[live_out]
        parts.append(part)
        # The last sum is bound to the live-out value itself.
        if self.region.axis[live_out] is None and len(parts) == 2 and not is_last:
            total = relax.op.add(*parts)
            parts[:] = [self.out.emit(total, self._call_of(live_out), f"{live_out.name}_sum")]

    def _join(self, live_out: relax.Var) -> None:
        """Bind a live-out value to the parts from all chunks, joined."""
        parts, axis, call = (
            self.parts[live_out],
            self.region.axis[live_out],
            self._call_of(live_out),
        )
        if axis is not None:
            self.out.bind(live_out, relax.op.concat(parts, axis), call)
            return
        dtype, wide = str(live_out.ty.dtype), str(parts[0].ty.dtype)
        whole = relax.op.add(*parts)
        divisor = self._divisor(live_out, call, wide)
        if divisor is not None:
            whole = relax.op.divide(whole, divisor)
        if wide != dtype:
            whole = call_op("amp_ir.cast", [self.out.emit(whole, call, live_out.name)], dtype=dtype)
        self.out.bind(live_out, whole, call)

    def _call_of(self, live_out: relax.Var) -> relax.Call:
        value = self.values[live_out]
        return value if isinstance(value, relax.Call) else self.values[value.tuple_value]

    def _divisor(self, live_out: relax.Var, call: relax.Call, dtype: str) -> relax.Expr | None:
        """Return the divisor of the sum over all rows; None where the value is that sum."""
        is_mean = options_of(call).get("reduction") == "mean"
        if call.op.name == NLL_LOSS and is_mean and self.values[live_out].index == 0:
            totals = self.region.totals.items()
            known = next((one for one, of in totals if self.values[of].same_as(call)), None)
            return (
                self.out.emit(self._total_weight(call), call, "total") if known is None else known
            )
        if call.op.name == "relax.mean":
            count = math.prod(shape_of(call.args[0])) // math.prod(shape_of(call))
            return relax.const(float(count), dtype)
        if call.op.name in _LOSSES and is_mean:
            return relax.const(float(math.prod(shape_of(call.args[0]))), dtype)
        return None
