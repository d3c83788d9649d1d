# SPDX-License-Identifier: Apache-2.0
"""Turn attention into matmuls around softmax-like kernels, or into a fused library call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Span

from amp_ir.dialect import call_op, options_of
from amp_ir.dispatch.attention_call import (
    attention_library,
    call_attention,
    unsupported_attention_reason,
)
from amp_ir.dispatch.known_mask import without_known_mask
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.dispatch_log import DispatchLog

FORWARD, BACKWARD = "amp_ir.attention", "amp_ir.attention_backward"


def decompose_attention(
    ir: tvm.IRModule, *, libraries: tuple[str, ...] = (), log: DispatchLog | None = None
) -> tvm.IRModule:
    """Decompose attention and its gradient into matmuls and ops of dialect/attention_parts.py.

    Where one of `libraries` has such an op fused, it becomes that call instead (attention_call.py).

    Before:  out, lse = amp_ir.attention(q, k, v)
    After:   s = matmul(q, k^T, out_dtype=f32)
             p, lse = amp_ir.attention_probabilities(s)     # p: dtype of q
             out = matmul(p, v)

    Before:  dq, dk, dv = amp_ir.attention_backward(grad, q, k, v, out, lse)
    After:   s = matmul(q, k^T, out_dtype=f32); dp = matmul(grad, v^T, out_dtype=f32)
             p = amp_ir.attention_weights(s, lse)           # again, not kept from the forward
             ds = amp_ir.attention_score_gradient(s, lse, dp, grad, out)
             dq = matmul(ds, k); dk = matmul(ds^T, q); dv = matmul(p^T, grad)

    Requires: one function `main`, one dataflow block, static shapes.
    Ensures:  scores and lse are float32 (float64 for float64); weights and the gradient of the
              scores are rounded to the dtype of q, as what the matmuls read; results keep their
              variables, and every new op the location of the one that it replaces; the pass
              records each in `log`.
    Source:   Dao et al. 2022, "FlashAttention", appendix B.2, for the gradient.
    """
    flow = Dataflow(ir)
    if not flow.calls(FORWARD, BACKWARD):
        return ir
    writer = _Writer(libraries, DispatchLog() if log is None else log)
    for binding in flow.bindings:
        writer.add(binding)
    return flow.finish(writer.bindings)


class _Writer:
    """Collect bindings; every call it makes carries the location of the op it replaces."""

    def __init__(self, libraries: tuple[str, ...], log: DispatchLog) -> None:
        self.bindings: list[relax.Binding] = []
        self._libraries = libraries
        self._log = log
        self._values: dict[relax.Var, relax.Expr] = {}
        self._called_results: dict[relax.Var, list[relax.Var]] = {}
        self._masks: dict[Any, dict[str, bool]] = {}
        self._builder = relax.BlockBuilder()
        self._span: Span | None = None

    def add(self, binding: relax.VarBinding) -> None:
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self._called_results:
            # A library call that reads it must see the transpose that it is.
            value = self._called_results[value.tuple_value][value.index]
        elif op_name(value) in (FORWARD, BACKWARD):
            self._span = value.span
            value = self._builder.normalize(relax.Tuple(self._replaced(binding.var, value)))
        self.bindings.append(relax.VarBinding(binding.var, value))
        self._values[binding.var] = self._values.get(value, value)

    def _replaced(self, variable: relax.Var, call: relax.Call) -> list[relax.Var]:
        name = op_name(call)
        library = attention_library(name.removeprefix("amp_ir."), self._libraries)
        reason = "no library that amp_ir calls does it whole"
        if library is not None:
            options = self._simplest_options(call)
            reason = unsupported_attention_reason(library, call, options)
            if not reason:
                self._log.add(name, library)
                self._called_results[variable] = self._called(library, call, options)
                return self._called_results[variable]
        self._log.add(name, "matmuls and own kernels", reason)
        expand = self._forward if name == FORWARD else self._backward
        return expand(list(call.args), options_of(call))

    def _simplest_options(self, call: relax.Call) -> dict[str, Any]:
        """Return the options, with causal instead of a mask that is equivalent to it."""
        options = options_of(call)
        if not options["has_mask"]:
            return options
        q, k, mask = call.args[0], call.args[1], call.args[3]
        if op_name(call) == BACKWARD:
            q, k, mask = call.args[1], call.args[2], call.args[6]
        scores = int(q.ty.shape[-2]), int(k.ty.shape[-2])
        # Layers share a mask, and so do both directions.
        key = (mask, scores, options["is_causal"])
        if key not in self._masks:
            self._masks[key] = without_known_mask(options, mask, self.bindings, scores)
        return {**options, **self._masks[key]}

    def _called(self, library: str, call: relax.Call, options: dict[str, Any]) -> list[relax.Var]:
        new, rows_outside = call_attention(library, call, options, self._values)
        both = self._emit(new)
        results = []
        for k, outside in enumerate(rows_outside):
            result = self._emit(relax.TupleGetItem(both, k))
            results.append(self._permuted(result, [0, 2, 1, 3]) if outside else result)
        return results

    def _emit(self, call: relax.Expr) -> relax.Var:
        value = self._builder.normalize(call)
        var = relax.DataflowVar(f"attention{len(self.bindings)}", value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        self._values[var] = value
        return var

    def _op(self, name: str, args: Sequence[relax.Expr], **options: Any) -> relax.Var:
        return self._emit(call_op(name, list(args), self._span, **options))

    def _matmul(self, a: relax.Expr, b: relax.Expr, dtype: str) -> relax.Var:
        call = relax.op.matmul(a, b, out_dtype=dtype)
        return self._emit(relax.Call(call.op, call.args, call.attrs, call.ty_args, self._span))

    def _transposed(self, x: relax.Expr) -> relax.Var:
        ndim = len(x.ty.shape)
        return self._permuted(x, [*range(ndim - 2), ndim - 1, ndim - 2])

    def _permuted(self, x: relax.Expr, axes: list[int]) -> relax.Var:
        call = relax.op.permute_dims(x, axes)
        return self._emit(relax.Call(call.op, call.args, call.attrs, call.ty_args, self._span))

    def _scores(self, q: relax.Expr, k: relax.Expr) -> relax.Var:
        return self._matmul(q, self._transposed(k), _wide(q))

    def _forward(self, args: list[relax.Expr], options: dict[str, Any]) -> list[relax.Var]:
        (q, k, v), rest = args[:3], args[3:]
        dtype = str(q.ty.dtype)
        both = self._op(
            "amp_ir.attention_probabilities", [self._scores(q, k), *rest], **options,
            out_dtype=dtype,
        )  # fmt: skip
        weights = self._emit(relax.TupleGetItem(both, 0))
        lse = self._emit(relax.TupleGetItem(both, 1))
        return [self._matmul(weights, v, dtype), lse]

    def _backward(self, args: list[relax.Expr], options: dict[str, Any]) -> list[relax.Var]:
        (grad, q, k, v, out, lse), rest = args[:6], args[6:]
        dtype = str(q.ty.dtype)
        scores = self._scores(q, k)
        weights = self._op(
            "amp_ir.attention_weights", [scores, lse, *rest], **options, out_dtype=dtype
        )
        grad_weights = self._matmul(grad, self._transposed(v), _wide(q))
        grad_scores = self._op(
            "amp_ir.attention_score_gradient",
            [scores, lse, grad_weights, grad, out, *rest],
            **options,
            out_dtype=dtype,
        )
        return [
            self._matmul(grad_scores, k, dtype),
            self._matmul(self._transposed(grad_scores), q, dtype),
            self._matmul(self._transposed(weights), grad, dtype),
        ]


def _wide(q: relax.Expr) -> str:
    return "float64" if str(q.ty.dtype) == "float64" else "float32"
