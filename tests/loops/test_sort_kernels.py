# SPDX-License-Identifier: Apache-2.0
"""Sorting, on the CPU and on a GPU: stable, NaN as PyTorch has it, however long the rows are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tvm.relax import op as R

from cuda_emulator import in_emulator
from kernel_check import run_cuda_modules, run_kernels
from relax_functions import build

# Rows of one warp, of a block, of several blocks with a rest, and along an outer axis.
SHAPES = [
    ((5, 7), 1), ((6, 4), 1), ((3, 64), 1), ((2, 700), 1), ((300, 6), 0), ((9,), 0), ((4, 1), 1),
]  # fmt: skip
DTYPES = ["float32", "bfloat16", "float16", "int64", "bool"]


def numbers(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Many ties, both zeros, both infinities and NaN."""
    generator = torch.Generator().manual_seed(len(shape))
    whole = torch.randint(-4, 5, shape, generator=generator)
    if not dtype.startswith(("float", "bfloat")):
        return whole.to(getattr(torch, dtype))
    values = whole.to(getattr(torch, dtype))
    values[(whole == 0) & (torch.rand(shape, generator=generator) < 0.5)] = -0.0
    for special in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        chosen = torch.rand(shape, generator=generator) < 0.1
        values[chosen] = special
    return values


def sorts(axis: int, count: int, *, descending: bool) -> Any:
    def body(x: Any) -> tuple[Any, ...]:
        first = R.topk(x, k=count, axis=axis, ret_type="both", largest=descending)
        return (
            R.sort(x, axis=axis, descending=descending),
            R.argsort(x, axis=axis, descending=descending, dtype="int64"),
            first[0],
            first[1],
        )

    return body


def programs(dtype: str, *, descending: bool) -> list[tuple[int, tuple[Any, list[torch.Tensor]]]]:
    """Axis, module and what to sort, of every other one of `SHAPES`.

    A shape is sorted in each dtype one way, and either way in some of them.
    """
    made = []
    for shape, axis in SHAPES[(DTYPES.index(dtype) + descending) % 2 :: 2]:
        body = sorts(axis, max(shape[axis] // 2, 1), descending=descending)
        made.append((axis, (build([(shape, dtype)], body), [numbers(shape, dtype)])))
    return made


def assert_sorted(found: list[torch.Tensor], x: torch.Tensor, axis: int, descending: bool) -> None:
    values, order = torch.sort(x, dim=axis, descending=descending, stable=True)
    count = max(x.shape[axis] // 2, 1)
    expected = [values, order, values.narrow(axis, 0, count), order.narrow(axis, 0, count)]
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got.to(right.dtype), right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cpu_sorts_rows_as_pytorch_does(dtype: str, descending: bool) -> None:
    for axis, (mod, inputs) in programs(dtype, descending=descending):
        assert_sorted(run_kernels(mod, inputs), inputs[0], axis, descending)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 64])
def test_a_cpu_finds_the_first_few(count: int, dtype: str, descending: bool) -> None:
    x = numbers((40, 260), dtype)

    def body(x: Any) -> tuple[Any, ...]:
        found = R.topk(x, k=count, axis=1, ret_type="both", largest=descending)
        return found[0], found[1]

    values, places = run_kernels(build([(tuple(x.shape), dtype)], body), [x])
    right, order = torch.sort(x, dim=1, descending=descending, stable=True)
    torch.testing.assert_close(values, right[:, :count], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places.long(), order[:, :count])


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("length", [20, 255, 256, 3000])
def test_a_cpu_sorts_all_kinds_of_float32(length: int, descending: bool) -> None:
    """Any bits: subnormal numbers, NaN of either sign and payload."""
    generator = torch.Generator().manual_seed(length)
    bits = torch.randint(-(2**31), 2**31, (6, length), generator=generator).to(torch.int32)
    x = bits.view(torch.float32)
    x[:, ::7] = x[:, ::7] * 1e-39

    def body(x: Any) -> tuple[Any, ...]:
        return (R.argsort(x, axis=1, descending=descending, dtype="int64"),)

    (places,) = run_kernels(build([(tuple(x.shape), "float32")], body), [x])
    assert torch.equal(places, torch.sort(x, dim=1, descending=descending, stable=True)[1])


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@in_emulator
def test_a_gpu_sorts_rows_as_pytorch_does(dtype: str, descending: bool) -> None:
    axes, made = zip(*programs(dtype, descending=descending), strict=True)
    for axis, (_, inputs), found in zip(axes, made, run_cuda_modules(made), strict=True):
        assert_sorted(found, inputs[0], axis, descending)
