# SPDX-License-Identifier: Apache-2.0
"""Let the library accumulate matmuls into the tensor that they are added to.

The gradient of a weight that only an SGD update reads is such a matmul: it needs no memory of its
own, and is not written and read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst

from amp_ir.host import native
from amp_ir.ir.dataflow import DPS_CALL, Dataflow, variables_of
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import LibraryMatmul, read, write
from amp_ir.ir.location import join_spans
from amp_ir.ir.multiples import factored, is_float32
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.step_module import OutputSpec

MATMUL = "amp_ir.onednn.matmul"
ACCUMULATE = "amp_ir.onednn.matmul_accumulate"

_SUMS = ("relax.add", "relax.subtract")
_VIEWS = ("relax.reshape", "relax.permute_dims")


def accumulate_matmuls(
    ir: tvm.IRModule,
    outputs: Sequence[OutputSpec],
    *,
    log: DispatchLog | None = None,
) -> tvm.IRModule:
    """Let oneDNN add matmuls to a tensor in float32, instead of a kernel that adds them.

    Before:  g = onednn.matmul(d, x); p1 = add(p, multiply(g, -lr))           # p1 updates p
    After:   p1 = onednn.matmul_accumulate(d, x, p, alpha=-lr)                # written over p

    Before:  g = onednn.matmul(d, x); m1 = add(multiply(m, mu), add(g, h))    # m1 updates m
    After:   g = onednn.matmul_accumulate(d, x, m, beta=mu); m1 = add(g, h)

    Before:  g = add(onednn.matmul(d0, x0), onednn.matmul(d1, x1))
    After:   g = onednn.matmul_accumulate(d1, x1, onednn.matmul(d0, x0))

    The pass splits a sum through sums, negations and factors of one number, as far as nothing else
    reads the intermediate values. It adds the matmuls, in order, to the state that the sum is the
    new value of, or else to the first of them; it adds the other terms afterwards, in their order:
    a gradient of a table, to its few rows. The factors are evaluated when the step runs.

    Where the old state is in a sum twice, with a weight decay but without a momentum, its matmuls
    are not added to it: p * (1 - lr * decay) would lose a decay below 2^-24, in float32. A sum with
    one matmul and no state is left to a kernel, which reads both in the same pass over memory as
    its reader.

    Requires: `dispatch` and `fold_casts` have run, and `prepack_weights`: packed calls remain
              unchanged. `outputs` are those of `main`, in order.
    Ensures:  only float32 sums change; each is the same sum in another order, and so is its error.
              The call reads the state after what else reads it, as far as bindings show. Nothing
              changes for other libraries than oneDNN. The pass records each change in `log`.
    """
    log = DispatchLog() if log is None else log
    return _Accumulator(ir, outputs, log).run()


@attrs.frozen(eq=False)
class _Term:
    """`leaf` times all `factors`, the innermost first; sums consist of these."""

    leaf: relax.Expr
    factors: tuple[relax.Expr, ...]


class _Accumulator:
    def __init__(
        self,
        ir: tvm.IRModule,
        outputs: Sequence[OutputSpec],
        log: DispatchLog,
    ) -> None:
        self.log = log
        self.flow = Dataflow(ir)
        self.values = dict(self.flow.values)
        read_ = {variable: _matmul(value) for variable, value in self.values.items()}
        self.matmuls = {variable: one for variable, one in read_.items() if one is not None}
        # Bindings are written in the order of these places; new ones share that of an old one.
        self.place = {variable: k for k, variable in enumerate(self.flow.values)}
        self.readers, self.uses = self.flow.readers, self.flow.uses
        self.parameters = set(self.flow.main.params)
        self.state_of = self._states(outputs)
        self.builder = relax.BlockBuilder()
        self.added: list[relax.VarBinding] = []
        self.replaced: set[relax.Var] = set()

    def run(self) -> tvm.IRModule:
        if not native.has(ACCUMULATE):
            return self.flow.ir
        totals = {self._total_of(variable) for variable in self.matmuls}
        for total in sorted(totals - {None}, key=lambda one: -self.place[one]):
            self._rewrite(total)
        if not self.added:
            return self.flow.ir
        kept = [b for b in self.flow.bindings if b.var not in self.replaced]
        # A stable sort: a binding added at a place follows the existing ones there.
        rewritten = sorted([*kept, *self.added], key=lambda binding: self.place[binding.var])
        return self.flow.finish(rewritten)

    # Analysis of the step.

    def _states(self, outputs: Sequence[OutputSpec]) -> dict[relax.Var, relax.Var]:
        """Return, for each new value of a state, the parameter that it is the new value of."""
        result = self.flow.result
        fields = self.values.get(result, result)
        if not isinstance(fields, relax.Tuple):
            return {}
        pairs = zip(fields.fields, outputs, strict=True)
        return {f: self.flow.main.params[o.updates] for f, o in pairs if o.updates is not None}

    def _total_of(self, matmul: relax.Var) -> relax.Var | None:
        """Return the last sum after a matmul that nothing else reads; None if it is in no sum."""
        total, one = None, matmul
        while self.uses.get(one) == 1 and one in self.readers:
            reader = self.readers[one][0]
            value = self.values[reader]
            is_view = isinstance(value, relax.Call) and value.op.name == "relax.reshape"
            if _is_sum(value):
                total = reader
            elif not _parts(value) and not (is_view and total is None):
                break
            one = reader
        return total

    def _terms(self, total: relax.Var) -> tuple[list[_Term], set[relax.Var]]:
        """Return the terms of a sum, from left to right, and its intermediate values."""
        terms: list[_Term] = []
        inside: set[relax.Var] = set()
        waiting: list[tuple[relax.Expr, tuple[relax.Expr, ...]]] = [(total, ())]
        while waiting:  # a stack, since a sum may have thousands of terms
            one, factors = waiting.pop()
            is_inner = isinstance(one, relax.Var) and self.uses.get(one) == 1
            parts = _parts(self.values.get(one)) if is_inner or one is total else []
            if not parts:
                terms.append(_Term(one, factors))
                continue
            inside.add(one)
            waiting += [(part, (*own, *factors)) for part, own in reversed(parts)]
        return terms, inside

    def _matmul_at(self, leaf: relax.Expr) -> relax.Var | None:
        """Return the matmul that `leaf` is, perhaps reshaped, if only this sum reads it."""
        while isinstance(leaf, relax.Var) and self.uses.get(leaf) == 1:
            if leaf in self.matmuls:
                return leaf
            call = self.values.get(leaf)
            if not isinstance(call, relax.Call) or call.op.name != "relax.reshape":
                return None
            leaf = call.args[0]
        return None

    def _base(
        self, total: relax.Var, terms: list[_Term], matmuls: list[_Term], inside: set[relax.Var]
    ) -> _Term | None:
        """Return the term to which matmuls are added; None where they are not."""
        state = self.state_of.get(total)
        old = [term for term in terms if state is not None and term.leaf.same_as(state)]
        is_free = bool(matmuls) and self._last_read(state, inside) < self.place[total]
        if len(old) == 1 and is_free:
            return old[0]
        return matmuls[0] if len(matmuls) > 1 else None

    def _last_read(self, state: relax.Expr, inside: set[relax.Var]) -> int:
        """Return the place of the last call, except `inside`, that reads an old value; -1: none."""
        last, names = -1, [state]
        for name in names:
            for reader in self.readers.get(name, ()):
                value = self.values[reader]
                if reader in inside or not isinstance(value, relax.Call):
                    continue
                last = max(last, self.place[reader])
                if value.op.name in _VIEWS:
                    names.append(reader)
        return last

    # Construction of the new bindings.

    def _rewrite(self, total: relax.Var) -> None:
        """Write the sum with calls that add its matmuls, if that saves time."""
        terms, inside = self._terms(total)
        matmuls = [term for term in terms if self._matmul_at(term.leaf) is not None]
        matmuls.sort(key=lambda term: self.place[self._matmul_at(term.leaf)])
        base = self._base(total, terms, matmuls, inside)
        if base is None:
            return
        added = [term for term in matmuls if term is not base]
        rest = [term for term in terms if term is not base and term not in added]
        # The common factor is applied outside, except for a state.
        is_state = base not in matmuls
        outer = () if rest or is_state else _common_end([one.factors for one in matmuls])
        earliest = self._last_read(base.leaf, inside) if is_state else -1
        sum_ = base.leaf
        beta = self._factor(base.factors, outer)
        for term in added:
            alpha = self._factor(term.factors, outer)
            call = self._accumulate(total, sum_, term, alpha, beta)
            is_last = term is added[-1] and not rest and not outer
            earliest = max(earliest, self.place[self._matmul_at(term.leaf)])
            sum_ = self._bind(call, total if is_last else None, earliest)
            beta = None
            self.log.add("accumulate", "onednn", "only a sum reads the matmul")
        self._finish(total, sum_, rest, outer)

    def _accumulate(
        self,
        total: relax.Var,
        base: relax.Expr,
        term: _Term,
        alpha: relax.Expr | None,
        beta: relax.Expr | None,
    ) -> relax.Call:
        matmul = self.matmuls[self._matmul_at(term.leaf)]
        span = join_spans([matmul.span, self.values[total].span])
        return write(
            attrs.evolve(matmul, c=base, alpha=alpha, beta=beta, type_=total.ty, span=span)
        )

    def _factor(
        self, factors: tuple[relax.Expr, ...], outer: tuple[relax.Expr, ...]
    ) -> relax.Expr | None:
        """Return the product of numbers, except the last that are `outer`; None for 1."""
        known, product = np.float32(1.0), None
        for one in factors[: len(factors) - len(outer)]:
            if isinstance(one, GenericConst):
                known = known * np.float32(one.value.numpy())
            elif product is None:
                product = self._early(one)
            else:
                product = self._bind(relax.op.multiply(product, self._early(one)))
        if product is None:
            return None if known == 1.0 else relax.const(known, "float32")
        if known == 1.0:
            return product
        return self._bind(relax.op.multiply(product, relax.const(known, "float32")))

    def _early(self, number: relax.Var) -> relax.Var:
        """Return the number, computed at the start of the step where possible."""
        chain, waiting = [], [number]
        while waiting:
            one = waiting.pop()
            if one in self.parameters:
                continue
            value = self.values[one]
            if not isinstance(value, relax.Call) or shape_of(one) != ():
                return number
            chain.append(one)
            waiting += variables_of(value)
        for one in chain:
            self.place[one] = -1
        return number

    def _finish(
        self,
        total: relax.Var,
        sum_: relax.Expr,
        rest: list[_Term],
        outer: tuple[relax.Expr, ...],
    ) -> None:
        """Add the other terms where the sum was bound."""
        span, place = self.values[total].span, self.place[total]
        calls = []
        for term in rest:
            calls.append((relax.op.add, self._times(term.leaf, term.factors, place, span)))
        calls += [(relax.op.multiply, factor) for factor in outer]
        for k, (make, other) in enumerate(calls):
            name = total if k == len(calls) - 1 else None
            sum_ = self._bind(make(sum_, other), name, place, span)

    def _times(
        self,
        one: relax.Expr,
        factors: tuple[relax.Expr, ...],
        place: int,
        span: tvm.ir.Span | None,
    ) -> relax.Expr:
        for factor in factors:
            one = self._bind(relax.op.multiply(one, factor), None, place, span)
        return one

    def _bind(
        self,
        call: relax.Call,
        variable: relax.Var | None = None,
        earliest: int = -1,
        span: tvm.ir.Span | None = None,
    ) -> relax.Var:
        """Bind a call after the values that it reads, at `earliest` or later."""
        if span is not None:
            call = relax.Call(call.op, call.args, call.attrs, call.ty_args, span)
        if call.op.name != DPS_CALL:
            call = self.builder.normalize(call)
        reads = [self.place.get(one, -1) for one in variables_of(call)]
        if variable is None:
            variable = relax.DataflowVar(f"accumulated{len(self.added)}", call.ty)
        else:
            self.replaced.add(variable)
        self.values[variable] = call
        self.place[variable] = max([earliest, *reads])
        self.added.append(relax.VarBinding(variable, call))
        return variable


def _parts(call: relax.Expr | None) -> list[tuple[relax.Expr, tuple[relax.Expr, ...]]]:
    """Return the terms of a sum or of a multiple, with their factors; none for other values."""
    if isinstance(call, relax.Call) and _is_sum(call):
        sign = (relax.const(-1.0, "float32"),) if call.op.name == "relax.subtract" else ()
        return [(call.args[0], ()), (call.args[1], sign)]
    is_full = isinstance(call, relax.Call) and is_float32(call.ty)
    multiple = factored(call) if is_full else None
    return [] if multiple is None else [(multiple[0], (multiple[1],))]


def _is_sum(call: relax.Expr | None) -> bool:
    """Return whether it adds or subtracts float32 tensors of one shape."""
    if not isinstance(call, relax.Call) or call.op.name not in _SUMS or not is_float32(call.ty):
        return False
    return shape_of(call.args[0]) == shape_of(call.args[1]) != ()


def _matmul(value: relax.Expr) -> LibraryMatmul | None:
    """Return a oneDNN matmul with an unprocessed float32 result; None for other values."""
    call = read(value)
    if not isinstance(call, LibraryMatmul) or call.symbol != MATMUL or not is_float32(value.ty):
        return None
    return call if call.epilogue == "none" else None


def _common_end(tuples: list[tuple[relax.Expr, ...]]) -> tuple[relax.Expr, ...]:
    """Return the last factors that all terms share."""
    first, count = tuples[0], 0
    while all(len(one) > count and one[-1 - count].same_as(first[-1 - count]) for one in tuples):
        count += 1
    return first[len(first) - count :]
