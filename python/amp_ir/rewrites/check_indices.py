# SPDX-License-Identifier: Apache-2.0
"""Find the indices of a step that may be out of range, and make the step check them.

Kernels clamp. The checks reject what PyTorch rejects: before the step, an index from the batch or
the state; during the step, an index that the step computes, by a flag that keeps every tensor of
the state unchanged, as an overflow does under a loss scale. Indices that `value_ranges.py` proves
to be in range are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs
import tvm
from tvm import relax
from tvm.ir import GenericConst

from amp_ir.dialect.collectives import ALL_REDUCE, STARTS
from amp_ir.dialect.registry import call_op, options_of
from amp_ir.ir.dataflow import Dataflow, op_name, variables_of
from amp_ir.ir.index_check import DivisorCheck, IndexCheck, error_of
from amp_ir.ir.index_uses import index_uses
from amp_ir.ir.interpreter import evaluate
from amp_ir.ir.location import from_span, join_spans
from amp_ir.ir.planned_checks import SAME_VALUES, HostCheck, PlannedChecks
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.step_module import OutputSpec, Role, Signature
from amp_ir.rewrites.divisor_flags import with_divisor_flags
from amp_ir.rewrites.number_buckets import number_buckets
from amp_ir.rewrites.ranges.number_range import range_of_dtype
from amp_ir.rewrites.ranges.value_ranges import ValueRanges

HostChecks = Literal["all", "batch", "none"]
EXTREMES = "index_extremes"

_CASTS = ("relax.astype", "amp_ir.cast")
# What the host computes exactly as the kernels do, of integers: views, look-ups, arithmetic.
_ON_HOST = frozenset(
    (
        *SAME_VALUES, *_CASTS, "relax.strided_slice", "relax.concat", "relax.full",
        "relax.arange", "relax.where", "relax.add", "relax.subtract", "relax.multiply",
        "relax.negative", "relax.abs", "relax.sign", "relax.maximum", "relax.minimum", "relax.mod",
        "relax.floor_mod", "relax.floor_divide", "relax.equal", "relax.not_equal", "relax.less",
        "relax.less_equal", "relax.greater", "relax.greater_equal", "relax.logical_and",
        "relax.logical_or", "relax.logical_xor", "relax.logical_not", "relax.sum", "relax.cumsum",
        "relax.max", "relax.min", "relax.take", "relax.gather_elements", "amp_ir.index",
        "amp_ir.checked_lengths",
    )
)  # fmt: skip
_DIVISIONS = ("relax.mod", "relax.floor_mod", "relax.floor_divide")
# The host does not compute more elements than this, or than four times those it reads.
_FEW_ELEMENTS = 2**16
# Indices that depend on no input are computed at the capture, up to so many.
_MOST_KNOWN = 2**22


@attrs.frozen
class CheckedStep:
    """The step as it is compiled, with one more output where some checks are in it.

    That output, "index_extremes", is int64[2 * checks]: the smallest index of each of
    `checks.in_step`, then the largest of each. Where the step exchanges with other ranks it has one
    more number: on how many of them an index is out of range.
    """

    ir: tvm.IRModule
    signature: Signature
    checks: PlannedChecks


def check_indices(ir: tvm.IRModule, signature: Signature, *, on_host: HostChecks) -> CheckedStep:
    """Make the step check every index that is not known to be in range.

    Before:  y = index(x, ids); w1 = subtract(w, dw); return (y, w1)        # w1 updates w
    After:   y = index(x, ids); w1 = subtract(w, dw)
             extremes = concat(min(ids), max(ids)); wrong = less(min(ids), least) or ...
             w2 = where(wrong, w, w1); return (y, w2, extremes)

    `on_host` says which indices the host checks before the step, adding no op: "all" that it can
    compute from inputs, those that a "batch" holds as they are, or "none" (on a GPU, which the host
    does not wait for).

    Where the step exchanges with other ranks, `wrong` is added over them: all keep their old state,
    or none.

    Requires: one function `main`, one dataflow block that ends in the tuple of the outputs.
    Ensures:  a step with nothing to check in it keeps its IR and signature; indices whose ops are
              dead are not checked.
    Errors:   IndexOutOfRangeError where an index is out of range whatever the batch is, and
              DivisionByZeroError where an integer divisor is 0, SequenceLengthError where lengths
              of sequences are not what the step takes.
    """
    flow = Dataflow(ir)
    bindings, flags = with_divisor_flags(flow)
    finder = _Finder(flow.main.params, bindings, signature, on_host=on_host)
    finder.run(flags)
    checks = PlannedChecks(tuple(finder.on_host), tuple(one.check for one in finder.in_step))
    if not finder.in_step:
        return CheckedStep(ir, signature, checks)
    guard = _Guard(flow, bindings, signature.outputs)
    guarded = guard.run(finder.in_step)
    outputs = (*signature.outputs, _output(2 * len(finder.in_step) + bool(guard.groups)))
    return CheckedStep(guarded, attrs.evolve(signature, outputs=outputs), checks)


def _output(count: int) -> OutputSpec:
    return OutputSpec(EXTREMES, Role.INDEX_EXTREMES, (count,), "int64")


@attrs.frozen(eq=False)
class _InStep:
    ids: relax.Expr
    check: IndexCheck


class _Finder:
    """Walk the uses of indices and decide where each is checked, if at all."""

    def __init__(
        self,
        parameters: Sequence[relax.Var],
        bindings: Sequence[relax.VarBinding],
        signature: Signature,
        *,
        on_host: HostChecks,
    ) -> None:
        self._host_checks = on_host
        self._bindings = bindings
        self._values = {one.var: one.value for one in bindings}
        self._ranges = ValueRanges(self._values)
        self._position = {parameter: k for k, parameter in enumerate(parameters)}
        self._inputs = signature.inputs
        self.on_host: list[HostCheck] = []
        self.in_step: list[_InStep] = []

    def run(self, divisor_flags: dict[relax.Var, relax.Var]) -> None:
        """Fill `on_host` and `in_step`, in the order of the ops."""
        self._check_indices()
        for quotient, flag in divisor_flags.items():
            call = self._values[quotient]
            known = self._ranges.of(call.args[1])
            if known is None or known.low <= 0 <= known.high:
                check = DivisorCheck("an integer division", from_span(call.span), 0, 1)
                if math.prod(shape_of(flag)):
                    self._place(flag, check)

    def _check_indices(self) -> None:
        made: dict[relax.Expr, list[IndexCheck]] = {}
        for binding in self._bindings:
            if not isinstance(binding.value, relax.Call):
                continue
            for use in index_uses(binding.value):
                for ids in self._sources(binding.value.args[use.position], use.check):
                    known = made.setdefault(ids, [])
                    if not any(one.implies(use.check) for one in known):
                        known.append(use.check)
                        self._place(ids, use.check)

    def _sources(self, ids: relax.Expr, check: IndexCheck) -> Iterator[relax.Expr]:
        """Yield the tensors with the same numbers before views, but not parts known in range."""
        value: Any = self._values.get(ids) if isinstance(ids, relax.Var) else None
        name = op_name(value)
        if math.prod(shape_of(ids)) == 0 or self._is_proven(ids, check):
            return
        if name in SAME_VALUES or (name in _CASTS and self._is_kept(value)):
            yield from self._sources(value.args[0], check)
        elif name == "relax.concat" and isinstance(value.args[0], relax.Tuple):
            for part in value.args[0].fields:
                yield from self._sources(part, check)
        else:
            yield ids

    def _is_kept(self, cast: relax.Call) -> bool:
        """Return whether a cast keeps every number: its integers fit the range of the new dtype."""
        source, target = str(cast.args[0].ty.dtype), str(cast.ty.dtype)
        if not (source.startswith(("int", "uint")) and target.startswith(("int", "uint"))):
            return False
        return source == target or (source, target) == ("int32", "int64") or self._fits(cast)

    def _fits(self, cast: relax.Call) -> bool:
        limits = range_of_dtype(cast)
        known = self._ranges.of(cast.args[0])
        return known is not None and limits is not None and limits.join(known) == limits

    def _is_proven(self, ids: relax.Expr, check: IndexCheck) -> bool:
        known = self._ranges.of(ids)
        if known is None:
            return False
        if check.ignored is not None and known.low == known.high == check.ignored:
            return True
        return check.least <= known.low and known.high < check.extent

    def _place(self, ids: relax.Expr, check: IndexCheck) -> None:
        if isinstance(ids, GenericConst):
            check_known(check, ids, [])
            return
        needed, inputs = self._computed_from(ids)
        if not inputs and self._count(needed) <= _MOST_KNOWN:
            check_known(check, ids, needed)
        elif self._is_for_host(needed, inputs):
            positions = tuple(self._position[one] for one in inputs)
            specs = [self._inputs[position] for position in positions]
            names, is_of_state = tuple(one.name for one in specs), all(s.is_state for s in specs)
            found = HostCheck(check, names, positions, tuple(inputs), needed, ids, is_of_state)
            self.on_host.append(found)
        else:
            self.in_step.append(_InStep(ids, check))

    def _computed_from(self, ids: relax.Var) -> tuple[list[relax.Binding], list[relax.Var]]:
        """Return the bindings that compute `ids`, in order, and the inputs that they read."""
        if ids in self._position:
            return [], [ids]
        needed, reading = {ids}, []
        for binding in reversed(self._bindings):
            if binding.var in needed:
                reading.append(binding)
                needed.update(variables_of(binding.value))
        return reading[::-1], [one for one in self._position if one in needed]

    @staticmethod
    def _count(bindings: Sequence[relax.Binding]) -> int:
        types = [b.var.ty for b in bindings if isinstance(b.var.ty, relax.TensorType)]
        return max((math.prod(int(n) for n in one.shape) for one in types), default=0)

    def _is_for_host(self, needed: Sequence[relax.Binding], inputs: Sequence[relax.Var]) -> bool:
        if self._host_checks == "none":
            return False
        if self._host_checks == "batch":
            return not needed and not self._inputs[self._position[inputs[0]]].is_state
        read = sum(math.prod(shape_of(one)) for one in inputs)
        if self._count(needed) > max(_FEW_ELEMENTS, 4 * read):
            return False
        return all(map(_is_integer, inputs)) and all(self._is_exact(b.value) for b in needed)

    def _is_exact(self, value: relax.Expr) -> bool:
        """Return whether the host computes it exactly as the kernels do."""
        if op_name(value) not in _ON_HOST or not _is_integer(value):
            return False
        if op_name(value) in _DIVISIONS:
            divisor = self._ranges.of(value.args[1])
            return divisor is not None and (divisor.low > 0 or divisor.high < 0)
        return True


def _is_integer(expr: relax.Expr) -> bool:
    return str(getattr(expr.ty, "dtype", "")).startswith(("int", "uint", "bool"))


def check_known(check: IndexCheck, ids: relax.Expr, bindings: Sequence[relax.Binding]) -> None:
    """Compute indices that depend on no input, and raise for those out of range.

    Raises:
        IndexOutOfRangeError: one is.
    """
    indices = evaluate(ids, bindings, {})
    wrong = check.wrong_value(check.extremes_of(indices))
    if wrong is not None:
        what = check.describe("the step always uses the index", wrong)
        raise error_of([check], f"{what}. Nothing was run and nothing has changed")


class _Guard:
    """Write the checks, and the choice between old and new state, after a step's bindings."""

    def __init__(
        self,
        flow: Dataflow,
        bindings: Sequence[relax.VarBinding],
        outputs: Sequence[OutputSpec],
    ) -> None:
        self._flow = flow
        self._outputs = outputs
        self._builder = relax.BlockBuilder()
        self._fields = flow.fields
        self._out = [one for one in bindings if not one.var.same_as(flow.result)]
        self._count = len(self._out)
        starts = [options_of(call) for call in flow.calls(*STARTS).values()]
        self._begun = len(starts)
        # The groups that the step exchanges with, each with its number of ranks.
        self.groups = {int(one["group"]): int(one["ranks"]) for one in starts}

    def run(self, checks: Sequence[_InStep]) -> tvm.IRModule:
        """Return the module whose `main` has one more output."""
        smallest, largest = [], []
        for one in checks:
            low, high = self._extremes(one)
            smallest.append(low)
            largest.append(high)
        extremes = self._emit(relax.op.concat([*smallest, *largest], 0))
        wrong = self._any_wrong([one.check for one in checks], extremes)
        if self.groups:
            wrong, count = self._over_ranks(wrong, join_spans([one.ids.span for one in checks]))
            extremes = self._emit(relax.op.concat([extremes, count], 0))
            self._move_up([one.ids for one in checks])
        fields = [
            field if spec.updates is None else self._chosen(wrong, field, spec.updates)
            for field, spec in zip(self._fields, self._outputs, strict=True)
        ]
        guarded = self._finished([*fields, extremes])
        return number_buckets(guarded) if self.groups else guarded

    def _move_up(self, indices: Sequence[relax.Expr]) -> None:
        """Put the checks where the last index is known: exchanges begin in the order written."""
        place = {one.var: k for k, one in enumerate(self._out)}
        first = 1 + max(place.get(one, -1) for one in indices)
        written, checks = self._out[first : self._count], self._out[self._count :]
        self._out[first:] = [*checks, *written]

    def _extremes(self, one: _InStep) -> tuple[relax.Var, relax.Var]:
        """Return the smallest and the largest index that counts, int64[1] each."""
        ids = one.ids
        if one.check.ignored is not None:
            dtype = str(ids.ty.dtype)
            is_ignored = self._emit(relax.op.equal(ids, relax.const(one.check.ignored, dtype)))
            ids = self._emit(relax.op.where(is_ignored, relax.const(0, dtype), ids))
        if str(ids.ty.dtype) != "int64":
            ids = self._emit(relax.op.astype(ids, "int64"))
        flat = self._emit(relax.op.reshape(ids, [math.prod(shape_of(ids))]))
        low, high = (
            self._emit(op(flat, [0], keepdims=True)) for op in (relax.op.min, relax.op.max)
        )
        return low, high

    def _any_wrong(self, checks: Sequence[IndexCheck], extremes: relax.Var) -> relax.Var:
        """Return whether an index of any check is out of range, bool[]."""
        count = len(checks)
        halves = [
            self._emit(relax.op.strided_slice(extremes, [0], [begin], [begin + count], [1]))
            for begin in (0, count)
        ]
        least = relax.const([one.least for one in checks], "int64")
        extent = relax.const([one.extent for one in checks], "int64")
        below = self._emit(relax.op.less(halves[0], least))
        above = self._emit(relax.op.greater_equal(halves[1], extent))
        wrong = self._emit(relax.op.astype(self._emit(relax.op.logical_or(below, above)), "int32"))
        most = self._emit(relax.op.max(wrong, [0], keepdims=False))
        return self._emit(relax.op.greater(most, relax.const(0, "int32")))

    def _over_ranks(
        self, wrong: relax.Var, span: tvm.ir.Span | None
    ) -> tuple[relax.Var, relax.Var]:
        """Return whether an index is out of range on any rank, bool[]; on how many, int64[1]."""
        total = self._emit(relax.op.astype(self._emit(relax.op.reshape(wrong, [1])), "float32"))
        for number, (group, ranks) in enumerate(sorted(self.groups.items()), self._begun):
            pair = {"ranks": ranks, "group": group, "bucket": number}
            started = call_op(f"{ALL_REDUCE}_start", [total], span, **pair, parameters="checks")
            in_flight = self._emit(relax.TupleGetItem(self._emit(started), 0))
            waited = call_op(f"{ALL_REDUCE}_wait", [in_flight], span, **pair)
            total = self._emit(relax.TupleGetItem(self._emit(waited), 0))
        any_wrong = self._emit(relax.op.greater(total, relax.const(0.0, "float32")))
        count = self._emit(relax.op.astype(total, "int64"))
        return self._emit(relax.op.reshape(any_wrong, [])), count

    def _chosen(self, wrong: relax.Var, new: relax.Expr, position: int) -> relax.Expr:
        old = self._flow.main.params[position]
        return new if new.same_as(old) else self._emit(relax.op.where(wrong, old, new))

    def _finished(self, fields: Sequence[relax.Expr]) -> tvm.IRModule:
        value = self._builder.normalize(relax.Tuple(fields))
        result = relax.Var(self._flow.result.name, value.ty)
        return self._flow.finish([*self._out, relax.VarBinding(result, value)], result)

    def _emit(self, call: relax.Expr) -> relax.Var:
        value = self._builder.normalize(call)
        variable = relax.DataflowVar(f"check{len(self._out)}", value.ty)
        self._out.append(relax.VarBinding(variable, value))
        return variable
