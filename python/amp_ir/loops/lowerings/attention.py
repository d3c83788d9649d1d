# SPDX-License-Identifier: Apache-2.0
"""Lowering of the softmax-like ops of attention: scale, mask, softmax and dropout in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from amp_ir.dialect.attention_parts import Options
from amp_ir.dialect.random import survivor_scale
from amp_ir.loops import math as m
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import pointwise, reduce, reshape
from amp_ir.loops.ir import Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.loops.lowerings.random import keys_of, uniform_element


@attrs.frozen(eq=False)
class _Scores:
    """The scores of one attention after scale and mask, element by element."""

    scores: Value
    mask: Value | None
    keys: Value | None
    options: Options
    dtype: str

    @classmethod
    def of(cls, scores: Value, rest: Sequence[Value], options: dict[str, Any]) -> _Scores:
        """Build from an op's arguments: `rest` is the mask and the random state, if any."""
        taken = Options(**options)
        mask = rest[0] if taken.has_mask else None
        keys = keys_of(rest[-1], taken.index) if taken.dropout_p > 0 else None
        return cls(scores, mask, keys, taken, compute_dtype(scores.dtype))

    def logit(self, *i: Any) -> Any:
        """Return scale * score + mask, or -inf where the row does not see the column."""
        value = m.product(self.scores[i], m.constant(self.options.scale, self.dtype))
        hidden = m.constant(float("-inf"), self.dtype)
        if self.mask is not None and self.mask.dtype != "bool":
            value = value + m.cast(self.mask[i], self.dtype)
        elif self.mask is not None:
            value = m.select(self.mask[i], value, hidden)
        if self.options.is_causal:
            value = m.select(i[-1] <= i[-2], value, hidden)
        # The maximum and the log-sum that are subtracted are of rounded logits.
        return let(m.rounded(value))

    def kept(self, weight: Any, *i: Any) -> Any:
        """Return a weight after dropout."""
        if self.keys is None:
            return weight
        p = self.options.dropout_p
        stays = uniform_element(self.keys, i, self.scores.shape) >= m.constant(p)
        scaled = weight * m.constant(survivor_scale(p), self.dtype)
        return m.select(stays, scaled, m.constant(0.0, self.dtype))

    def over_row(self, kind: Any, body: Callable[..., Any]) -> Value:
        """Reduce over the columns."""
        return reduce(kind, self.scores.shape, (len(self.scores.shape) - 1,), body, self.dtype)


def _row(statistic: Value) -> Value:
    return reshape(statistic, (*statistic.shape, 1))


@lowers("amp_ir.attention_probabilities")
def attention_probabilities(
    op: Lowering, scores: Value, *rest: Value, out_dtype: str | None = None, **options: Any
) -> tuple[Value, Value]:
    """Compute the maximum, the sum of exponentials, then the weights."""
    seen = _Scores.of(scores, rest, options)
    zero, one = m.constant(0.0, seen.dtype), m.constant(1.0, seen.dtype)
    peak = seen.over_row("largest", seen.logit)
    # A row that sees nothing has the maximum -inf; with 0 instead its exponentials are 0.
    shift = pointwise(
        peak.shape, seen.dtype,
        lambda *i: m.select(peak[i] == m.constant(float("-inf"), seen.dtype), zero, peak[i]),
    )  # fmt: skip
    exponential = pointwise(
        scores.shape, seen.dtype, lambda *i: m.exp(seen.logit(*i) - shift[i]), is_held=True
    )
    total = seen.over_row("sum", lambda *i: exponential[i])
    safe = pointwise(total.shape, seen.dtype, lambda *i: m.select(total[i] == zero, one, total[i]))
    lse = pointwise(total.shape, op.results[1].dtype, lambda *i: shift[i] + m.log(safe[i]))
    scale = pointwise(total.shape, seen.dtype, lambda *i: one / safe[i])

    def weight(*i: Any) -> Any:
        return seen.kept(let(exponential[i] * scale[i]), *i)

    weights = pointwise(scores.shape, op.results[0].dtype, weight)
    return weights, reshape(lse, op.results[1].shape)


@lowers("amp_ir.attention_weights")
def attention_weights(
    op: Lowering,
    scores: Value,
    lse: Value,
    *rest: Value,
    out_dtype: str | None = None,
    **options: Any,
) -> Value:
    """Compute exp(logit - lse), after dropout."""
    seen, row = _Scores.of(scores, rest, options), _row(lse)
    return pointwise(
        scores.shape,
        op.results[0].dtype,
        lambda *i: seen.kept(let(m.exp(seen.logit(*i) - row[i])), *i),
    )


@lowers("amp_ir.attention_score_gradient")
def attention_score_gradient(
    op: Lowering,
    scores: Value,
    lse: Value,
    grad_weights: Value,
    grad: Value,
    out: Value,
    *rest: Value,
    out_dtype: str | None = None,
    **options: Any,
) -> Value:
    """Compute scale * w * (dropout(grad_weights) - sum(grad * out))."""
    seen, row = _Scores.of(scores, rest, options), _row(lse)
    width = len(grad.shape) - 1
    correction = reduce("sum", grad.shape, (width,), lambda *i: grad[i] * out[i], seen.dtype)
    scale = m.constant(seen.options.scale, seen.dtype)

    def body(*i: Any) -> Any:
        weight = let(m.exp(seen.logit(*i) - row[i]))
        return m.product(weight, scale) * (seen.kept(grad_weights[i], *i) - correction[i])

    return pointwise(scores.shape, op.results[0].dtype, body)
