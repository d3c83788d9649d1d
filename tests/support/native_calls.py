# SPDX-License-Identifier: Apache-2.0
"""Call the native matmul and convolutions on strided torch tensors, and measure the error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import tvm_ffi

from amp_ir.host import native

LIBRARIES = ("onednn", "torch")

# A result is rounded once to its own dtype: half a unit in the last place, 2^-9 for bfloat16 (8
# significant bits) and 2^-12 for float16 (11), relative to values no larger than the largest. For
# float32 the error is that of the float32 sums: some tens of terms of 2^-24 each.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def memory(t: torch.Tensor) -> torch.Tensor:
    """All elements from `t`'s first one on, as one dense dimension."""
    count = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    return t.as_strided((max(count, 0),), (1,))


def shape(values: Sequence[int]) -> tvm_ffi.Shape:
    return tvm_ffi.Shape(tuple(values))


def layout(t: torch.Tensor) -> tuple[tvm_ffi.Shape, tvm_ffi.Shape]:
    return shape(t.shape), shape(t.stride())


def matmul(
    library: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
) -> None:
    native.function(f"amp_ir.{library}.matmul")(
        memory(a), memory(b), bias, *layout(a), *layout(b), *layout(out), epilogue, memory(out)
    )


def convolve(
    library: str,
    verb: str,
    first: torch.Tensor,
    second: torch.Tensor,
    out: torch.Tensor,
    *,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> None:
    """Run conv (x, w), conv_backward_input (grad, w) or conv_backward_weight (grad, x)."""
    native.function(f"amp_ir.{library}.{verb}")(
        memory(first),
        memory(second),
        *layout(first),
        *layout(second),
        *layout(out),
        shape(strides),
        shape(padding),
        shape(dilation),
        groups,
        memory(out),
    )


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest entry; NaN counts as infinite."""
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(error.nan_to_num(nan=float("inf")))
