# SPDX-License-Identifier: Apache-2.0
"""Group and batch normalization with their backward ops; channels are axis 1.

`space` below stands for any number of axes after the channels. Statistics are float32 (float64
for float64 inputs). Weight, bias and statistics may differ from `x` in floating dtype.
"""

from __future__ import annotations

import torch

from amp_ir.dialect.define import Tensor, define, expect_rest
from amp_ir.errors import OptionError


def _expect_channels(x: Tensor) -> int:
    x.expect_float()
    if x.ndim < 2:
        x.refuse("shape", "(batch, channels, *space)")
    return x.shape[1]


def _expect_groups(x: Tensor, groups: int) -> int:
    channels = _expect_channels(x)
    if groups < 1 or channels % groups:
        raise OptionError(
            f"option groups is {groups} for {x.label} of shape {x.shape}, "
            f"expected a divisor of {channels} channels"
        )
    return channels


def _along_channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape [channels] to [1, channels, 1...], to broadcast with x."""
    return values.reshape((1, -1) + (1,) * (x.ndim - 2))


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x.reshape(x.shape[0], groups, -1)


def _sum_but_channels(x: torch.Tensor) -> torch.Tensor:
    return x.sum([axis for axis in range(x.ndim) if axis != 1])


def _group_norm(
    x: torch.Tensor,
    *rest: torch.Tensor,
    groups: int,
    eps: float,
    has_weight: bool,
    has_bias: bool,
) -> tuple[torch.Tensor, ...]:
    grouped = _grouped(x, groups)
    mean = grouped.mean(2, keepdim=True)
    rstd = torch.rsqrt((grouped - mean).square().mean(2, keepdim=True) + eps)
    y = ((grouped - mean) * rstd).reshape(x.shape)
    if has_weight:
        y = y * _along_channels(rest[0], x)
    if has_bias:
        y = y + _along_channels(rest[-1], x)
    return y, mean[..., 0], rstd[..., 0]


@define("amp_ir.group_norm", "x", "weight?", "bias?", reference=_group_norm)
def group_norm(
    x: Tensor,
    *rest: Tensor,
    groups: int,
    eps: float,
    has_weight: bool = True,
    has_bias: bool = True,
) -> tuple[Tensor, ...]:
    """Normalize each group of channels of each sample (Wu and He 2018).

    x f[n, c, *space], weight and bias f[c] -> (y like x, mean f32[n, groups], rstd likewise).
    """
    channels = _expect_groups(x, groups)
    flags = {"has_weight": has_weight, "has_bias": has_bias}
    expect_rest(rest, flags, (channels,), "amp_ir.group_norm")
    statistic = Tensor((x.shape[0], groups), x.statistic_dtype)
    return x.with_shape(x.shape), statistic, statistic


def _group_norm_backward_input(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *rest: torch.Tensor,
    groups: int,
    has_weight: bool,
) -> torch.Tensor:
    scaled = grad * _along_channels(rest[0], x) if has_weight else grad
    scaled = _grouped(scaled, groups)
    normal = (_grouped(x, groups) - mean[..., None]) * rstd[..., None]
    mean_scaled = scaled.mean(2, keepdim=True)
    mean_product = (scaled * normal).mean(2, keepdim=True)
    return (rstd[..., None] * (scaled - mean_scaled - normal * mean_product)).reshape(x.shape)


def _check_group_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, groups: int) -> int:
    grad.expect_float()
    x.expect_shape(grad.shape)
    channels = _expect_groups(x, groups)
    for statistic in (mean, rstd):
        statistic.expect_float()
        statistic.expect_shape((x.shape[0], groups))
    return channels


@define(
    "amp_ir.group_norm_backward_input",
    "grad", "x", "mean", "rstd", "weight?",
    reference=_group_norm_backward_input,
)  # fmt: skip
def group_norm_backward_input(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *rest: Tensor,
    groups: int,
    has_weight: bool = True,
) -> Tensor:
    """Return dx of group_norm, shaped and typed like grad; mean and rstd f[n, groups]."""
    channels = _check_group_backward(grad, x, mean, rstd, groups)
    expect_rest(rest, {"has_weight": has_weight}, (channels,), "amp_ir.group_norm_backward_input")
    return grad.with_shape(grad.shape)


def _group_norm_backward_weight(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, *, groups: int
) -> tuple[torch.Tensor, ...]:
    normal = ((_grouped(x, groups) - mean[..., None]) * rstd[..., None]).reshape(x.shape)
    return _sum_but_channels(grad * normal), _sum_but_channels(grad)


@define(
    "amp_ir.group_norm_backward_weight",
    "grad", "x", "mean", "rstd",
    reference=_group_norm_backward_weight,
)  # fmt: skip
def group_norm_backward_weight(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *, groups: int
) -> tuple[Tensor, ...]:
    """Return (dweight f32[c], dbias f32[c]) of group_norm."""
    channels = _check_group_backward(grad, x, mean, rstd, groups)
    result = Tensor((channels,), grad.statistic_dtype)
    return result, result


def _batch_norm(
    x: torch.Tensor,
    *rest: torch.Tensor,
    momentum: float,
    eps: float,
    has_weight: bool,
    has_bias: bool,
    has_running: bool,
) -> tuple[torch.Tensor, ...]:
    count = x.numel() // x.shape[1]
    mean = _sum_but_channels(x) / count
    centered = x - _along_channels(mean, x)
    variance = _sum_but_channels(centered.square()) / count
    rstd = torch.rsqrt(variance + eps)
    y = centered * _along_channels(rstd, x)
    if has_weight:
        y = y * _along_channels(rest[0], x)
    if has_bias:
        y = y + _along_channels(rest[int(has_weight)], x)
    if not has_running:
        return y, mean, rstd
    # PyTorch's running variance is the unbiased one; the normalization uses the biased one.
    unbiased = variance * (count / (count - 1)) if count > 1 else variance * float("nan")
    running_mean, running_var = rest[-2:]
    new_mean = running_mean + momentum * (mean - running_mean)
    new_var = running_var + momentum * (unbiased - running_var)
    return y, mean, rstd, new_mean, new_var


@define(
    "amp_ir.batch_norm",
    "x", "weight?", "bias?", "running_mean?", "running_var?",
    reference=_batch_norm,
)  # fmt: skip
def batch_norm(
    x: Tensor,
    *rest: Tensor,
    momentum: float,
    eps: float,
    has_weight: bool = True,
    has_bias: bool = True,
    has_running: bool = True,
) -> tuple[Tensor, ...]:
    """Normalize each channel over the batch, in training (Ioffe and Szegedy 2015).

    x f[n, c, *space], the others f[c] -> (y like x, save_mean f32[c], save_rstd f32[c]) and, with
    `has_running`, (new_running_mean, new_running_var) in the dtype of the running statistics:
    new = (1 - momentum) * running + momentum * batch, with the unbiased variance.
    """
    channels = _expect_channels(x)
    flags = {
        "has_weight": has_weight,
        "has_bias": has_bias,
        "has_running (two tensors)": has_running,
        "has_running": has_running,
    }
    expect_rest(rest, flags, (channels,), "amp_ir.batch_norm")
    statistic = Tensor((channels,), x.statistic_dtype)
    running = tuple(one.with_shape((channels,)) for one in rest[-2:]) if has_running else ()
    return (x.with_shape(x.shape), statistic, statistic, *running)


def _batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, *rest: torch.Tensor, has_weight: bool
) -> tuple[torch.Tensor, ...]:
    mean, rstd = rest[-2:]
    count = x.numel() // x.shape[1]
    normal = (x - _along_channels(mean, x)) * _along_channels(rstd, x)
    dbias = _sum_but_channels(grad)
    dweight = _sum_but_channels(grad * normal)
    centered = (
        grad - _along_channels(dbias, x) / count - normal * _along_channels(dweight, x) / count
    )
    scale = rstd * rest[0] if has_weight else rstd
    return centered * _along_channels(scale, x), dweight, dbias


@define(
    "amp_ir.batch_norm_backward", "grad", "x", "weight?", "mean", "rstd",
    reference=_batch_norm_backward,
)  # fmt: skip
def batch_norm_backward(
    grad: Tensor, x: Tensor, *rest: Tensor, has_weight: bool = True
) -> tuple[Tensor, ...]:
    """Return the gradients of batch_norm in training.

    grad and x f[n, c, *space], then weight f[c] (only with `has_weight`), save_mean f[c],
    save_rstd f[c] -> (dx like grad, dweight f32[c], dbias f32[c]).
    """
    grad.expect_float()
    x.expect_shape(grad.shape)
    channels = _expect_channels(x)
    flags = {"has_weight": has_weight, "mean": True, "rstd": True}
    expect_rest(rest, flags, (channels,), "amp_ir.batch_norm_backward")
    result = Tensor((channels,), grad.statistic_dtype)
    return grad.with_shape(grad.shape), result, result
