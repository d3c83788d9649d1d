# SPDX-License-Identifier: Apache-2.0
"""Layer and RMS normalization with their backward ops.

`batch` below are the leading axes, `normalized` the last `ndim_normalized` ones. Statistics keep
the normalized axes with extent 1, as in PyTorch, and are float32 (float64 for float64 inputs).
Weight, bias and statistics may differ from `x` in floating dtype.
"""

from __future__ import annotations

import torch

from amp_ir.dialect.define import Shape, Tensor, define, expect_rest
from amp_ir.errors import OptionError


def _split(x: Tensor, ndim_normalized: int) -> tuple[Shape, Shape]:
    x.expect_float()
    if not 1 <= ndim_normalized <= x.ndim:
        raise OptionError(
            f"option ndim_normalized is {ndim_normalized} for {x.label} of shape {x.shape}, "
            f"expected 1 to {x.ndim}"
        )
    return x.shape[:-ndim_normalized], x.shape[-ndim_normalized:]


def _statistic(x: Tensor, ndim_normalized: int) -> Tensor:
    batch, _ = _split(x, ndim_normalized)
    return Tensor(batch + (1,) * ndim_normalized, x.statistic_dtype)


def _affine(
    y: torch.Tensor, rest: tuple[torch.Tensor, ...], has_weight: bool, has_bias: bool
) -> torch.Tensor:
    if has_weight:
        y = y * rest[0]
    return y + rest[-1] if has_bias else y


def _axes(ndim_normalized: int) -> tuple[int, ...]:
    return tuple(range(-ndim_normalized, 0))


def _layer_norm(
    x: torch.Tensor,
    *rest: torch.Tensor,
    ndim_normalized: int,
    eps: float,
    has_weight: bool,
    has_bias: bool,
) -> tuple[torch.Tensor, ...]:
    axes = _axes(ndim_normalized)
    mean = x.mean(axes, keepdim=True)
    centered = x - mean
    rstd = torch.rsqrt(centered.square().mean(axes, keepdim=True) + eps)
    return _affine(centered * rstd, rest, has_weight, has_bias), mean, rstd


@define("amp_ir.layer_norm", "x", "weight?", "bias?", reference=_layer_norm)
def layer_norm(
    x: Tensor,
    *rest: Tensor,
    ndim_normalized: int,
    eps: float,
    has_weight: bool = True,
    has_bias: bool = True,
) -> tuple[Tensor, ...]:
    """Normalize over the last axes.

    x f[*batch, *normalized], weight and bias f[*normalized]
    -> (y like x, mean f32[*batch, 1...], rstd f32[*batch, 1...]); variance is the biased one.
    """
    _, normalized = _split(x, ndim_normalized)
    flags = {"has_weight": has_weight, "has_bias": has_bias}
    expect_rest(rest, flags, normalized, "amp_ir.layer_norm")
    statistic = _statistic(x, ndim_normalized)
    return x.with_shape(x.shape), statistic, statistic


def _layer_norm_backward_input(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *rest: torch.Tensor,
    ndim_normalized: int,
    has_weight: bool,
) -> torch.Tensor:
    axes = _axes(ndim_normalized)
    scaled = grad * rest[0] if has_weight else grad
    normal = (x - mean) * rstd
    mean_scaled = scaled.mean(axes, keepdim=True)
    mean_product = (scaled * normal).mean(axes, keepdim=True)
    return rstd * (scaled - mean_scaled - normal * mean_product)


def _check_backward(grad: Tensor, x: Tensor, statistics: tuple[Tensor, ...], ndim: int) -> Shape:
    grad.expect_float()
    x.expect_shape(grad.shape)
    _, normalized = _split(x, ndim)
    for statistic in statistics:
        statistic.expect_float()
        statistic.expect_shape(_statistic(x, ndim).shape)
    return normalized


@define(
    "amp_ir.layer_norm_backward_input",
    "grad", "x", "mean", "rstd", "weight?",
    reference=_layer_norm_backward_input,
)  # fmt: skip
def layer_norm_backward_input(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *rest: Tensor,
    ndim_normalized: int,
    has_weight: bool = True,
) -> Tensor:
    """Return dx of layer_norm, shaped and typed like grad; mean and rstd f[*batch, 1...]."""
    normalized = _check_backward(grad, x, (mean, rstd), ndim_normalized)
    expect_rest(rest, {"has_weight": has_weight}, normalized, "amp_ir.layer_norm_backward_input")
    return grad.with_shape(grad.shape)


def _sum_batch(value: torch.Tensor, ndim_normalized: int) -> torch.Tensor:
    batch_axes = tuple(range(value.ndim - ndim_normalized))
    return value.sum(batch_axes) if batch_axes else value


def _layer_norm_backward_weight(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    ndim_normalized: int,
) -> tuple[torch.Tensor, ...]:
    product = grad * (x - mean) * rstd
    return _sum_batch(product, ndim_normalized), _sum_batch(grad, ndim_normalized)


@define(
    "amp_ir.layer_norm_backward_weight",
    "grad", "x", "mean", "rstd",
    reference=_layer_norm_backward_weight,
)  # fmt: skip
def layer_norm_backward_weight(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *, ndim_normalized: int
) -> tuple[Tensor, ...]:
    """Return (dweight f32[*normalized], dbias f32[*normalized]) of layer_norm."""
    normalized = _check_backward(grad, x, (mean, rstd), ndim_normalized)
    result = Tensor(normalized, grad.statistic_dtype)
    return result, result


def _rms_norm(
    x: torch.Tensor, *rest: torch.Tensor, ndim_normalized: int, eps: float, has_weight: bool
) -> tuple[torch.Tensor, ...]:
    rstd = torch.rsqrt(x.square().mean(_axes(ndim_normalized), keepdim=True) + eps)
    return _affine(x * rstd, rest, has_weight, False), rstd


@define("amp_ir.rms_norm", "x", "weight?", reference=_rms_norm)
def rms_norm(
    x: Tensor, *rest: Tensor, ndim_normalized: int, eps: float, has_weight: bool = True
) -> tuple[Tensor, ...]:
    """Divide by the root mean square of the last axes (Zhang and Sennrich 2019).

    x f[*batch, *normalized], weight f[*normalized] -> (y like x, rstd f32[*batch, 1...]).
    `eps` is a number; the importer resolves PyTorch's None.
    """
    _, normalized = _split(x, ndim_normalized)
    expect_rest(rest, {"has_weight": has_weight}, normalized, "amp_ir.rms_norm")
    return x.with_shape(x.shape), _statistic(x, ndim_normalized)


def _rms_norm_backward_input(
    grad: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    *rest: torch.Tensor,
    ndim_normalized: int,
    has_weight: bool,
) -> torch.Tensor:
    scaled = grad * rest[0] if has_weight else grad
    normal = x * rstd
    mean_product = (scaled * normal).mean(_axes(ndim_normalized), keepdim=True)
    return rstd * (scaled - normal * mean_product)


@define(
    "amp_ir.rms_norm_backward_input",
    "grad", "x", "rstd", "weight?",
    reference=_rms_norm_backward_input,
)  # fmt: skip
def rms_norm_backward_input(
    grad: Tensor,
    x: Tensor,
    rstd: Tensor,
    *rest: Tensor,
    ndim_normalized: int,
    has_weight: bool = True,
) -> Tensor:
    """Return dx of rms_norm, shaped and typed like grad."""
    normalized = _check_backward(grad, x, (rstd,), ndim_normalized)
    expect_rest(rest, {"has_weight": has_weight}, normalized, "amp_ir.rms_norm_backward_input")
    return grad.with_shape(grad.shape)


def _rms_norm_backward_weight(
    grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, *, ndim_normalized: int
) -> torch.Tensor:
    return _sum_batch(grad * x * rstd, ndim_normalized)


@define("amp_ir.rms_norm_backward_weight", "grad", "x", "rstd", reference=_rms_norm_backward_weight)
def rms_norm_backward_weight(
    grad: Tensor, x: Tensor, rstd: Tensor, *, ndim_normalized: int
) -> Tensor:
    """Return dweight f32[*normalized] of rms_norm."""
    normalized = _check_backward(grad, x, (rstd,), ndim_normalized)
    return Tensor(normalized, grad.statistic_dtype)
