# SPDX-License-Identifier: Apache-2.0
"""The loops of RAdam, ASGD and Adafactor while a step is traced.

PyTorch's loops branch in Python on numbers that change at every step: a step count, an average's
weight, the norm of a parameter. The loops here compute these as tensors of one float64, in which
PyTorch's Python floats are too, and choose with `where`. The formulas are those of
`torch.optim._single_tensor_*`, and so is the order of the roundings to the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]


def single_tensor_radam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    state_steps: Tensors,
    *,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
    decoupled_weight_decay: bool,
    maximize: bool,
    **_: Any,
) -> None:
    """Replace RAdam's loop: the variance is rectified once the average is long enough."""
    for param, gradient, average, square, count in zip(
        params, grads, exp_avgs, exp_avg_sqs, state_steps, strict=True
    ):
        gradient = -gradient if maximize else gradient
        count += 1
        step = count.double()
        if weight_decay != 0:
            if decoupled_weight_decay:
                param.mul_(1 - lr * weight_decay)
            else:
                gradient = gradient.add(param, alpha=weight_decay)
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

        remaining = _number(beta2, step) ** step
        bias_correction1 = 1 - _number(beta1, step) ** step
        bias_correction2 = 1 - remaining
        longest = 2 / (1 - beta2) - 1
        length = longest - step * 2 * remaining / bias_correction2
        above = (length - 4) * (length - 2) * longest
        rectification = (above / (length * ((longest - 4) * (longest - 2)))).sqrt()
        adaptive = bias_correction2.sqrt() / square.sqrt().add(eps)
        direction = average / bias_correction1 * lr
        param.sub_(torch.where(length > 5.0, direction * adaptive * rectification, direction))


def single_tensor_asgd(
    params: Tensors,
    grads: Tensors,
    axs: Tensors,
    mus: Tensors,
    etas: Tensors,
    state_steps: Tensors,
    *,
    lambd: float,
    lr: float,
    t0: float,
    alpha: float,
    weight_decay: float,
    maximize: bool,
    **_: Any,
) -> None:
    """Replace ASGD's loop: the first steps copy the parameter into its average."""
    for param, gradient, average, weight, rate, count in zip(
        params, grads, axs, mus, etas, state_steps, strict=True
    ):
        gradient = -gradient if maximize else gradient
        count += 1
        step = count.double()
        if weight_decay != 0:
            gradient = gradient.add(param, alpha=weight_decay)
        exact_rate = rate.double()
        param.mul_(1 - exact_rate * lambd)
        param.sub_(gradient * exact_rate)
        averaged = average + (param - average) * weight
        average.copy_(torch.where(weight == 1, param, averaged))
        rate.copy_(_number(lr, step) / (step * (lambd * lr) + 1) ** _number(alpha, step))
        weight.copy_(1 / (step - t0).clamp(min=1))


def single_tensor_adafactor(
    params: Tensors,
    grads: Tensors,
    row_vars: Sequence[torch.Tensor | None],
    col_vars: Sequence[torch.Tensor | None],
    variances: Sequence[torch.Tensor | None],
    state_steps: Tensors,
    *_: Any,
    d: float,
    lr: float,
    beta2_decay: float,
    weight_decay: float,
    eps1: float | None,
    eps2: float,
    maximize: bool,
    **_options: Any,
) -> None:
    """Replace Adafactor's loop: step sizes follow the norms of parameter and update."""
    for index, param in enumerate(params):
        gradient = -grads[index] if maximize else grads[index]
        eps1 = torch.finfo(param.dtype).eps if eps1 is None else eps1
        count = state_steps[index]
        count += 1
        step = count.double()
        new_weight = (step ** _number(beta2_decay, step)).to(gradient.dtype)
        size = torch.minimum(_number(lr, step), 1 / step.sqrt())
        size = size * torch.maximum(_number(eps2, step), _root_mean_square(param))
        if weight_decay != 0:
            param.mul_(1 - lr * weight_decay)
        row, column, variance = row_vars[index], col_vars[index], variances[index]
        if row is not None and column is not None:
            row.lerp_(_mean_square(gradient, -1), new_weight)
            column.lerp_(_mean_square(gradient, -2), new_weight)
            least = _number(eps1, row)
            estimate = row @ column / torch.maximum(row.mean(dim=-2, keepdim=True), least)
        else:
            assert variance is not None
            variance.lerp_(gradient * gradient, new_weight)
            estimate = variance
        update = torch.maximum(estimate, _number(eps1 * eps1, estimate)).rsqrt() * gradient
        clipping = (_root_mean_square(update) / d).clamp(min=1.0)
        param.sub_(update * (size / clipping))


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    """Return a number, which may be an input of the step, as a tensor [] of a tensor's dtype."""
    return torch.zeros((), dtype=like.dtype, device=like.device) + value


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    """Return the root of the mean square as float64."""
    return tensor.norm(2).double() / tensor.numel() ** 0.5


def _mean_square(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.norm(tensor, dim=dim, keepdim=True).square() / tensor.size(dim)
