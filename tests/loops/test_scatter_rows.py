# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table, however the items of an id lie in chunks; a GPU's in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tvm.relax import op as R

from amp_ir.dialect import call_op
from amp_ir.loops.fusion.fuse import fuse_loops
from cuda_emulator import in_emulator
from kernel_check import kernels_of, module_of, run_cuda_kernels, run_kernels
from relax_functions import build, sample

# The ids of items, and the columns of the table, which has 7 rows.
CASES: dict[str, tuple[list[int], int]] = {
    "one item": ([3], 4),
    "fewer items than a chunk": ([1, 0, 1, 6, 1], 8),
    "no vector divides the columns": ([1, 0, 1, 6, 1, 2] * 5, 7),
    "more columns than a block has threads": ([1, 0, 1], 1100),
    "an id fills chunks exactly": ([5] * 32, 8),
    "an id spans many chunks": ([5] * 300, 36),
    "ids end in the middle of chunks": ([k * k % 7 for k in range(67)], 132),
    "ids outside of the table": ([9, -1, 3, 7, 3] * 9, 8),
    "ids far outside of the table": ([2**30, -(2**31), 3, 2**31 - 1, 3] * 9, 64),
}


def expected(
    grad: torch.Tensor, ids: torch.Tensor, padding_idx: int | None, height: int = 7
) -> torch.Tensor:
    table = torch.zeros(height, grad.shape[1], dtype=torch.float64)
    for row, k in zip(grad.double(), ids.tolist(), strict=True):
        if 0 <= k < height and k != padding_idx:
            table[k] += row
    return table


@pytest.mark.parametrize("dtype, padding_idx", [("float32", None), ("bfloat16", 5)])
@pytest.mark.parametrize("name", CASES)
@in_emulator
def test_rows_are_added_at_their_ids(name: str, dtype: str, padding_idx: int | None) -> None:
    items, columns = CASES[name]
    grad, ids = sample((len(items), columns), dtype), torch.tensor(items)
    options = {} if padding_idx is None else {"padding_idx": padding_idx}
    mod = module_of("amp_ir.embedding_backward", [grad, ids], num_embeddings=7, **options)
    (found,) = run_cuda_kernels(mod, [grad, ids])
    assert found.dtype == grad.dtype
    # Sums are in float64, and rounded once.
    torch.testing.assert_close(found, expected(grad, ids, padding_idx).to(grad.dtype))


@pytest.mark.parametrize("height", [7, 2500])
@pytest.mark.parametrize("dtype, padding_idx", [("float32", None), ("bfloat16", 5)])
@pytest.mark.parametrize("name", CASES)
def test_a_cpu_adds_rows_at_their_ids(
    name: str, dtype: str, padding_idx: int | None, height: int
) -> None:
    items, columns = CASES[name]
    grad, ids = sample((len(items), columns), dtype), torch.tensor(items)
    options = {} if padding_idx is None else {"padding_idx": padding_idx}
    mod = module_of("amp_ir.embedding_backward", [grad, ids], num_embeddings=height, **options)
    (found,) = run_kernels(mod, [grad, ids])
    # Sums of at most 300 numbers in float32, rounded once.
    torch.testing.assert_close(
        found,
        expected(grad, ids, padding_idx, height).to(grad.dtype),
        rtol=1e-2 if dtype == "bfloat16" else 2e-5,
        atol=1e-5,
    )


# Rows of a table of whole vectors and of others, which loops find in other ways.
@pytest.mark.parametrize("columns", [64, 132, 36, 9])
def test_a_norm_and_an_update_read_the_sums_of_few_rows(columns: int) -> None:
    """Clipping and momentum need the whole gradient of a table, which is never in memory."""
    height, ids = 3000, torch.tensor([1, 0, 2999, 1, 3100, 70] * 9)
    grad = sample((len(ids), columns), "float32")
    table, momentum = sample((height, columns), "float32"), sample((height, columns), "float32") / 8

    def body(grad: Any, ids: Any, table: Any, momentum: Any) -> tuple[Any, ...]:
        dense = call_op("amp_ir.embedding_backward", [grad, ids], num_embeddings=height)
        norm = R.sqrt(R.sum(R.multiply(dense, dense)))
        moved = R.add(momentum, R.divide(dense, norm))
        return norm, R.subtract(table, moved), moved

    spec = ((height, columns), "float32")
    mod = build([(tuple(grad.shape), "float32"), (tuple(ids.shape), "int64"), spec, spec], body)
    sizes = [
        int(one.ty.shape[0])
        for function in kernels_of(fuse_loops(mod)).functions.values()
        for one in function.params
        if one.name.startswith("out")
    ]
    assert sizes.count(height * columns) == 2  # the table and its momentum
    norm, updated, moved = run_kernels(mod, [grad, ids, table, momentum])
    dense = expected(grad, ids, None, height)
    # Sums of a few hundred numbers in float32.
    torch.testing.assert_close(norm, dense.norm().float(), rtol=2e-6, atol=0)
    right = momentum + dense / dense.norm()
    torch.testing.assert_close(moved, right.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(updated, (table - right).float(), rtol=1e-5, atol=1e-6)
