# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table, however the items of an id lie in chunks; a GPU's in the emulator."""

from __future__ import annotations

import pytest
import torch

from cuda_emulator import in_emulator
from kernel_check import module_of, run_cuda_kernels, run_kernels
from relax_functions import sample

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


def expected(grad: torch.Tensor, ids: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    table = torch.zeros(7, grad.shape[1], dtype=torch.float64)
    for row, k in zip(grad.double(), ids.tolist(), strict=True):
        if 0 <= k < 7 and k != padding_idx:
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


@pytest.mark.parametrize("dtype, padding_idx", [("float32", None), ("bfloat16", 5)])
@pytest.mark.parametrize("name", CASES)
def test_a_cpu_adds_rows_at_their_ids(name: str, dtype: str, padding_idx: int | None) -> None:
    items, columns = CASES[name]
    grad, ids = sample((len(items), columns), dtype), torch.tensor(items)
    options = {} if padding_idx is None else {"padding_idx": padding_idx}
    mod = module_of("amp_ir.embedding_backward", [grad, ids], num_embeddings=7, **options)
    (found,) = run_kernels(mod, [grad, ids])
    # Sums of at most 300 numbers in float32, rounded once.
    torch.testing.assert_close(
        found,
        expected(grad, ids, padding_idx).to(grad.dtype),
        rtol=1e-2 if dtype == "bfloat16" else 2e-5,
        atol=1e-5,
    )
