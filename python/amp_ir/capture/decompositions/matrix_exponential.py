# SPDX-License-Identifier: Apache-2.0
"""The matrix exponential with its gradient as one op: `torch.ops.amp_ir.matrix_exp_backward`.

PyTorch takes the gradient from the exponential of [[A^T, G], [0, A^T]]. Of that no proof of loss
scales can tell that it is linear in G, and in float32 it is not: the larger G is beside A, the
less is left of it. Scaled by 65536 its relative error is 1e-4, by 2^24 3e-2.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_ir.capture.define_op import define_op

# Powers of two beyond these are infinite or 0 in float32, or their inverses are.
_LARGEST_EXPONENT = 126


def _gradient(matrix: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the matrices [..., n, n], each of `grad` brought near 1 meanwhile."""
    top = grad.abs().amax((-2, -1), keepdim=True)
    exponent = torch.frexp(top.float()).exponent.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    scale = torch.ldexp(torch.ones_like(top), exponent)
    # A division by a power of two and the multiplication by it are exact.
    return _by_blocks(matrix, grad / scale) * scale


def _by_blocks(matrix: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    size, turned = matrix.shape[-1], matrix.mH
    upper = torch.cat([turned, grad], -1)
    lower = torch.cat([torch.zeros_like(turned), turned], -1)
    blocks = torch.linalg.matrix_exp(torch.cat([upper, lower], -2))
    return blocks[..., :size, size:].contiguous()


def _type(matrix: torch.Tensor, _grad: torch.Tensor) -> torch.Tensor:
    return matrix.new_empty(matrix.shape)


define_op("matrix_exp_backward(Tensor matrix, Tensor grad) -> Tensor", _gradient, _type)


class _MatrixExponential(torch.autograd.Function):
    """PyTorch's op, and ours for its gradient; a gradient of the gradient is PyTorch's own."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(matrix)
        return torch.ops.aten.linalg_matrix_exp.default(matrix)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (matrix,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _by_blocks(matrix, grad)
        result: torch.Tensor = torch.ops.amp_ir.matrix_exp_backward(matrix, grad)
        return result


def matrix_exp(input: torch.Tensor) -> torch.Tensor:
    """Return the exponential of each matrix, f32[..., n, n] -> f32[..., n, n]."""
    if input.is_complex() or torch._C._functorch.is_functorch_wrapped_tensor(input):
        return torch.ops.aten.linalg_matrix_exp.default(input)
    result: torch.Tensor = _MatrixExponential.apply(input)
    return result
