# SPDX-License-Identifier: Apache-2.0
"""Sums over a few long rows: a CPU kernel adds up columns, without memory for sums of parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm
import tvm_ffi
from tvm import tirx
from tvm.relax import op as R

from amp_ir.loops.fusion.fuse import fuse_loops
from kernel_check import kernels_of, run_kernels
from relax_functions import build

Function = Callable[..., Any]


def allocated(mod: tvm.IRModule) -> int:
    """The elements of all memory that the kernels of a module take for themselves."""
    sizes: list[int] = []

    def note(found: tirx.AllocBuffer) -> None:
        sizes.append(math.prod(int(n) for n in found.buffer.ty.shape))

    for kernel in kernels_of(fuse_loops(mod)).functions.values():
        tvm_ffi.structural_walk(kernel.body, (tirx.AllocBuffer, note))
    return sum(sizes)


def sum_of_squares(x: Any) -> Any:
    return R.sum(R.multiply(x, x), axis=0)


def squares_and_their_sum(x: Any) -> Any:
    squares = R.multiply(x, x)
    return squares, R.sum(squares, axis=0)


# Shape, op and what PyTorch computes; 2050 columns fill no vectors, 40 rows are several blocks.
CASES: dict[str, tuple[tuple[int, ...], Function, Function]] = {
    "sum": ((8, 4096), sum_of_squares, lambda x: [(x * x).sum(0)]),
    "blocks of rows": ((40, 2050), sum_of_squares, lambda x: [(x * x).sum(0)]),
    "outer axes": (
        (2, 3, 4, 1024),
        lambda x: R.sum(x, axis=[0, 1], keepdims=True),
        lambda x: [x.sum((0, 1), keepdim=True)],
    ),
    "stored too": ((8, 4096), squares_and_their_sum, lambda x: [x * x, (x * x).sum(0)]),
    "mean": ((8, 4096), lambda x: R.mean(x, axis=0), lambda x: [x.mean(0)]),
    "max": ((8, 4096), lambda x: R.max(x, axis=0), lambda x: [x.amax(0)]),
}


@pytest.mark.parametrize("name", CASES)
def test_columns_are_summed_in_registers(name: str) -> None:
    shape, function, expected = CASES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mod = build([(shape, "float32")], function)
    assert allocated(mod) < math.prod(shape[1:])
    for got, wanted in zip(run_kernels(mod, [x]), expected(x.double()), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-5)


def test_many_rows_keep_sums_of_their_parts() -> None:
    """Pieces of many rows are read from memory more slowly than whole rows."""
    shape = (1024, 2048)
    assert allocated(build([(shape, "float32")], sum_of_squares)) >= 16 * shape[1]
