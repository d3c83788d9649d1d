# SPDX-License-Identifier: Apache-2.0
"""Lowering of batch normalization: sums per channel, then a pass over the images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from amp_ir.loops import math as m
from amp_ir.loops.builders import (
    are_channels_last,
    channels_first,
    pointwise,
    reduce,
    reshape,
    with_channels_last,
)
from amp_ir.loops.ir import Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.loops.lowerings.normalization import (
    mean_over,
    normalized,
    one_pass_statistics,
    optional,
    statistics,
    weight_gradient,
)


@attrs.frozen
class _Planes:
    """Images as [n, channels, space], or as [n * space, channels] where channels are last.

    `axes` are those of the sums over everything but the channels.
    """

    shape: tuple[int, ...]
    is_last: bool

    @classmethod
    def of(cls, *images: Value) -> _Planes:
        """Return the form for images of one shape, by their layout in memory."""
        return cls(images[0].shape, are_channels_last(*images))

    @property
    def axes(self) -> tuple[int, ...]:
        return (0,) if self.is_last else (0, 2)

    def seen(self, x: Value) -> Value:
        """Reshape an image to this form."""
        n, channels, *space = x.shape
        if not self.is_last:
            return reshape(x, (n, channels, math.prod(space)))
        return reshape(with_channels_last(x), (n * math.prod(space), channels))

    def image(self, x: Value) -> Value:
        """Reshape a value in this form to an image."""
        n, channels, *space = self.shape
        if not self.is_last:
            return reshape(x, self.shape)
        return channels_first(reshape(x, (n, *space, channels)))

    def columns(self, values: Sequence[Value | None]) -> list[Value | None]:
        """Reshape [channels] so that it broadcasts to this form."""
        if self.is_last:
            return list(values)
        return [None if one is None else reshape(one, (one.shape[0], 1)) for one in values]


def _updated(running: Value, batch: Value, momentum: float, scale: float) -> Value:
    """Return running + momentum * (scale * batch - running)."""
    dtype = compute_dtype(running.dtype)

    def body(*i: Any) -> Any:
        old = running[i]
        new = m.cast(batch[i], dtype) * m.constant(scale, dtype)
        return old + m.constant(momentum, dtype) * (new - old)

    return pointwise(running.shape, running.dtype, body)


@lowers("amp_ir.batch_norm")
def batch_norm(
    op: Lowering,
    x: Value,
    *rest: Value,
    momentum: float,
    eps: float,
    has_weight: bool = True,
    has_bias: bool = True,
    has_running: bool = True,
) -> tuple[Value, ...]:
    """Compute two sums per channel, then one pass; a pass over channels updates the statistics.

    Without free arithmetic the second sum, of squares, waits for the first.
    """
    form = _Planes.of(x)
    planes = form.seen(x)
    flags = (has_weight, has_bias, has_running, has_running)
    weight, bias, running_mean, running_var = optional(rest, *flags)
    mean_of = mean_over(planes, form.axes)
    if op.arithmetic_is_free and compute_dtype(x.dtype) == "float32":
        mean, variance, rstd = one_pass_statistics(planes, mean_of, eps)
    else:
        mean, variance, rstd = statistics(planes, mean_of, eps)
    weight, bias = form.columns((weight, bias))
    y = normalized(planes, mean, rstd, weight, bias, op.results[0].dtype)
    shape = op.results[1].shape
    results = [form.image(y), reshape(mean, shape), reshape(rstd, shape)]
    if running_mean is not None and running_var is not None:
        count = math.prod(x.shape) // x.shape[1]
        # PyTorch keeps the unbiased variance; of one element it is not a number.
        unbiased = count / (count - 1) if count > 1 else math.nan
        results.append(_updated(running_mean, reshape(mean, shape), momentum, 1.0))
        results.append(_updated(running_var, reshape(variance, shape), momentum, unbiased))
    return tuple(results)


@lowers("amp_ir.batch_norm_backward")
def batch_norm_backward(
    op: Lowering, grad: Value, x: Value, *rest: Value, has_weight: bool = True
) -> tuple[Value, ...]:
    """Compute two sums per channel, then one pass."""
    form = _Planes.of(grad, x)
    weight, mean, rstd = form.columns(optional(rest, has_weight, True, True))
    assert mean is not None and rstd is not None
    dtype = op.results[1].dtype
    gradient, planes = form.seen(grad), form.seen(x)
    dbias = reduce("sum", gradient.shape, form.axes, lambda *i: gradient[i], dtype)
    dweight = weight_gradient(gradient, planes, mean, rstd, form.axes, dtype)
    share = m.constant(x.shape[1] / math.prod(x.shape), dtype)

    def body(*i: Any) -> Any:
        normal = (planes[i] - mean[i]) * rstd[i]
        centered = gradient[i] - (dbias[i] + normal * dweight[i]) * share
        scale = rstd[i] if weight is None else rstd[i] * weight[i]
        return centered * scale

    dx = pointwise(gradient.shape, op.results[0].dtype, body)
    shape = op.results[1].shape
    return form.image(dx), reshape(dweight, shape), reshape(dbias, shape)
