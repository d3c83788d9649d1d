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
CPU_DTYPES = [*DTYPES, "float64", "uint8", "int8", "int16"]


def numbers(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Many ties, both zeros, both infinities and NaN."""
    generator = torch.Generator().manual_seed(len(shape))
    whole = torch.randint(-4, 5, shape, generator=generator)
    if dtype == "uint8":
        whole = whole.abs() * 60
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
    for shape, axis in SHAPES[(CPU_DTYPES.index(dtype) + descending) % 2 :: 2]:
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
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_a_cpu_sorts_rows_as_pytorch_does(dtype: str, descending: bool) -> None:
    for axis, (mod, inputs) in programs(dtype, descending=descending):
        assert_sorted(run_kernels(mod, inputs), inputs[0], axis, descending)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
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
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_cpu_sorts_all_kinds_of_floats(dtype: str, length: int, descending: bool) -> None:
    """Any bits: subnormal numbers, NaN of either sign and payload."""
    generator = torch.Generator().manual_seed(length)
    bits = torch.randint(-(2**63), 2**63 - 1, (6, length), generator=generator)
    x = bits.view(torch.float64) if dtype == "float64" else bits.int().view(torch.float32)
    x[:, ::7] = x[:, ::7] * (1e-310 if dtype == "float64" else 1e-39)
    assert_ordered(x, dtype, length, descending)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("count", [2, 300])
def test_a_cpu_sorts_any_whole_numbers(count: int, descending: bool) -> None:
    """Those of 64 bits, in rows of the least and the largest alone too; all digits, or a few."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randint(-(2**63), 2**63 - 1, (7, 300), generator=generator)
    x[1] = x[1] % 3
    x[2], x[3] = 2**63 - 1, -(2**63)
    x[4, ::2], x[4, 1::2] = 2**63 - 1, -(2**63)
    x[5] = x[5] & (255 << 40)
    assert_ordered(x, "int64", count, descending)


def assert_ordered(x: torch.Tensor, dtype: str, count: int, descending: bool) -> None:
    """Compare the first positions of rows in order with PyTorch's."""

    def body(x: Any) -> tuple[Any, ...]:
        if count == x.ty.shape[1]:
            return (R.argsort(x, axis=1, descending=descending, dtype="int64"),)
        return (R.topk(x, k=count, axis=1, ret_type="indices", largest=descending, dtype="int64"),)

    (places,) = run_kernels(build([(tuple(x.shape), dtype)], body), [x])
    expected = torch.sort(x, dim=1, descending=descending, stable=True)[1][:, :count]
    assert torch.equal(places, expected)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@in_emulator
def test_a_gpu_sorts_rows_as_pytorch_does(dtype: str, descending: bool) -> None:
    axes, made = zip(*programs(dtype, descending=descending), strict=True)
    for axis, (_, inputs), found in zip(axes, made, run_cuda_modules(made), strict=True):
        assert_sorted(found, inputs[0], axis, descending)
