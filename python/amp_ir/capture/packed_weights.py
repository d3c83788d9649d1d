# SPDX-License-Identifier: Apache-2.0
"""Weights of recurrent layers that lie packed in one block, as PyTorch packs them for cuDNN."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.ir.tensor_layout import ALIGNMENT_BYTES


def unpack_weights(models: Iterable[torch.nn.Module]) -> list[str]:
    """Give the weights of recurrent layers memory of their own, where packing misaligned one.

    `.to("cuda")` packs an nn.LSTM, GRU or RNN without gaps, and a bias of 50 floats then ends where
    no kernel that loads vectors can begin. The parameters stay the same objects with the same
    values; cuDNN's eager calls pack them again, at each call, and PyTorch warns of that.

    Returns:
        The names of those layers.
    """
    layers = []
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.RNNBase) and _is_misaligned(module):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.clone()
                layers.append(name or type(module).__name__)
    return layers


def _is_misaligned(module: torch.nn.RNNBase) -> bool:
    return any(
        not isinstance(one.data, FakeTensor) and one.data_ptr() % ALIGNMENT_BYTES
        for one in module.parameters(recurse=False)
    )
