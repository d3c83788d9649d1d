# SPDX-License-Identifier: Apache-2.0
"""Backward ops of softmax and log_softmax; the forward ops are Relax's own."""

from __future__ import annotations

import torch

from amp_ir.dialect.define import Tensor, define


def _check(grad: Tensor, y: Tensor, axis: int) -> Tensor:
    grad.expect_float()
    y.expect_float()
    y.expect_shape(grad.shape)
    grad.axis(axis)
    return grad.with_shape(grad.shape)


def _softmax_backward(grad: torch.Tensor, y: torch.Tensor, *, axis: int) -> torch.Tensor:
    return (grad - (grad * y).sum(axis, keepdim=True)) * y


@define("amp_ir.softmax_backward", "grad", "y", reference=_softmax_backward)
def softmax_backward(grad: Tensor, y: Tensor, *, axis: int) -> Tensor:
    """Compute the gradient of y = softmax(x): grad f[...], y f[...] -> f[...]."""
    return _check(grad, y, axis)


def _log_softmax_backward(grad: torch.Tensor, y: torch.Tensor, *, axis: int) -> torch.Tensor:
    return grad - y.exp() * grad.sum(axis, keepdim=True)


@define("amp_ir.log_softmax_backward", "grad", "y", reference=_log_softmax_backward)
def log_softmax_backward(grad: Tensor, y: Tensor, *, axis: int) -> Tensor:
    """Compute the gradient of y = log_softmax(x): grad f[...], y f[...] -> f[...]."""
    return _check(grad, y, axis)
