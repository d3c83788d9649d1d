# SPDX-License-Identifier: Apache-2.0
"""Dynamic loss scaling as ops: scale, unscale, check, update.

A scale is a power of two, so scaling and unscaling are exact wherever nothing over- or underflows.

Source: Micikevicius et al. 2018, "Mixed precision training", section 3.2; the state machine is
    that of torch.amp.GradScaler (`_amp_update_scale_`), and hysteresis that of NVIDIA apex
    (`update_scale_hysteresis`).
"""

from __future__ import annotations

from typing import Any

import torch

from amp_ir.dialect.define import Tensor, define
from amp_ir.errors import OptionError

# Limits that never bind: a scale stays below the largest float32 anyway.
NO_MIN_SCALE = 0.0
NO_MAX_SCALE = float(torch.finfo(torch.float32).max)


def _scale_loss(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


@define("amp_ir.scale_loss", "x", "scale", reference=_scale_loss)
def scale_loss(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply a loss, or the gradient that enters it, by the scale: x f[...], f32[] -> like x."""
    x.expect_float()
    _expect_scale(scale)
    return x.with_shape(x.shape)


def _unscale(grad: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return grad * _reciprocal(scale)


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale as PyTorch computes it: through float64, then rounded once."""
    return scale.double().reciprocal().to(scale.dtype)


@define("amp_ir.unscale", "grad", "scale", reference=_unscale)
def unscale(grad: Tensor, scale: Tensor) -> Tensor:
    """Divide a gradient by the scale: grad f[...], f32[] -> like grad."""
    grad.expect_float()
    _expect_scale(scale)
    return grad.with_shape(grad.shape)


def _all_finite(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    *gradients, scale = tensors
    finite = torch.stack([torch.isfinite(one).all() for one in gradients]).all()
    unscaled = [one * _reciprocal(scale) for one in gradients]
    squares = torch.stack([one.square().sum() for one in unscaled])
    return finite, squares.sum().sqrt()


@define("amp_ir.all_finite", "gradient", "gradients...", reference=_all_finite)
def all_finite(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Check scaled gradients for infinity and NaN, and return their norm: g f[...]..., f32[].

    The last tensor is the scale. Returns bool[], and f32[]: the 2-norm of all gradients together,
    divided by the scale; it may overflow where each gradient is finite.
    """
    *gradients, scale = tensors
    if not gradients:
        raise OptionError("amp_ir.all_finite has no gradients, only a scale")
    for gradient in gradients:
        gradient.expect_float()
    _expect_scale(scale)
    return Tensor((), "bool"), Tensor((), "float32")


def next_scale(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scale and the two trackers after a step.

    After an overflow the scale backs off, unless `hysteresis` allows more overflows in a row than
    there were; after `growth_interval` clean steps in a row it grows, unless it then would not be
    finite. A limit never moves a scale that is beyond it already.
    """
    clean = growth_tracker + 1
    grows = clean == growth_interval
    grown = scale * growth_factor
    higher = torch.maximum(scale, torch.clamp(grown, max=max_scale))
    after_clean = torch.where(grows & torch.isfinite(grown), higher, scale)
    tolerated = hysteresis_tracker - 1
    lower = torch.minimum(scale, torch.clamp(scale * backoff_factor, min=min_scale))
    after_overflow = torch.where(tolerated > 0, scale, lower)
    none = torch.zeros_like(growth_tracker)
    return (
        torch.where(found_inf, after_overflow, after_clean),
        torch.where(found_inf | grows, none, clean),
        torch.where(found_inf, tolerated, torch.full_like(hysteresis_tracker, hysteresis)),
    )


def options_of(scaler: Any) -> dict[str, Any]:
    """Return the numbers that update_scale uses; what `torch.amp.GradScaler` lacks is off."""
    is_dynamic = getattr(scaler, "dynamic", True)
    lowest, highest = getattr(scaler, "min_scale", None), getattr(scaler, "max_scale", None)
    return {
        "growth_factor": float(scaler._growth_factor) if is_dynamic else 1.0,
        "backoff_factor": float(scaler._backoff_factor) if is_dynamic else 1.0,
        "growth_interval": int(scaler._growth_interval),
        "hysteresis": int(getattr(scaler, "hysteresis", 1)),
        "min_scale": NO_MIN_SCALE if lowest is None else float(lowest),
        "max_scale": NO_MAX_SCALE if highest is None else float(highest),
    }


@define(
    "amp_ir.update_scale",
    "scale",
    "growth_tracker",
    "hysteresis_tracker",
    "found_inf",
    reference=next_scale,
)
def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
) -> tuple[Tensor, ...]:
    """Return the next scale f32[], growth tracker i32[] and hysteresis tracker i32[].

    `next_scale` defines them.
    """
    _expect_scale(scale)
    for tracker in (growth_tracker, hysteresis_tracker):
        tracker.expect_dtype("int32")
        tracker.expect_shape(())
    found_inf.expect_dtype("bool")
    found_inf.expect_shape(())
    return Tensor((), scale.dtype), Tensor((), "int32"), Tensor((), "int32")


def _expect_scale(scale: Tensor) -> None:
    scale.expect_float()
    scale.expect_shape(())
