# SPDX-License-Identifier: Apache-2.0
"""Lowering of group normalization, in the layout that the images have in memory.

With channels first an image is [n, groups, channels per group, space], and a group is a row. With
channels last it is [n, parts, pixels, channels]: sums per channel over the pixels of a part, which
read memory in its order, and then sums over the parts and channels of a group, which are few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from amp_ir.loops.builders import (
    are_channels_last,
    channels_first,
    pointwise,
    reduce,
    reshape,
    with_channels_last,
)
from amp_ir.loops.ir import Value
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.loops.lowerings.normalization import (
    Body,
    input_gradient,
    mean_over,
    normalized,
    optional,
    statistics,
    weight_gradient,
)

_GROUP_AXES = (2, 3)
# Sums of a sample are cut into parts until there are as many as this, for threads.
_PARTS = 16


def _grouped(x: Value, groups: int) -> Value:
    n, channels, *space = x.shape
    return reshape(x, (n, groups, channels // groups, math.prod(space)))


def _by_group(statistic: Value) -> Value:
    return reshape(statistic, (*statistic.shape, 1, 1))


def _by_channel(values: Sequence[Value | None], groups: int) -> list[Value | None]:
    """Reshape [channels] to [groups, channels per group, 1]."""
    return [
        None if one is None else reshape(one, (groups, one.shape[0] // groups, 1)) for one in values
    ]


@attrs.frozen
class _Pixels:
    """Images of `shape` as [n, parts, pixels, channels], as they are where channels are last."""

    shape: tuple[int, ...]
    groups: int

    @property
    def parts(self) -> int:
        """Into how many parts the pixels of a sample are cut."""
        n, space = self.shape[0], math.prod(self.shape[2:])
        enough = (k for k in range(1, min(space, _PARTS) + 1) if space % k == 0 and n * k >= _PARTS)
        return next(enough, 1)

    def seen(self, x: Value) -> Value:
        """Reshape an image to this form."""
        n, channels, *space = x.shape
        pixels = math.prod(space) // self.parts
        return reshape(with_channels_last(x), (n, self.parts, pixels, channels))

    def image(self, x: Value) -> Value:
        """Reshape a value in this form to an image."""
        n, channels, *space = self.shape
        return channels_first(reshape(x, (n, *space, channels)))

    def mean(self, body: Body, dtype: str) -> Value:
        """Return the mean of `body` over each group, f[n, 1, groups, 1]."""
        n, channels, *space = self.shape
        size, count = channels // self.groups, math.prod(space)
        pixels = (n, self.parts, count // self.parts, channels)
        sums = reduce("sum", pixels, (2,), body, dtype)
        split = reshape(sums, (n, self.parts, self.groups, size))
        return reduce("sum", split.shape, (1, 3), lambda *i: split[i], dtype, divisor=size * count)

    def by_channel(self, statistic: Value) -> Value:
        """Return a statistic of groups for each channel, f[n, 1, 1, channels], in memory."""
        n, channels = self.shape[:2]
        grouped = reshape(statistic, (n, 1, self.groups, 1))
        shape = (n, 1, self.groups, channels // self.groups)
        # Its readers would divide the number of each element's channel.
        copy = pointwise(shape, statistic.dtype, lambda *i: grouped[i], is_kept=True)
        return reshape(copy, (n, 1, 1, channels))


@lowers("amp_ir.group_norm")
def group_norm(
    op: Lowering,
    x: Value,
    *rest: Value,
    groups: int,
    eps: float,
    has_weight: bool = True,
    has_bias: bool = True,
) -> tuple[Value, ...]:
    """Compute two sums per group, then one pass."""
    weight, bias = optional(rest, has_weight, has_bias)
    dtype, shape = op.results[0].dtype, op.results[1].shape
    if not are_channels_last(x):
        grouped = _grouped(x, groups)
        mean, _, rstd = statistics(grouped, mean_over(grouped, _GROUP_AXES), eps)
        weight, bias = _by_channel((weight, bias), groups)
        y = reshape(normalized(grouped, mean, rstd, weight, bias, dtype), x.shape)
        return y, reshape(mean, shape), reshape(rstd, shape)
    form = _Pixels(x.shape, groups)
    pixels = form.seen(x)

    mean, _, rstd = statistics(pixels, form.mean, eps, form.by_channel)
    y = normalized(pixels, form.by_channel(mean), form.by_channel(rstd), weight, bias, dtype)
    return form.image(y), reshape(mean, shape), reshape(rstd, shape)


@lowers("amp_ir.group_norm_backward_input")
def group_norm_backward_input(
    op: Lowering,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    *rest: Value,
    groups: int,
    has_weight: bool = True,
) -> Value:
    """Compute two sums per group, then one pass."""
    dtype = op.results[0].dtype
    (weight,) = optional(rest, has_weight)
    if not are_channels_last(grad, x):
        (weight,) = _by_channel((weight,), groups)
        gradient, seen = _grouped(grad, groups), _grouped(x, groups)
        dx = input_gradient(
            gradient, seen, _by_group(mean), _by_group(rstd), weight,
            mean_over(gradient, _GROUP_AXES), dtype,
        )  # fmt: skip
        return reshape(dx, x.shape)
    form = _Pixels(x.shape, groups)
    gradient, seen = form.seen(grad), form.seen(x)

    def mean_of(body: Body, dtype: str) -> Value:
        return form.by_channel(form.mean(body, dtype))

    statistic = form.by_channel(mean), form.by_channel(rstd)
    return form.image(input_gradient(gradient, seen, *statistic, weight, mean_of, dtype))


@lowers("amp_ir.group_norm_backward_weight")
def group_norm_backward_weight(
    op: Lowering, grad: Value, x: Value, mean: Value, rstd: Value, *, groups: int
) -> tuple[Value, ...]:
    """Compute two sums per channel in one pass."""
    result = op.results[0]
    if not are_channels_last(grad, x):
        axes: tuple[int, ...] = (0, 3)
        gradient = _grouped(grad, groups)
        seen, statistic = _grouped(x, groups), (_by_group(mean), _by_group(rstd))
    else:
        form = _Pixels(x.shape, groups)
        gradient, axes = form.seen(grad), (0, 1, 2)
        seen, statistic = form.seen(x), (form.by_channel(mean), form.by_channel(rstd))
    dweight = weight_gradient(gradient, seen, *statistic, axes, result.dtype)
    dbias = reduce("sum", gradient.shape, axes, lambda *i: gradient[i], result.dtype)
    return reshape(dweight, result.shape), reshape(dbias, result.shape)
