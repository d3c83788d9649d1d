# SPDX-License-Identifier: Apache-2.0
"""The ops of a step whose updates are split over the ranks, as `shard_updates` writes them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import tvm
from tvm import relax

from amp_ir.dialect.collectives import ALL_GATHER, ALL_REDUCE, AVERAGE, REDUCE_SCATTER
from amp_ir.dialect.registry import call_op, options_of
from amp_ir.distributed.shards import Bucket, Place
from amp_ir.ir.dataflow import Dataflow, replaced
from amp_ir.ir.location import join_spans
from amp_ir.ir.static_shape import shape_of
from amp_ir.rewrites.written_bindings import WrittenBindings

_LOW_DTYPES = ("float16", "bfloat16")
Sharding = str | None


@attrs.define(eq=False)
class Scatter:
    """A reduce-scatter that was begun: its gradients with their places, and what is in flight."""

    calls: list[relax.Call]
    known: list[tuple[relax.Var, Place]]
    options: dict[str, Any]
    in_flight: list[relax.Expr]
    averages_first: bool


class ShardedProgram:
    """Bindings, and what each captured value is now: `now` by variable and sharding.

    `written` has the parts that were written, also those without an element on this rank. Pairs of
    collectives are numbered as they begin, so their numbers are alike on all ranks.
    """

    def __init__(self, flow: Dataflow, rank: int) -> None:
        self.flow = flow
        self.rank = rank
        self.now: dict[tuple[relax.Var, Sharding], relax.Expr] = {}
        self.written: set[tuple[relax.Var, str]] = set()
        self._out = WrittenBindings()
        self._begun = 0
        # The results of checks whose terms are added over the ranks.
        self._checked: dict[relax.Var, list[relax.Expr]] = {}

    def copy(self, variable: relax.Var, now: Mapping[relax.Var, relax.Expr]) -> None:
        """Write a binding as it was captured, of what its arguments are now."""
        value = self.flow.values[variable]
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self._checked:
            self.now[variable, None] = self._checked[value.tuple_value][value.index]
            return
        value = replaced(value, now)
        self._out.bindings.append(relax.VarBinding(variable, value))
        self.now[variable, None] = variable

    def write_part(
        self, variable: relax.Var, sharding: str, call: relax.Call, arguments: Sequence[relax.Expr]
    ) -> None:
        """Write an elementwise op on parts of its arguments."""
        new = relax.Call(call.op, list(arguments), call.attrs, call.ty_args, call.span)
        self.now[variable, sharding] = self._out.bind("part", new, call.span)

    def sliced(self, whole: relax.Expr, first: int, end: int) -> relax.Expr:
        """Return elements of a flat tensor."""
        size = math.prod(shape_of(whole))
        flat = whole if len(shape_of(whole)) == 1 else self.reshaped(whole, (size,))
        if (first, end) == (0, size):
            return flat
        made = relax.op.strided_slice(flat, [0], [first], [end], [1])
        return self._out.bind("part", made, None)

    def reshaped(self, expr: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """Return a tensor in another shape."""
        return self._out.bind("flat", relax.op.reshape(expr, list(shape)), None)

    def begin_scatter(
        self,
        calls: Sequence[relax.Call],
        sources: Sequence[relax.Expr],
        known: Sequence[tuple[relax.Var, Place]],
    ) -> Scatter:
        """Begin the reduce-scatter of gradients, which are averaged first where they are sent low.

        A sum of 65504 / N would be infinite in float16.
        """
        given = options_of(calls[0])
        bucket = known[0][1].bucket
        comm_dtype = str(given["comm_dtype"])
        averages_first = bool(comm_dtype) or str(sources[0].ty.dtype) in _LOW_DTYPES
        tensors = list(sources)
        if averages_first:
            tensors = [
                self._average(one, bucket.ranks, call.span)
                for one, call in zip(tensors, calls, strict=True)
            ]
        options = self._pair(bucket, [place.offset for _, place in known])
        options["comm_dtype"] = comm_dtype
        names = ",".join(str(options_of(call)["parameter"]) for call in calls)
        span = join_spans([call.span for call in calls])
        call = call_op(f"{REDUCE_SCATTER}_start", tensors, span, **options, parameters=names)
        in_flight = self._out.bind_fields("in_flight", call, span)
        return Scatter(list(calls), list(known), options, in_flight, averages_first)

    def end_scatter(self, one: Scatter, shardings: Mapping[relax.Var, str]) -> None:
        """Wait for a reduce-scatter; each gradient's part of the mean follows."""
        held = [k for k, (_, place) in enumerate(one.known) if place.end > place.first]
        numbers = [(k, one.known[k][1].first, one.known[k][1].end) for k in held]
        # A rank that holds nothing here waits as well, for an element that it does not read.
        parts = tuple(number for three in numbers or [(0, 0, 1)] for number in three)
        span = join_spans([call.span for call in one.calls])
        call = call_op(f"{REDUCE_SCATTER}_wait", one.in_flight, span, **one.options, parts=parts)
        for k, part in zip(
            held, self._out.bind_fields("received", call, span, len(held)), strict=True
        ):
            reduce, place = one.known[k]
            mean = part
            if not one.averages_first:
                mean = self._average(part, place.bucket.ranks, one.calls[k].span)
            self.now[reduce, shardings[reduce]] = mean

    def gather(
        self,
        bucket: Bucket,
        members: Sequence[tuple[relax.Var, Place, relax.Expr | None]],
        names: Sequence[str],
    ) -> None:
        """Give all ranks whole parameters, of which each rank has written its part."""
        begin = self.rank * bucket.part_size
        held = [(place, part) for _, place, part in members if part is not None]
        offsets = [place.offset + place.first for place, _ in held]
        parts = [part for _, part in held]
        if not parts:
            # Every rank takes part, with a number that no other reads.
            offsets, parts = [begin], [relax.const(0.0, str(members[0][0].ty.dtype))]
        values = [self.flow.values[one] for one, _, _ in members]
        span = join_spans([one.span for one in values])
        options = self._pair(bucket, offsets)
        call = call_op(f"{ALL_GATHER}_start", parts, span, **options, parameters=",".join(names))
        in_flight = self._out.bind_fields("in_flight", call, span)
        shapes = ",".join("x".join(map(str, shape_of(one))) for one, _, _ in members)
        places = tuple(place.offset for _, place, _ in members)
        call = call_op(
            f"{ALL_GATHER}_wait", in_flight, span, **options, shapes=shapes, places=places
        )
        found = self._out.bind_fields("gathered", call, span, len(members))
        for (variable, _, _), whole in zip(members, found, strict=True):
            self.now[variable, None] = whole

    def sum_of_part(
        self, variable: relax.Var, call: relax.Call, part: relax.Expr | None
    ) -> tuple[relax.Var, relax.Expr, Any]:
        """Return this rank's term of a sum, and how the sum over the ranks is used."""
        if part is None:
            term: relax.Expr = relax.const(0.0, str(variable.ty.dtype))
        else:
            term = self._out.bind("term", relax.op.sum(part), call.span)

        def use(total: relax.Expr) -> None:
            shape = shape_of(variable)
            self.now[variable, None] = self.reshaped(total, shape) if shape else total

        return variable, term, use

    def check_of_parts(
        self,
        variable: relax.Var,
        call: relax.Call,
        parts: Sequence[relax.Expr],
        wholes: Sequence[relax.Expr],
        scale: relax.Expr,
    ) -> list[tuple[relax.Var, relax.Expr, Any]]:
        """Return the two terms of a check: 1 where a part is not finite, and the squared norm.

        `wholes` are alike on all ranks: they are checked by each, and counted by rank 0.
        """
        counted = [*parts, *(wholes if self.rank == 0 else ())]
        count: relax.Expr = relax.const(0.0, "float32")
        squares: relax.Expr = relax.const(0.0, "float32")
        if counted:
            finite, norm = self._check(call, [*counted, scale])
            bad = self._out.bind("bad", relax.op.logical_not(finite), call.span)
            count = self._out.bind("bad", relax.op.astype(bad, "float32"), call.span)
            squares = self._out.bind("squares", relax.op.multiply(norm, norm), call.span)
        found = self._checked.setdefault(variable, [])

        def use_count(total: relax.Expr) -> None:
            zero = relax.const(0.0, "float32")
            found.append(self._out.bind("finite", relax.op.equal(total, zero), call.span))

        def use_squares(total: relax.Expr) -> None:
            found.append(self._out.bind("norm", relax.op.sqrt(total), call.span))
            self.now[variable, None] = variable

        return [(variable, count, use_count), (variable, squares, use_squares)]

    def _check(self, call: relax.Call, arguments: list[relax.Expr]) -> list[relax.Expr]:
        new = relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span)
        return self._out.bind_fields("checked", new, call.span, 2)

    def sum_over_ranks(
        self, terms: Sequence[tuple[relax.Var, relax.Expr, Any]], group: int, ranks: int
    ) -> None:
        """Add terms over the ranks, those of one dtype together, and use the sums."""
        dtypes = list(dict.fromkeys(str(term.ty.dtype) for _, term, _ in terms))
        for dtype in dtypes:
            alike = [one for one in terms if str(one[1].ty.dtype) == dtype]
            span = join_spans([self.flow.values[one].span for one, _, _ in alike])
            pair = {"ranks": ranks, "group": group, "bucket": self._number()}
            sent = [term for _, term, _ in alike]
            call = call_op(f"{ALL_REDUCE}_start", sent, span, **pair, parameters="sums")
            in_flight = self._out.bind_fields("in_flight", call, span)
            call = call_op(f"{ALL_REDUCE}_wait", in_flight, span, **pair)
            for (_, _, use), total in zip(
                alike, self._out.bind_fields("total", call, span), strict=True
            ):
                use(total)

    def finish(
        self,
        parameters: Sequence[relax.Var],
        fields: Sequence[relax.Expr],
        kept: Collection[relax.Var],
    ) -> tvm.IRModule:
        """Return the module of what was written, and `kept`, which other ranks need."""
        result = self._out.bind("results", relax.Tuple(list(fields)), None)
        return self.flow.finish(self._out.bindings, result, parameters, kept)

    def _average(self, expr: relax.Expr, ranks: int, span: tvm.ir.Span | None) -> relax.Expr:
        return self._out.bind("mean", call_op(AVERAGE, [expr], span, ranks=ranks), span)

    def _pair(self, bucket: Bucket, offsets: Sequence[int]) -> dict[str, Any]:
        return {
            "ranks": bucket.ranks,
            "group": bucket.group,
            "bucket": self._number(),
            "size": bucket.part_size * bucket.ranks,
            "offsets": tuple(offsets),
        }

    def _number(self) -> int:
        self._begun += 1
        return self._begun - 1
