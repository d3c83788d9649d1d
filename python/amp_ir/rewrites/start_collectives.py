# SPDX-License-Identifier: Apache-2.0
"""Turn whole collectives into pairs of a start and a wait, one pair a bucket.

This runs on the step as it was captured, before the proof of degrees and before autocast: both
then see what runs, and a reduced dtype between ranks is a cast like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import tvm
from tvm import relax

from amp_ir.dialect.collectives import ALL_REDUCE, AVERAGE, BROADCAST
from amp_ir.dialect.registry import call_op, options_of
from amp_ir.ir.bucket_sizes import BucketSizes
from amp_ir.ir.dataflow import Dataflow, op_name, replaced, variables_of, with_arguments
from amp_ir.ir.location import join_spans
from amp_ir.ir.static_shape import nbytes_of
from amp_ir.rewrites.written_bindings import WrittenBindings

_LOW_DTYPES = ("float16", "bfloat16")
_UNSCALE, _ALL_FINITE = "amp_ir.unscale", "amp_ir.all_finite"


def start_collectives(ir: tvm.IRModule) -> tvm.IRModule:
    """Begin each bucket of gradients where its last gradient is known.

    Before:  g1 = ...; ...; g0 = ...; r1 = all_reduce(g1); r0 = all_reduce(g0); p = update(p, r0)
    After:   g1 = ...; g0 = ...; f = all_reduce_start(g1, g0); ...
             s = all_reduce_wait(f[0], f[1]); r0 = average(s[1], ranks=2); p = update(p, r0)

    - A bucket has the gradients of one backward pass and dtype in the order in which they are
      computed, as many as the sizes of the capture say; each value is once in it.
    - The wait for every bucket of a backward pass is before the first use of any of its gradients:
      a step that updates parameters has all of them, or has changed nothing.
    - The average is a multiplication of the sum. Where all that is made of it is a division by the
      loss scale and a check, it is part of the scale: unscale(s, scale * ranks). Where a gradient
      is sent in a low dtype it comes before the cast: a sum of 65504 / N would be infinite.

    Requires: one function `main`, one dataflow block, static shapes.
    Ensures:  a step without collectives is returned unchanged; a call names the locations of all
              its gradients.
    Source:   Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel
              Training", section 3.2.
    """
    flow = Dataflow(ir)
    captured = flow.calls(ALL_REDUCE, BROADCAST)
    return _Starter(flow, captured).run() if captured else ir


@attrs.define(eq=False)
class _Bucket:
    """Tensors that are sent together; `users` are the captured calls of each tensor."""

    op: str
    options: dict[str, Any]
    number: int
    sources: list[relax.Expr] = attrs.field(factory=list)
    users: list[list[relax.Var]] = attrs.field(factory=list)
    in_flight: list[relax.Var] = attrs.field(factory=list)

    @property
    def averages_first(self) -> bool:
        dtype = str(self.sources[0].ty.dtype)
        is_low = self.options.get("comm_dtype") or dtype in _LOW_DTYPES
        return self.op == ALL_REDUCE and bool(is_low)

    @property
    def together(self) -> tuple[str, int]:
        """What is waited for at once: all buckets of a backward or a forward pass."""
        key = "backward" if self.op == ALL_REDUCE else "forward"
        return self.op, int(self.options[key])


class _Starter:
    def __init__(self, flow: Dataflow, captured: dict[relax.Var, relax.Call]) -> None:
        self.flow = flow
        self.captured = captured
        self.out = WrittenBindings()
        self.position = {binding.var: k for k, binding in enumerate(flow.bindings)}
        self.buckets = self._find_buckets()
        # What a captured call is now, and the averages that are part of a scale.
        self.now: dict[relax.Var, relax.Expr] = {}
        self.folded = self._folded_averages()
        self.scales: dict[relax.Expr, relax.Var] = {}
        self.waiting: list[_Bucket] = []

    def run(self) -> tvm.IRModule:
        starts: dict[int, list[_Bucket]] = {}
        for bucket in self.buckets:
            last = max(self._known_at(one) for one in bucket.sources)
            starts.setdefault(last, []).append(bucket)
        self.waiting = list(self.buckets)
        for bucket in starts.get(-1, ()):
            self._start(bucket)
        for k, binding in enumerate(self.flow.bindings):
            if binding.var not in self.captured:
                self._wait_for(variables_of(binding.value))
                value = self._with_folded_scale(binding)
                self.out.bindings.append(relax.VarBinding(binding.var, replaced(value, self.now)))
            for bucket in starts.get(k, ()):
                self._start(bucket)
        self._wait_for(variables_of(self.flow.result))
        # What other ranks read, and this one does not.
        for bucket in self.waiting:
            self._wait(bucket)
        result = replaced(self.flow.result, self.now)
        return self.flow.finish(self.out.bindings, result)

    def _find_buckets(self) -> list[_Bucket]:
        """Return the buckets in the order in which they start; equal values are sent once."""
        made: list[_Bucket] = []
        for op, options, calls in self._alike():
            places: dict[relax.Expr, list[relax.Var]] = {}
            for variable in calls:
                places.setdefault(self.captured[variable].args[0], []).append(variable)
            sources = sorted(places, key=self._known_at)
            left = iter(sources)
            for count in _sizes(options).counts([nbytes_of(one.ty) for one in sources]):
                bucket = _Bucket(op, options, 0)
                for source in itertools.islice(left, count):
                    bucket.sources.append(source)
                    bucket.users.append(places[source])
                made.append(bucket)
        made.sort(key=lambda one: max(self._known_at(source) for source in one.sources))
        for number, bucket in enumerate(made):
            bucket.number = number
        return made

    def _alike(self) -> Iterator[tuple[str, dict[str, Any], list[relax.Var]]]:
        """Return the captured calls whose tensors may share a bucket, with their options."""
        found: dict[Any, tuple[str, dict[str, Any], list[relax.Var]]] = {}
        for variable, call in self.captured.items():
            options = options_of(call)
            for name in ("parameter", "buffer"):
                options.pop(name, None)
            key = call.op.name, str(call.ty.dtype), tuple(sorted(options.items()))
            found.setdefault(key, (call.op.name, options, []))[2].append(variable)
        yield from found.values()

    def _known_at(self, source: relax.Expr) -> int:
        """Return the position of the binding of a value; -1 for an input or a constant."""
        return self.position.get(source, -1) if isinstance(source, relax.Var) else -1

    def _folded_averages(self) -> set[relax.Var]:
        """Return the captured calls whose average is part of the loss scale.

        All gradients of a check have to be: their common norm is divided once.
        """
        sums = {
            user
            for bucket in self.buckets
            if bucket.op == ALL_REDUCE and not bucket.averages_first
            for users in bucket.users
            for user in users
        }
        values, in_result = self.flow.values, set(variables_of(self.flow.result))
        while True:
            wrong = {one for one in sums if one in in_result or not self._only_unscaled(one, sums)}
            if not wrong:
                break
            sums -= wrong
        ranks = {options_of(values[one])["ranks"] for one in sums}
        return sums if len(ranks) == 1 else set()

    def _only_unscaled(self, variable: relax.Var, sums: set[relax.Var]) -> bool:
        for reader in self.flow.readers.get(variable, ()):
            value = self.flow.values[reader]
            if op_name(value) not in (_UNSCALE, _ALL_FINITE):
                return False
            if any(one not in sums for one in value.args[:-1]):
                return False
        return True

    def _with_folded_scale(self, binding: relax.VarBinding) -> relax.Expr:
        """Return what is bound, by a scale that has the number of ranks in it where it has to."""
        value = binding.value
        if op_name(value) not in (_UNSCALE, _ALL_FINITE) or value.args[0] not in self.folded:
            return value
        scale = value.args[-1]
        if scale not in self.scales:
            ranks = int(options_of(self.captured[value.args[0]])["ranks"])
            factor = relax.const(float(ranks), str(scale.ty.dtype))
            made = relax.op.multiply(replaced(scale, self.now), factor)
            self.scales[scale] = self.out.bind("scale_of_sum", made, value.span)
        return with_arguments(value, [*value.args[:-1], self.scales[scale]])

    def _start(self, bucket: _Bucket) -> None:
        span = join_spans(self._calls_of(bucket, "span"))
        self._wait_for([one for one in bucket.sources if isinstance(one, relax.Var)])
        tensors = [replaced(one, self.now) for one in bucket.sources]
        if bucket.averages_first:
            tensors = [
                self.out.bind(
                    "averaged",
                    call_op(AVERAGE, [one], span_of, ranks=self._ranks(bucket)),
                    span_of,
                )
                for one, span_of in zip(tensors, self._calls_of(bucket, "span"), strict=True)
            ]  # fmt: skip
        names = self._names(bucket)
        call = call_op(f"{bucket.op}_start", tensors, span, **self._pair(bucket), **names)
        bucket.in_flight = self.out.bind_fields("in_flight", call, span)

    def _wait_for(self, read: Sequence[relax.Var]) -> None:
        """Wait for what a value reads, and for all that has to come with it."""
        needed = {
            bucket.together
            for bucket in self.waiting
            if any(user in read for users in bucket.users for user in users)
        }
        for bucket in [one for one in self.waiting if one.together in needed]:
            self.waiting.remove(bucket)
            self._wait(bucket)

    def _wait(self, bucket: _Bucket) -> None:
        spans = self._calls_of(bucket, "span")
        span = join_spans(spans)
        call = call_op(f"{bucket.op}_wait", [*bucket.in_flight], span, **self._pair(bucket))
        for part, users, span_of in zip(
            self.out.bind_fields("received", call, span), bucket.users, spans, strict=True
        ):
            whole: relax.Var = part
            is_sum = bucket.op == ALL_REDUCE and not bucket.averages_first
            if is_sum and not self.folded.issuperset(users):
                mean = call_op(AVERAGE, [part], span_of, ranks=self._ranks(bucket))
                whole = self.out.bind("mean", mean, span_of)
            for user in users:
                self.now[user] = part if user in self.folded else whole

    def _calls_of(self, bucket: _Bucket, field: str) -> list[Any]:
        return [getattr(self.captured[users[0]], field) for users in bucket.users]

    def _names(self, bucket: _Bucket) -> dict[str, str]:
        option, given = (
            ("parameters", "parameter") if bucket.op == ALL_REDUCE else ("buffers", "buffer")
        )
        calls = [self.captured[one] for users in bucket.users for one in users]
        return {option: ",".join(str(options_of(call)[given]) for call in calls)}

    @staticmethod
    def _ranks(bucket: _Bucket) -> int:
        return int(bucket.options["ranks"])

    def _pair(self, bucket: _Bucket) -> dict[str, Any]:
        group = int(bucket.options["group"])
        pair = {"ranks": self._ranks(bucket), "group": group, "bucket": bucket.number}
        if bucket.op != ALL_REDUCE:
            return pair
        return {**pair, "comm_dtype": str(bucket.options["comm_dtype"])}


def _sizes(options: Mapping[str, Any]) -> BucketSizes:
    names = ("bucket_nbytes", "first_bucket_nbytes", "last_bucket_nbytes")
    return BucketSizes(*(int(options.get(name, 0)) for name in names))
