# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls of mixtures of experts, forward and backward, as one op.

PyTorch's kernel takes float32 on a CPU, and its function for fake tensors refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from amp_ir.capture.define_op import define_op

_ROW_BYTES = 16


def _run(a: torch.Tensor, b: torch.Tensor, offsets: Any, bias: Any) -> torch.Tensor:
    made = torch.ops.aten._grouped_mm.default(_aligned(a), _aligned(b), offsets, bias)
    return made.contiguous()


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor with rows at multiples of 16 bytes, which PyTorch's kernel requires."""
    step = _ROW_BYTES // x.element_size()
    columns = x.shape[-1]
    if columns % step == 0:
        return x.contiguous()
    padded = x.new_empty((*x.shape[:-1], -(-columns // step) * step))
    return padded[..., :columns].copy_(x)


def _type(a: torch.Tensor, b: torch.Tensor, offsets: Any, _bias: Any) -> torch.Tensor:
    rows, columns = a.shape[-2], b.shape[-1]
    if a.dim() == b.dim() == 2:  # a group is a range of the summed axis
        return a.new_empty((offsets.numel(), rows, columns))
    return a.new_empty((a.shape[0], rows, columns) if a.dim() == b.dim() else (rows, columns))


define_op("grouped_mm(Tensor a, Tensor b, Tensor? offsets, Tensor? bias) -> Tensor", _run, _type)


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.amp_ir.grouped_mm(a, b, offs, bias)
    return result if out_dtype is None else result.to(out_dtype)


GROUPED_MATMUL: Mapping[Any, Any] = (
    {torch.ops.aten._grouped_mm.default: _grouped_mm}
    if hasattr(torch.ops.aten, "_grouped_mm")
    else {}
)
