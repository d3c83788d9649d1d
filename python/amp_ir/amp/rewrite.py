# SPDX-License-Identifier: Apache-2.0
"""Build the new `main` from labelled decisions: one pass over the ops, with known types.

Where a cast goes:
- A value that its op computed in float32 and stores low is rounded right after the op, so that the
  kernel that makes it stores it low.
- A low value that an op wants in float32 is widened by a cast of that op's own, which fuses into
  its kernel (a shared one would have to be stored wide).
- An input or a library call's float32 result is rounded once, before its first low reader.
- A view is not an op: it is repeated for each dtype in which a reader looks through it, after the
  cast, so that a weight and its transpose share one cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import tvm
from tvm import relax
from tvm.ir import GenericConst, Span

from amp_ir.amp.decisions import Decision
from amp_ir.amp.hints import FULL_DTYPE
from amp_ir.amp.kernels import SET_BY_OPTION, Places
from amp_ir.amp.reads import Reads, fits_low_exactly, plan_reads
from amp_ir.dialect.registry import DECLARATIONS, call_op, options_of
from amp_ir.ir.call_attributes import attribute_fields
from amp_ir.ir.step_graph import Op, StepGraph, Tree, leaves


@attrs.frozen
class CastRecord:
    """One inserted cast: its source, its consumer, and whether others share it."""

    variable: str
    source: int
    from_dtype: str
    to_dtype: str
    consumer: int
    is_shared: bool


@attrs.define(eq=False)
class Rewritten:
    """The new function, the casts in it and the dtypes each op reads and stores."""

    function: relax.Function
    casts: list[CastRecord]
    read_dtypes: list[list[str]]
    result_dtypes: list[list[str]]


def rewrite(
    graph: StepGraph,
    decisions: Sequence[Decision],
    places: Places,
    amp_dtype: str,
    output_dtypes: Sequence[str],
) -> Rewritten:
    """Rewrite a step whose decisions are all labelled; `output_dtypes` has one dtype per output."""
    reads = plan_reads(graph, decisions, places, amp_dtype, output_dtypes)
    return _Rewriter(graph, decisions, amp_dtype, reads).run(output_dtypes)


class _Rewriter:
    """Builder of bindings in order; `have[value][dtype]` is a value's expression in a dtype."""

    def __init__(
        self, graph: StepGraph, decisions: Sequence[Decision], amp_dtype: str, reads: Reads
    ) -> None:
        self.graph = graph
        self.decisions = decisions
        self.amp_dtype = amp_dtype
        self.reads = reads
        self.bindings: list[relax.Binding] = []
        self.have: dict[tuple[int, str], relax.Expr] = {}
        self.casts: list[CastRecord] = []
        self.result_dtypes: list[list[str]] = []
        self._types: dict[tuple[Any, str], relax.TensorType] = {}
        for leaf, parameter in zip(graph.inputs, graph.function.params, strict=True):
            self.have[leaf, graph.values[leaf].dtype] = parameter

    def run(self, output_dtypes: Sequence[str]) -> Rewritten:
        for op in self.graph.ops:
            if not op.is_view or self.graph.values[op.results[0]].dtype != FULL_DTYPE:
                self.emit(op)
            else:
                self.result_dtypes.append([])
        function = self.finish(output_dtypes)
        return Rewritten(function, self.casts, self.reads.dtypes, self.result_dtypes)

    def emit(self, op: Op) -> None:
        decision = self.decisions[op.position]
        dtypes = self.reads.dtypes[op.position]
        span = op.call.span
        expressions = iter(
            [
                self.read(leaf, dtype, op.position, span, through_low=through_low)
                for leaf, dtype, through_low in zip(
                    op.reads, dtypes, self.reads.through_low[op.position], strict=True
                )
            ]
        )
        args = [self._argument(tree, argument, expressions)
                for tree, argument in zip(op.args, op.call.args, strict=True)]  # fmt: skip
        call, produced = self.call(op, args, dtypes, decision)
        self.result_dtypes.append(
            [
                self.amp_dtype if decision.label == "low" and follows else dtype
                for dtype, follows in zip(produced, decision.follows, strict=True)
            ]
        )
        self.bind_results(op, call, produced)

    def _argument(self, tree: Tree, original: relax.Expr, expressions: Any) -> relax.Expr:
        if isinstance(tree, int):
            return next(expressions)
        if isinstance(tree, tuple) and leaves(tree):
            fields = [self._argument(field, original, expressions) for field in tree]
            return relax.Tuple(fields)
        return original

    def call(
        self, op: Op, args: list[relax.Expr], dtypes: list[str], decision: Decision
    ) -> tuple[relax.Call, list[str]]:
        """Return the call, typed, and the dtype of each result as the op itself stores it."""
        before = [self.graph.values[leaf].dtype for leaf in op.results]
        was = [self.graph.values[leaf].dtype for leaf in op.reads]
        attributes = op.call.attrs
        if op.name in SET_BY_OPTION and before[0] == FULL_DTYPE:
            wants_low = decision.label == "low"
            produced = [self.amp_dtype if wants_low else FULL_DTYPE]
            if (dtypes, produced) != (was, before):
                attributes = with_out_dtype(op.call, produced[0])
        elif dtypes == was:
            produced = before
        elif op.name in DECLARATIONS:
            produced = self._inferred(op, dtypes)
        else:
            produced = [self.amp_dtype if dtype == FULL_DTYPE else dtype for dtype in before]
        call = relax.Call(op.call.op, args, attributes, list(op.call.ty_args), op.call.span)
        if produced == before:
            ty = op.variable.ty
        else:
            types = [
                self.type_of(leaf, dtype) for leaf, dtype in zip(op.results, produced, strict=True)
            ]
            ty = types[0] if isinstance(op.result, int) else relax.TupleType(types)
        relax.expr._update_type(call, ty)
        return call, produced

    def _inferred(self, op: Op, dtypes: list[str]) -> list[str]:
        types = [self.type_of(leaf, dtype) for leaf, dtype in zip(op.reads, dtypes, strict=True)]
        ty = DECLARATIONS[op.name].infer(*types, **options_of(op.call))
        fields = ty.fields if isinstance(ty, relax.TupleType) else [ty]
        return [str(field.dtype) for field in fields]

    def bind_results(self, op: Op, call: relax.Call, produced: list[str]) -> None:
        decision = self.decisions[op.position]
        variable = self.bind(op.variable.name, call, call.ty)
        if isinstance(op.result, int):
            pieces: list[relax.Expr] = [variable]
        else:
            pieces = self._take_apart(op, variable, call.ty)
        for leaf, piece, dtype, follows in zip(
            op.results, pieces, produced, decision.follows, strict=True
        ):
            low_from_here = follows and decision.label == "low"
            if low_from_here and dtype == FULL_DTYPE:
                self.cast(leaf, piece, self.amp_dtype, op.position, call.span, is_shared=True)
                continue
            self.have[leaf, dtype] = piece
            first_reader = self.reads.low_copies.get(leaf)
            if first_reader is not None and dtype == FULL_DTYPE:
                readers = self.graph.ops[first_reader : first_reader + 1]
                span = readers[0].call.span if readers else call.span
                self.cast(leaf, piece, self.amp_dtype, first_reader, span, is_shared=True)

    def _take_apart(self, op: Op, variable: relax.Var, ty: relax.TupleType) -> list[relax.Expr]:
        assert all(isinstance(field, relax.TensorType) for field in ty.fields)  # no op nests them
        pieces: list[relax.Expr] = []
        for position, field in enumerate(ty.fields):
            if not self.graph.values[op.results[position]].readers and (
                op.results[position] not in self.graph.outputs
            ):
                pieces.append(variable)  # never read: no binding
                continue
            item = relax.TupleGetItem(variable, position)
            pieces.append(self.bind(f"{variable.name}_{position}", item, field))
        return pieces

    def read(
        self,
        leaf: int,
        dtype: str,
        consumer: int,
        span: Span | None,
        *,
        through_low: bool = False,
    ) -> relax.Expr:
        """Return `leaf` in `dtype`, as `consumer` reads it; `through_low` widens the low copy."""
        value = self.graph.values[leaf]
        if through_low and dtype == FULL_DTYPE and not value.is_constant:
            low = self.read(leaf, self.amp_dtype, consumer, span)
            return self.cast(leaf, low, dtype, consumer, span, is_shared=False)
        known = self.have.get((leaf, dtype))
        if known is not None:
            return known
        if value.is_constant:
            return self._constant(leaf, dtype)
        if value.root != leaf and value.dtype == FULL_DTYPE:
            return self._look_through(leaf, dtype, consumer, span)
        from_dtype = self.amp_dtype if dtype == value.dtype else value.dtype
        if dtype not in (self.amp_dtype, value.dtype):
            # A result in another low dtype than that of the step.
            source = self.read(leaf, from_dtype, consumer, span)
        else:
            source = self.have[leaf, from_dtype]
        # Widening is a read of the consumer's own; narrowing an input is paid once and shared.
        narrows = dtype != FULL_DTYPE
        return self.cast(leaf, source, dtype, consumer, span, is_shared=narrows)

    def _look_through(self, leaf: int, dtype: str, consumer: int, span: Span | None) -> relax.Expr:
        value = self.graph.values[leaf]
        root_has = (value.root, dtype) in self.have
        if dtype == FULL_DTYPE and not root_has:
            view = self.read(leaf, self.amp_dtype, consumer, span)
            return self.cast(leaf, view, dtype, consumer, span, is_shared=False)
        op = self.graph.ops[value.op]
        argument = self.read(op.reads[0], dtype, consumer, span)
        args = [argument, *op.call.args[1:]]
        call = relax.Call(op.call.op, args, op.call.attrs, [], op.call.span)
        ty = self.type_of(leaf, dtype)
        relax.expr._update_type(call, ty)
        variable = self.bind(op.variable.name, call, ty)
        self.have[leaf, dtype] = variable
        return variable

    def _constant(self, leaf: int, dtype: str) -> relax.Expr:
        value = self.graph.values[leaf]
        constant = value.expr
        assert isinstance(constant, GenericConst)
        if dtype == value.dtype:
            return constant
        if fits_low_exactly(self.graph, leaf, dtype):
            return relax.const(constant.value.numpy(), dtype)
        return self.cast(leaf, constant, dtype, value.readers[0], None, is_shared=True)

    def cast(
        self,
        leaf: int,
        source: relax.Expr,
        dtype: str,
        consumer: int,
        span: Span | None,
        *,
        is_shared: bool,
    ) -> relax.Var:
        """Bind a cast of `source`, which is `leaf` in another dtype."""
        call = call_op("amp_ir.cast", [source], span, dtype=dtype)
        ty = self.type_of(leaf, dtype)
        relax.expr._update_type(call, ty)
        name = getattr(source, "name", "constant")
        suffix = "full" if dtype == FULL_DTYPE else "low"
        variable = self.bind(f"{name}_{suffix}", call, ty)
        from_dtype = str(source.ty.dtype)
        record = CastRecord(variable.name, leaf, from_dtype, dtype, consumer, is_shared)
        self.casts.append(record)
        if is_shared:
            self.have[leaf, dtype] = variable
        return variable

    def bind(self, name: str, expr: relax.Expr, ty: relax.Type) -> relax.Var:
        variable = relax.DataflowVar(name, ty)
        self.bindings.append(relax.VarBinding(variable, expr))
        return variable

    def type_of(self, leaf: int, dtype: str) -> relax.TensorType:
        value = self.graph.values[leaf]
        if value.dtype == dtype:
            return value.ty
        key = (value.shape, dtype)
        known = self._types.get(key)
        if known is None:
            known = self._types[key] = relax.TensorType(value.shape, dtype)
        return known

    def finish(self, output_dtypes: Sequence[str]) -> relax.Function:
        """Bind the outputs and close the one dataflow block."""
        expressions = iter(
            [
                self.read(leaf, dtype, len(self.graph.ops), None)
                for leaf, dtype in zip(self.graph.outputs, output_dtypes, strict=True)
            ]
        )
        result = self._argument(self.graph.output, self.graph.function.body.body, expressions)
        output = relax.Var("outputs", result.ty)
        self.bindings.append(relax.VarBinding(output, result))
        body = relax.SeqExpr([relax.DataflowBlock(self.bindings)], output)
        relax.expr._update_type(body, result.ty)
        old = self.graph.function
        return relax.Function(old.params, body, result.ty, old.is_pure, old.attrs, old.span)


def with_out_dtype(call: relax.Call, dtype: str) -> tvm.ir.Attrs:
    """Return the attributes of a matmul or convolution with another dtype of its result."""
    kind, fields = attribute_fields(call.attrs)
    return tvm.ir.make_node(kind, **{**fields, "out_dtype": dtype})
