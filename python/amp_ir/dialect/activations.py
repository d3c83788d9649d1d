# SPDX-License-Identifier: Apache-2.0
"""Activations that Relax lacks, and the backward ops of all: one table, name -> formula.

A formula is `(m, values..., *, options...) -> value`, where `m` is `torch_math` or the loops'
`math`. All values have the same shape `f[...]`, except that a 0-d gradient is not allowed; the
result is shaped like them and has the dtype of the first.

Selects are written so that NaN passes through wherever PyTorch's op passes it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from amp_ir.dialect import torch_math
from amp_ir.dialect.define import Tensor, check_choice, define

Formula = Callable[..., Any]


def _gelu_backward(m: Any, grad: Any, x: Any, *, approximate: str) -> Any:
    """Compute gelu's gradient; `approximate`: "none" (erf), "tanh" (Hendrycks and Gimpel 2016)."""
    if approximate == "none":
        bell = m.bell(x)
        return grad * (m.normal_cdf(x, bell) + x * bell * (1.0 / math.sqrt(2.0 * math.pi)))
    scale, cubic = math.sqrt(2.0 / math.pi), 0.044715
    t = m.tanh(scale * x * (1.0 + cubic * x * x))
    slope = scale * (1.0 + 3.0 * cubic * x * x)
    return grad * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)


def _silu_backward(m: Any, grad: Any, x: Any) -> Any:
    s = m.sigmoid(x)
    return grad * s * (1.0 + x * (1.0 - s))


def _expm1(m: Any, x: Any) -> Any:
    return m.select(x > 1.0, m.exp(x) - 1.0, _small_expm1(m, m.minimum(x, 1.0)))


def _small_expm1(m: Any, x: Any) -> Any:
    """Return exp(x) - 1 for x <= 1 without cancellation near 0: 2t / (1 - t), t = tanh(x / 2)."""
    t = m.tanh(0.5 * x)
    return 2.0 * t / (1.0 - t)


def _softplus_of(m: Any, x: Any) -> Any:
    """Return log(1 + exp(x)) without overflow."""
    return m.maximum(x, 0.0) + m.log1p(m.exp(-m.absolute(x)))


def _elu(m: Any, x: Any, *, alpha: float, scale: float, input_scale: float) -> Any:
    # Below 0 the exponent is large where its factor is negative: celu with an alpha below 0.
    minus_one = _expm1 if input_scale < 0.0 else _small_expm1
    negative = m.scaled(minus_one(m, m.scaled(m.minimum(x, 0.0), input_scale)), alpha * scale)
    return m.select(x < 0.0, negative, x * scale)


def _elu_backward(
    m: Any,
    grad: Any,
    x_or_y: Any,
    *,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
) -> Any:
    """Compute elu's gradient; `is_result`: the second argument is elu's result, not its input."""
    if is_result:
        negative = x_or_y + alpha * scale
    else:
        negative = m.scaled(m.exp(m.scaled(x_or_y, input_scale)), alpha * scale)
    return m.select(x_or_y > 0.0, grad * scale, m.scaled(grad, input_scale) * negative)


def _softplus(m: Any, x: Any, *, beta: float, threshold: float) -> Any:
    """Compute softplus, which for a beta of 0 is infinite and, at infinity, NaN."""
    z = m.scaled(x, beta)
    return m.select(z > threshold, x, m.divided(_softplus_of(m, z), beta))


def _softplus_backward(m: Any, grad: Any, x: Any, *, beta: float, threshold: float) -> Any:
    """Compute softplus's gradient from e^x, which is finite where e^-x is infinite."""
    scaled = m.scaled(x, beta)
    z = m.exp(m.minimum(scaled, threshold))
    return m.select(scaled > threshold, grad, grad * z / (z + 1.0))


def _log_sigmoid_backward(m: Any, grad: Any, x: Any) -> Any:
    z = m.exp(-m.absolute(x))
    share = z / (1.0 + z)
    return grad * m.select(x < 0.0, 1.0 - share, share)


def _mish_backward(m: Any, grad: Any, x: Any) -> Any:
    t = m.tanh(_softplus_of(m, x))
    return grad * (t + x * m.sigmoid(x) * (1.0 - t * t))


def _inside(m: Any, x: Any, low: float, high: float, value: Any) -> Any:
    """Return `value` where low < x < high, else 0."""
    return m.select(x <= low, 0.0, m.select(x >= high, 0.0, value))


def _outside(m: Any, x: Any, bound: float, value: Any) -> Any:
    """Return `value` where |x| > bound, else 0."""
    return m.select(m.absolute(x) <= bound, 0.0, value)


ACTIVATIONS: dict[str, Formula] = {
    "gelu_backward": _gelu_backward,
    "silu_backward": _silu_backward,
    "tanh_backward": lambda m, grad, y: grad * (1.0 - y * y),
    "sigmoid_backward": lambda m, grad, y: grad * (1.0 - y) * y,
    "relu_backward": lambda m, grad, y_or_x, *, threshold=0.0: m.select(
        y_or_x <= threshold, 0.0, grad
    ),
    "leaky_relu_backward": lambda m, grad, x, *, slope: m.select(
        x > 0.0, grad, m.scaled(grad, slope)
    ),
    "elu": _elu,
    "elu_backward": _elu_backward,
    "softplus": _softplus,
    "softplus_backward": _softplus_backward,
    "hardtanh_backward": lambda m, grad, x, *, min_value, max_value: _inside(
        m, x, min_value, max_value, grad
    ),
    "hardswish_backward": lambda m, grad, x: m.select(
        x <= -3.0, 0.0, m.select(x >= 3.0, grad, grad * (x / 3.0 + 0.5))
    ),
    # 0 at NaN, unlike the others.
    "hardsigmoid_backward": lambda m, grad, x: m.select(
        m.absolute(x) < 3.0, grad * (1.0 / 6.0), 0.0
    ),
    "log1p": lambda m, x: m.log1p(x),
    "expm1": _expm1,
    "mish": lambda m, x: x * m.tanh(_softplus_of(m, x)),
    "mish_backward": _mish_backward,
    "log_sigmoid": lambda m, x: m.minimum(x, 0.0) - m.log1p(m.exp(-m.absolute(x))),
    "log_sigmoid_backward": _log_sigmoid_backward,
    "softshrink": lambda m, x, *, bound: m.select(
        x > bound, x - bound, m.select(x < -bound, x + bound, x - x)
    ),
    "shrink_backward": lambda m, grad, x, *, bound: _outside(m, x, bound, grad),
}

_CHOICES = {"approximate": ("none", "tanh")}


def _define_activation(name: str, formula: Formula) -> None:
    parameters = list(inspect.signature(formula).parameters.values())[1:]
    options = [one for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    arguments = [one.name for one in parameters if one not in options]

    def rule(*tensors: Tensor, **given: Any) -> Tensor:
        for tensor in tensors:
            tensor.expect_float()
            tensor.expect_shape(tensors[0].shape)
        for option, choices in _CHOICES.items():
            if option in given:
                check_choice(f"amp_ir.{name}", option, given[option], choices)
        return tensors[0].with_shape(tensors[0].shape)

    # The options are the formula's own, so that a wrong one is refused when the call is built.
    rule.__doc__ = f"Pointwise: f[...] for each of {', '.join(arguments)} -> f[...]."
    rule.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("tensors", inspect.Parameter.VAR_POSITIONAL), *options]
    )
    define(
        f"amp_ir.{name}",
        *arguments,
        reference=lambda *tensors, **given: formula(torch_math, *tensors, **given),
    )(rule)


for _name, _formula in ACTIVATIONS.items():
    _define_activation(_name, _formula)
