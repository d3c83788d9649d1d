# SPDX-License-Identifier: Apache-2.0
"""Replace a sum of matmuls for a weight that a step uses several times by one matmul.

The gradient of such a weight is a sum with a term for each use: an unrolled recurrence has one per
time step, of a few rows each. The sum of the matmuls equals one matmul of the concatenated
operands. A library computes that matmul at full speed, without writing and adding up a tensor of
the weight's size for each term. All terms are added in one float32 accumulation, so the
result is at least as exact.

This runs before autocast, for the step as it was captured: the rules, the placement and the plan
then refer to the matmul that runs, and a weight's gradient remains one that feeds the optimizer.
After it the terms would carry casts of their own, whose order of rounding a merge would have to
prove again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs
import tvm
from tvm import relax

from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.location import Location, from_span, join_spans
from amp_ir.ir.strided_view import permutation
from amp_ir.ir.tensor_layout import dtype_nbytes

# Sums in these lose nothing by being added up in another order; in a narrower dtype each sum is
# rounded, and the user wrote it so.
_WIDE_DTYPES = ("float32", "float64")


def concat_matmuls(ir: tvm.IRModule) -> tvm.IRModule:
    """Turn sums of matmuls into matmuls of concatenations.

    Before:  y = add(add(matmul(a0, b0), matmul(a1, b1)), matmul(a2, b2))
    After:   y = matmul(concat([a0, a1, a2], axis=1), concat([b0, b1, b2], axis=0))

    Before:  y = add(sum(a0, axis=[0]), sum(a1, axis=[0])); c = concat([a1, a0], axis=0)
    After:   c = concat([a1, a0], axis=0); y = sum(c, axis=[0])

    - Operands that are transposes are concatenated in their memory layout, then transposed.
    - A concatenation that the step already has is used, in its order.
    - Terms go into one matmul as long as the operands that must be held for it are no larger than
      its result; then the next matmul begins. So a step holds no more than the sum of the terms
      so far, which it would hold otherwise, and moves fewer bytes.
    - Sums over rows are merged only over an existing concatenation.

    Requires: one function `main`, one dataflow block, static shapes.
    Ensures:  only sums of float32 or float64 change, and only of terms from one module and phase;
              terms and partial sums that other ops read are kept; the new calls name the locations
              of all their terms; a step without such a sum is returned unchanged.
    """
    merger = _Merger(ir)
    return merger.run() if merger.sums else ir


@attrs.frozen(eq=False)
class _Operand:
    """One operand of a matmul: `base` or its transpose, concatenated along `axis` of `base`."""

    base: relax.Expr
    axis: int
    is_transposed: bool

    @property
    def nbytes(self) -> int:
        return _nbytes(self.base.ty)


@attrs.frozen(eq=False)
class _Term:
    """A term of a sum: a matmul of two operands, or the sum of a tensor over its rows.

    `reshape` is what is done to a sum over rows before it is added.
    """

    variable: relax.Expr
    call: relax.Call | None = None
    operands: tuple[_Operand, ...] = ()
    reshape: relax.Call | None = None


@attrs.frozen(eq=False)
class _Concat:
    """A concatenation that the step has; `parts` are its fields in order."""

    variable: relax.Var
    call: relax.Call
    parts: tuple[relax.Expr, ...]
    axis: int


class _Merger:
    def __init__(self, ir: tvm.IRModule) -> None:
        self.flow = Dataflow(ir)
        bound = self.flow.values.items()
        self.values = {one: value for one, value in bound if isinstance(value, relax.Call)}
        self.sums: dict[relax.Var, list[relax.Expr]] = {}
        # The two arguments of every sum, and who computes them.
        self.totals = {v: list(call.args) for v, call in self.values.items() if _is_sum(call)}
        arguments = (self.values.get(one) for pair in self.totals.values() for one in pair)
        if sum(map(_is_matmul, arguments)) > 1:
            self.sums = self._find_sums()

    def run(self) -> tvm.IRModule:
        self.builder = relax.BlockBuilder()
        self.concats: dict[frozenset[relax.Expr], list[_Concat]] = {}
        for variable, call in self.values.items():
            self._note_concat(variable, call)
        self.bound: set[relax.Var] = set()
        self.out: list[relax.VarBinding] = []
        has_changed = False
        for binding in self.flow.bindings:
            if binding.var in self.bound:
                continue
            terms = self.sums.get(binding.var)
            merged = None if terms is None else self._merged(terms)
            if merged is not None:
                has_changed = True
                merged = self.out.pop().value
            self._bind(binding.var, binding.value if merged is None else merged)
        if not has_changed:
            return self.flow.ir
        return self.flow.finish(self.out)

    # Collection of the terms of sums.

    def _find_sums(self) -> dict[relax.Var, list[relax.Expr]]:
        """Return the terms of each outermost sum in which two or more terms may be merged."""
        inner = {one for pair in self.totals.values() for one in pair if self._is_partial(one)}
        found = {}
        for total in self.totals:
            if total not in inner:
                terms = self._terms(total)
                if sum(bool(self._term(term).operands) for term in terms) > 1:
                    found[total] = terms
        return found

    def _is_partial(self, variable: relax.Expr) -> bool:
        return variable in self.totals and self.flow.uses.get(variable) == 1

    def _terms(self, total: relax.Var) -> list[relax.Expr]:
        """Return the terms from left to right; uses a stack, since a sum may have thousands."""
        terms: list[relax.Expr] = []
        waiting = list(reversed(self.totals[total]))
        while waiting:
            one = waiting.pop()
            if self._is_partial(one):
                waiting += reversed(self.totals[one])
            else:
                terms.append(one)
        return terms

    def _term(self, variable: relax.Expr) -> _Term:
        call = self.values.get(variable)
        if call is None or self.flow.uses.get(variable) != 1:
            return _Term(variable)
        if _is_matmul(call):
            return _Term(variable, call, (self._operand(call, 0), self._operand(call, 1)))
        reshape = None
        if call.op.name == "relax.reshape" and self.flow.uses.get(call.args[0]) == 1:
            reshape, call = call, self.values.get(call.args[0])
        if call is None or not _adds_rows(call):
            return _Term(variable)
        rows = _Operand(call.args[0], 0, is_transposed=False)
        return _Term(variable, call, (rows,), reshape)

    def _operand(self, matmul: relax.Call, position: int) -> _Operand:
        argument = matmul.args[position]
        summed = 1 - position
        call = self.values.get(argument)
        if call is not None and _is_transpose(call):
            return _Operand(call.args[0], 1 - summed, is_transposed=True)
        return _Operand(argument, summed, is_transposed=False)

    # Construction of the merged matmuls.

    def _merged(self, variables: Sequence[relax.Expr]) -> relax.Expr | None:
        """Return the sum with all mergeable terms merged; None where no terms can be merged."""
        kinds: dict[object, list[_Term]] = {}
        for variable in variables:
            term = self._term(variable)
            kinds.setdefault(_kind(term), []).append(term)
        terms: list[relax.Expr] = []
        for kind in kinds.values():
            if len(kind[0].operands) == 2:
                terms += self._concatenated_matmuls(kind)
            elif len(kind[0].operands) == 1:
                terms += self._row_sums(kind)
            else:
                terms += [term.variable for term in kind]
        if len(terms) == len(variables):
            return None
        total, *rest = terms
        for term in rest:
            total = self._emit(relax.op.add(total, term), None)
        return total

    def _concatenated_matmuls(self, terms: list[_Term]) -> list[relax.Expr]:
        if len(terms) == 1:
            return [terms[0].variable]
        order = self._order_of_concat(terms)
        if order is not None:
            return [self._concatenated_matmul(order)]
        return [self._concatenated_matmul(chunk) for chunk in _chunks(terms)]

    def _order_of_concat(self, terms: list[_Term]) -> list[_Term] | None:
        """Return the terms in the order of an existing concatenation of the larger operands.

        The other operands must be small enough to be held.
        """
        sides = range(len(terms[0].operands))
        for side in sorted(sides, key=lambda k: -sum(term.operands[k].nbytes for term in terms)):
            known = self._known_concat([term.operands[side] for term in terms])
            others = sum(t.operands[k].nbytes for t in terms for k in sides if k != side)
            if known is not None and others <= _nbytes(terms[0].variable.ty):
                by_base = {term.operands[side].base: term for term in terms}
                return [by_base[part] for part in known.parts]
        return None

    def _known_concat(self, operands: Sequence[_Operand]) -> _Concat | None:
        parts = frozenset(one.base for one in operands)
        if len(parts) < len(operands):
            return None
        found = (one for one in self.concats.get(parts, ()) if one.axis == operands[0].axis)
        return next(found, None)

    def _concatenated_matmul(self, terms: Sequence[_Term]) -> relax.Expr:
        if len(terms) == 1:
            return terms[0].variable
        first = terms[0].call
        assert first is not None
        span = join_spans(term.call.span for term in terms if term.call is not None)
        sides = []
        for side in range(2):
            operands = [term.operands[side] for term in terms]
            operand = self._concatenated(operands, span)
            if operands[0].is_transposed:
                operand = self._emit(relax.op.permute_dims(operand, [1, 0]), span)
            sides.append(operand)
        out_dtype = first.attrs.out_dtype
        return self._emit(relax.op.matmul(*sides, out_dtype=out_dtype), span)

    def _concatenated(self, operands: Sequence[_Operand], span: tvm.ir.Span | None) -> relax.Expr:
        known = self._known_concat(operands)
        parts = tuple(one.base for one in operands)
        if known is not None and known.parts == parts:
            # Its parts are what the terms are computed from, so it can be bound here.
            self._bind(known.variable, known.call)
            return known.variable
        new = self._emit(relax.op.concat(list(parts), operands[0].axis), span)
        self._note_concat(new, self.values[new])
        return new

    def _row_sums(self, terms: list[_Term]) -> list[relax.Expr]:
        known = self._known_concat([term.operands[0] for term in terms])
        first = terms[0].call
        if known is None or first is None:
            return [term.variable for term in terms]
        span = join_spans(term.call.span for term in terms if term.call is not None)
        self._bind(known.variable, known.call)
        axes, keepdims = first.attrs.axis, first.attrs.keepdims
        total = self._emit(relax.op.sum(known.variable, axes, keepdims), span)
        if terms[0].reshape is not None:
            total = self._emit(relax.op.reshape(total, terms[0].reshape.args[1]), span)
        return [total]

    # State of the written bindings.

    def _note_concat(self, variable: relax.Var, call: relax.Call) -> None:
        if call.op.name != "relax.concat" or not isinstance(call.args[0], relax.Tuple):
            return
        parts = tuple(call.args[0].fields)
        each_once = frozenset(parts)
        if len(each_once) == len(parts):
            axis = int(call.attrs.axis) % len(call.ty.shape)
            known = _Concat(variable, call, parts, axis)
            self.concats.setdefault(each_once, []).append(known)

    def _bind(self, variable: relax.Var, value: relax.Expr) -> None:
        if variable not in self.bound:
            self.bound.add(variable)
            self.out.append(relax.VarBinding(variable, value))

    def _emit(self, call: relax.Call, span: tvm.ir.Span | None) -> relax.Var:
        located = relax.Call(call.op, call.args, call.attrs, call.ty_args, span)
        value = self.builder.normalize(located)
        variable = relax.DataflowVar(f"merged{len(self.out)}", value.ty)
        self.values[variable] = value
        self._bind(variable, value)
        return variable


def _chunks(terms: Sequence[_Term]) -> Iterator[list[_Term]]:
    """Group consecutive terms whose operands are no larger than the result, and single terms."""
    most = _nbytes(terms[0].variable.ty)
    chunk: list[_Term] = []
    held = 0
    for term in terms:
        nbytes = sum(operand.nbytes for operand in term.operands)
        if chunk and held + nbytes > most:
            yield chunk
            chunk, held = [], 0
        chunk.append(term)
        held += nbytes
    yield chunk


def _kind(term: _Term) -> object:
    """Return the kind of a term; only terms of one kind are merged, others have their own kind."""
    call = term.call
    if call is None:
        return "other"
    place: Location = from_span(call.span)
    operands = tuple((str(one.base.ty.dtype), one.axis, one.is_transposed) for one in term.operands)
    trailing = [int(n) for n in call.args[0].ty.shape][1:] if len(operands) == 1 else []
    where = (place.module, place.phase, place.precision)
    return (*where, str(call.attrs), operands, *trailing, term.reshape is None)


def _is_sum(call: relax.Call) -> bool:
    """Return whether it adds two tensors of one shape in a dtype whose order does not matter."""
    if call.op.name != "relax.add" or str(call.ty.dtype) not in _WIDE_DTYPES:
        return False
    left, right = ([int(n) for n in argument.ty.shape] for argument in call.args)
    return left == right


def _is_matmul(call: relax.Call | None) -> bool:
    if call is None or call.op.name != "relax.matmul":
        return False
    return all(len(argument.ty.shape) == 2 for argument in call.args)


def _is_transpose(call: relax.Call) -> bool:
    return call.op.name == "relax.permute_dims" and permutation(call) == [1, 0]


def _adds_rows(call: relax.Call) -> bool:
    if call.op.name != "relax.sum" or call.attrs.axis is None:
        return False
    return [int(a) for a in call.attrs.axis] == [0] and isinstance(call.args[0], relax.Var)


def _nbytes(ty: relax.TensorType) -> int:
    return math.prod(int(extent) for extent in ty.shape) * dtype_nbytes(str(ty.dtype))
