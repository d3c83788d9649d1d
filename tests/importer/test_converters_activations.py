# SPDX-License-Identifier: Apache-2.0
"""Activation converters, as the capture leaves them and whole, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from amp_ir.capture.functional import FUSED_OPS
from import_checks import ALSO_FUSED, check

# Away from the corners of the piecewise ones, where a gradient is a convention; 0 is tested apart.
X = torch.linspace(-4.7, 5.3, 24).reshape(2, 3, 4)

ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": lambda x: F.elu(x, alpha=0.7),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, alpha=1.3),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "softplus": lambda x: F.softplus(x, beta=2, threshold=5),
    "softsign": F.softsign,
    "hardtanh": lambda x: F.hardtanh(x, -2, 3),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardshrink": F.hardshrink,
    "softshrink": lambda x: F.softshrink(x, 0.8),
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.6, -7.0),
    "logsigmoid": F.logsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "glu": lambda x: F.glu(x, -1),
    "softmax": lambda x: F.softmax(x, 1),
    "softmin": lambda x: F.softmin(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -2),
    "softmax to float64": lambda x: F.softmax(x, 0, dtype=torch.float64),
    "gumbel of a constant": lambda x: F.softmax((x + 0.5) / 0.3, -1),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name):
    check(ACTIVATIONS[name], X.clone().requires_grad_())


@pytest.mark.parametrize(
    "name",
    [
        "celu",
        "hardswish",
        "hardsigmoid",
        "hardshrink",
        "softshrink",
        "mish",
        "logsigmoid",
        "threshold",
    ],
)
def test_activation_kept_whole(name):
    check(ACTIVATIONS[name], X.clone().requires_grad_(), whole=FUSED_OPS | ALSO_FUSED)


@pytest.mark.parametrize("whole", [FUSED_OPS, FUSED_OPS | ALSO_FUSED], ids=["captured", "whole"])
@pytest.mark.parametrize("weight", [torch.tensor([0.25]), torch.tensor([0.1, 0.2, -0.3])])
def test_prelu(weight, whole):
    check(F.prelu, X.clone().requires_grad_(), weight.requires_grad_(), whole=whole)


@pytest.mark.parametrize(
    "function", [F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.elu, F.gelu, F.silu, F.softplus]
)
def test_at_zero_and_at_infinity(function):
    # The corners are conventions of PyTorch, which the dialect shares.
    x = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 30.0, -30.0])
    # At NaN the gradient of elu is NaN in PyTorch's vectors, and finite where it goes one by one.
    check(function, (x.repeat(16) if function is F.elu else x).requires_grad_())


@pytest.mark.parametrize("name", ["gelu", "silu", "softmax", "elu", "hardswish", "log_softmax"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(name, dtype):
    # One rounding forward and one backward, in PyTorch maybe of intermediate values too.
    tolerance = 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    x = X.to(dtype).requires_grad_()
    check(ACTIVATIONS[name], x, rtol=tolerance, atol=tolerance)


def test_softmax_of_a_scalar():
    check(lambda x: F.softmax(x, 0) + F.log_softmax(x, 0), torch.tensor(2.0, requires_grad=True))


def test_softmax_half_to_float():
    check(lambda x: F.softmax(x, -1, dtype=torch.float32), X.bfloat16().requires_grad_(), rtol=1e-2)


def test_second_derivative_through_tanh_and_sigmoid():
    def penalty(x):
        y = (torch.tanh(x) * torch.sigmoid(x)).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return (gradient**2).sum()

    check(penalty, X.clone().requires_grad_())
