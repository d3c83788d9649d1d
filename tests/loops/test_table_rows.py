# SPDX-License-Identifier: Apache-2.0
"""Rows that ids choose are read as vectors: an id is one number for all lanes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tvm_ffi
from tvm import tirx
from tvm.relax import op as R

from amp_ir.ir.vector_instructions import LANES
from amp_ir.loops.fusion.fuse import fuse_loops
from kernel_check import module_of, run_kernels
from relax_functions import build


def words(mod: Any) -> set[tuple[str, int]]:
    """The dtypes and sizes of what kernels hold under names in memory."""
    found: list[tirx.AllocBuffer] = []
    for function in fuse_loops(mod).functions.values():
        if isinstance(function, tirx.PrimFunc):
            tvm_ffi.structural_walk(function.body, [(tirx.AllocBuffer, found.append)])
    types = [one.buffer.ty for one in found]
    return {(str(one.dtype), int(one.shape[0])) for one in types}


@pytest.mark.parametrize("width", [4 * LANES, 4 * LANES + 3])
def test_an_id_is_one_number_for_a_vector(width: int) -> None:
    table, ids = torch.randn(50, width), torch.tensor([[3, 49, 0], [3, 7, 1]])
    mod = module_of("amp_ir.embedding", [table, ids])
    assert ("int32", 1) in words(mod) and ("int32", LANES) not in words(mod)
    assert torch.equal(run_kernels(mod, [table, ids])[0], table[ids])


def test_ids_of_elements_are_a_vector() -> None:
    x = torch.randn(6, 4 * LANES)
    ids = torch.randint(0, 6, (3, 4 * LANES))

    def body(x: Any, ids: Any) -> tuple[Any, ...]:
        return (R.gather_elements(x, ids, axis=0),)

    mod = build([((6, 4 * LANES), "float32"), ((3, 4 * LANES), "int64")], body)
    assert ("int32", LANES) in words(mod)
    assert torch.equal(run_kernels(mod, [x, ids])[0], x.gather(0, ids))
