# SPDX-License-Identifier: Apache-2.0
"""Calls of cuBLASLt's matmul."""

from __future__ import annotations

import torch

from amp_ir.host import native
from native_calls import layout, memory

NAME = "amp_ir.cublaslt.matmul"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def launches(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
) -> int:
    dtypes = [name_of(t.dtype) for t in (a, b, out)]
    bias_dtype = None if bias is None else name_of(bias.dtype)
    count = native.function("amp_ir.cublaslt.launches")
    return int(count(*layout(a), *layout(b), *layout(out), *dtypes, bias_dtype, epilogue))


def workspace_nbytes(given: list) -> int:
    return int(native.function("amp_ir.cublaslt.scratch_nbytes")(NAME, *given))


def arguments(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list:
    return [
        memory(a), memory(b), None, *layout(a), *layout(b), *layout(out), "none", memory(out)
    ]  # fmt: skip
