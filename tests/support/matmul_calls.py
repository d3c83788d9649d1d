# SPDX-License-Identifier: Apache-2.0
"""Calls of the native matmuls."""

from __future__ import annotations

import torch

from amp_ir.host import native
from native_calls import TOLERANCE, layout, matmul, memory, relative_error, shape

EPILOGUES = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def random(*dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*dims).to(dtype)


def nan(*dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(dims, float("nan"), dtype=dtype)


def check(library: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options) -> None:
    matmul(library, a, b, out, **options)
    expected = a.double() @ b.double()
    if options.get("bias") is not None:
        expected = expected + options["bias"].double()
    expected = EPILOGUES[options.get("epilogue", "none")](expected)
    assert relative_error(out, expected) <= TOLERANCE[out.dtype]


LAYOUTS = {
    "attention heads": lambda r, e: (
        r(2, 7, 3, 8).transpose(1, 2),
        r(2, 5, 3, 8).permute(0, 2, 3, 1),
        e(2, 7, 3, 5).transpose(1, 2),
    ),
    "no unit stride in the operands": lambda r, e: (
        r(20, 33, 2)[..., 0],
        r(33, 40, 2)[..., 0],
        e(20, 40),
    ),
    "no unit stride in the result": lambda r, e: (r(20, 33), r(33, 40), e(20, 40, 2)[..., 0]),
    "column-major result": lambda r, e: (r(20, 33), r(33, 40), e(40, 20).t()),
    "slices of wider tensors": lambda r, e: (
        r(20, 70)[:, 5:38],
        r(33, 80)[:, 7:47],
        e(20, 90)[:, 3:43],
    ),
    "rows that share sets of the cache": lambda r, e: (
        r(40, 1024)[:, 3:103].t(),
        r(40, 512),
        e(100, 512),
    ),
    "repeated rows": lambda r, e: (r(1, 33).expand(20, 33), r(33, 40), e(20, 40)),
    "repeated columns": lambda r, e: (r(20, 1).expand(20, 33), r(33, 40), e(20, 40)),
    "batch of b repeated": lambda r, e: (
        r(3, 4, 20, 33),
        r(33, 40).expand(3, 4, 33, 40),
        e(3, 4, 20, 40),
    ),
    "batches broadcast both ways": lambda r, e: (r(3, 1, 20, 33), r(1, 4, 33, 40), e(3, 4, 20, 40)),
    "ranks differ": lambda r, e: (r(2, 3, 4, 20, 33), r(4, 33, 40), e(2, 3, 4, 20, 40)),
    "six dims in another order": lambda r, e: (
        r(2, 20, 2, 2, 3, 33).permute(0, 4, 3, 2, 1, 5),
        r(2, 3, 2, 2, 33, 40),
        e(2, 3, 2, 2, 20, 40),
    ),
    "batch innermost": lambda r, e: (
        r(20, 33, 4).permute(2, 0, 1),
        r(33, 40, 4).permute(2, 0, 1),
        e(4, 20, 40),
    ),
    "one column": lambda r, e: (r(20, 33), r(1, 33).t(), e(20, 1)),
    "one row": lambda r, e: (r(1, 33), r(33, 40), e(1, 40)),
    "one term": lambda r, e: (r(20, 1), r(1, 40), e(20, 40)),
    "one number": lambda r, e: (r(1, 33), r(33, 1), e(1, 1)),
}


NAME = "amp_ir.onednn.matmul_accumulate"


def accumulate(a, b, c, out, *, bias=None, alpha=None, beta=None) -> None:
    native.function(NAME)(
        memory(a), memory(b), memory(c), bias, alpha, beta,
        *layout(a), *layout(b), *layout(out), "none", memory(out),
    )  # fmt: skip


def number(value: float | None) -> torch.Tensor | None:
    return None if value is None else torch.tensor(value)


PACK, MATMUL_PACKED = "amp_ir.onednn.pack", "amp_ir.onednn.matmul_packed"


def packed_nbytes(b: torch.Tensor) -> int:
    name = str(b.dtype).removeprefix("torch.")
    return int(native.function("amp_ir.onednn.packed_nbytes")(shape(b.shape), name))


def pack(b: torch.Tensor, nbytes: int) -> torch.Tensor:
    # 64-byte aligned, as in a planned step; whatever was there before does not matter.
    whole = torch.full((nbytes + 64,), 0xAA, dtype=torch.uint8)
    start = -whole.data_ptr() % 64
    packed = whole[start : start + nbytes]
    native.function(PACK)(memory(b), *layout(b), packed)
    return packed


def multiply(a, packed, dims, out, *, bias=None, epilogue="none") -> None:
    native.function(MATMUL_PACKED)(
        memory(a), packed, bias, *layout(a), shape(dims), *layout(out), epilogue, memory(out)
    )
