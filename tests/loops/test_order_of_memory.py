# SPDX-License-Identifier: Apache-2.0
"""A matrix whose columns lie one after the other is summed in the order of its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tvm.relax import op as R

from amp_ir.loops.fusion.fuse import group_values
from amp_ir.loops.ir import Reduction
from cuda_emulator import in_emulator
from kernel_check import run_cuda_kernels, run_kernels
from relax_functions import build, sample


def transposed(x: Any, v: Any) -> tuple[Any, ...]:
    return (R.matmul(R.permute_dims(x, [1, 0]), v),)


def transposed_rows(x: Any, v: Any) -> tuple[Any, ...]:
    flat = R.reshape(x, (96, 40))
    return (R.matmul(R.permute_dims(flat, [1, 0]), R.reshape(v, (96,))),)


def batch(x: Any, v: Any) -> tuple[Any, ...]:
    column = R.reshape(v, (3, 20, 1))
    return (R.reshape(R.matmul(R.permute_dims(x, [0, 2, 1]), column), (3, 33)),)


def largest(x: Any, _v: Any) -> tuple[Any, ...]:
    return (R.max(R.permute_dims(x, [1, 0]), -1), R.mean(R.permute_dims(x, [1, 0]), -1))


# The body, the shapes of its arguments, and what PyTorch computes.
CASES: dict[str, tuple[Any, list[tuple[int, ...]], Any]] = {
    "matrix by vector": (transposed, [(96, 40), (96,)], lambda x, v: (x.T @ v,)),
    "few columns": (transposed, [(96, 3), (96,)], lambda x, v: (x.T @ v,)),
    "reshaped rows": (
        transposed_rows,
        [(4, 24, 40), (4, 24)],
        lambda x, v: (x.flatten(0, 1).T @ v.flatten(),),
    ),
    "a batch": (batch, [(3, 20, 33), (3, 20)], lambda x, v: ((x * v[..., None]).sum(1),)),
    "largest and mean": (
        largest,
        [(70, 40), (1,)],
        lambda x, v: (x.max(0)[0], x.mean(0)),
    ),
}


def module_and_inputs(name: str) -> tuple[Any, list[torch.Tensor]]:
    body, shapes, _ = CASES[name]
    mod = build([(shape, "float32") for shape in shapes], body)
    return mod, [sample(shape, "float32") for shape in shapes]


@pytest.mark.parametrize("name", CASES)
def test_a_cpu_sums_the_same(name: str) -> None:
    mod, inputs = module_and_inputs(name)
    right = CASES[name][2](*(one.double() for one in inputs))
    for got, expected in zip(run_kernels(mod, inputs), right, strict=True):
        # Sums of at most 96 products in float32.
        torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["matrix by vector", "a batch"])
@in_emulator
def test_a_gpu_sums_the_same(name: str) -> None:
    mod, inputs = module_and_inputs(name)
    right = CASES[name][2](*(one.double() for one in inputs))
    for got, expected in zip(run_cuda_kernels(mod, inputs), right, strict=True):
        torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-5)


def reduction_of(mod: Any) -> Reduction:
    """The one reduction of a module."""
    _, grouping = group_values(mod)
    members = [one for group in grouping.groups for one in group.members]
    (total,) = (one for one in members if isinstance(one, Reduction))
    return total


@pytest.mark.parametrize("name", ["matrix by vector", "few columns", "reshaped rows"])
def test_columns_are_summed_side_by_side(name: str) -> None:
    total = reduction_of(module_and_inputs(name)[0])
    assert total.source_shape == (1, 96, 3 if name == "few columns" else 40)
    assert total.axes == (1,)


def test_rows_stay_rows() -> None:
    mod = build([((96, 40), "float32"), ((40,), "float32")], lambda x, v: (R.matmul(x, v),))
    assert reduction_of(mod).axes == (2,)
