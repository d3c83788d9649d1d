# SPDX-License-Identifier: Apache-2.0
"""Rounds the results of PyTorch's arithmetic at random, to see what rounding does to a program."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Not what must give exactly an argument of its own (max, where, index), for gradients compare.
ARITHMETIC = frozenset(
    "add sub rsub mul div reciprocal pow sqrt rsqrt exp log tanh sigmoid sin cos sinc mm addmm bmm "
    "baddbmm convolution sum mean addcmul addcdiv lerp _softmax _log_softmax logsumexp var std "
    "linalg_vector_norm cumsum prod gelu silu softplus elu mse_loss smooth_l1_loss huber_loss "
    "native_batch_norm native_layer_norm native_group_norm avg_pool2d tanh_backward "
    "native_batch_norm_backward native_layer_norm_backward native_group_norm_backward "
    "_softmax_backward_data _log_softmax_backward_data mse_loss_backward sigmoid_backward "
    "smooth_l1_loss_backward huber_loss_backward gelu_backward silu_backward softplus_backward "
    "elu_backward convolution_backward avg_pool2d_backward".split()
)


class RandomRounding(TorchDispatchMode):
    """Each new result of arithmetic is off by up to half of `unit`, relatively."""

    def __init__(self, unit: float, generator: torch.Generator) -> None:
        super().__init__()
        self._unit = unit
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, then move what it made."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ARITHMETIC:
            results = result if isinstance(result, tuple) else (result,)
            # The mean and deviation that a normalization keeps for its gradient are low, too.
            for one in results:
                if isinstance(one, torch.Tensor):
                    one.copy_(moved(one, self._unit, self._generator))
        return result


def moved(tensor: torch.Tensor, unit: float, generator: torch.Generator) -> torch.Tensor:
    """The tensor with its numbers changed by up to half a unit in the last place."""
    if not unit or not tensor.is_floating_point():
        return tensor
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 0.5
    return tensor.detach() * (1 + unit * noise.to(tensor.dtype))
