# SPDX-License-Identifier: Apache-2.0
"""Loss scaling, which the capture records as custom ops with the dialect's names."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import shape_of
from amp_ir.importer.converters.registry import converts


@converts("amp_ir.scale_loss.default")
def scale_loss(ops: Emitter, x: relax.Expr, scale: relax.Expr) -> relax.Expr:
    """Return a loss times the scale."""
    return ops.call("amp_ir.scale_loss", x, scale)


@converts("amp_ir.unscale.default")
def unscale(ops: Emitter, grad: relax.Expr, scale: relax.Expr) -> relax.Expr:
    """Return a gradient divided by the scale."""
    return ops.call("amp_ir.unscale", grad, scale)


@converts("amp_ir.all_finite.default")
def all_finite(
    ops: Emitter, gradients: Sequence[relax.Expr], scale: relax.Expr
) -> tuple[relax.Expr, ...]:
    """Return whether all gradients are finite, and their norm without the scale."""
    some = [one for one in gradients if 0 not in shape_of(one)]
    results: tuple[relax.Expr, ...] = ops.call("amp_ir.all_finite", *some, scale)
    return results


@converts("amp_ir.step_skipped.default")
def step_skipped(ops: Emitter, flag: relax.Expr) -> relax.Expr:
    """Return whether the step was skipped; the next step draws a skipped step's numbers again."""
    ops.skips.append(flag)
    return flag


@converts("amp_ir.update_scale.default")
def update_scale(
    ops: Emitter,
    scale: relax.Expr,
    growth_tracker: relax.Expr,
    hysteresis_tracker: relax.Expr,
    found_inf: relax.Expr,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
) -> tuple[relax.Expr, ...]:
    """Return the scale and its trackers after the step."""
    results: tuple[relax.Expr, ...] = ops.call(
        "amp_ir.update_scale",
        scale,
        growth_tracker,
        hysteresis_tracker,
        found_inf,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    return results
