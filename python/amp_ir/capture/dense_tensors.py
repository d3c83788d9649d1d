# SPDX-License-Identifier: Apache-2.0
"""Tensors whose memory kernels can read, and copies of others that are read at each call."""

from __future__ import annotations

import attrs
import torch

from amp_ir.ir.tensor_layout import ALIGNMENT_BYTES


@attrs.frozen(eq=False)
class DenseReader:
    """A reader that copies a tensor whose memory kernels cannot read directly."""

    tensor: torch.Tensor

    def __call__(self) -> torch.Tensor:
        """Return the current values, dense and aligned."""
        dense = self.tensor.detach().contiguous()
        return dense.clone() if dense.data_ptr() % ALIGNMENT_BYTES else dense


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether kernels can read a tensor at its own memory."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0
