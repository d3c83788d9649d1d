# SPDX-License-Identifier: Apache-2.0
"""Integers wrap around as PyTorch's, also under optimisers, and no division ends the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tvm import relax
from tvm.relax import op as R

from cuda_emulator import in_emulator
from kernel_check import run_cuda_modules, run_kernels
from relax_functions import build

DTYPES = ["int8", "uint8", "int16", "int32", "int64"]
OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (R.add, torch.add),
    "subtract": (R.subtract, torch.sub),
    "multiply": (R.multiply, torch.mul),
    "is above": (lambda x, y: R.greater(R.add(x, y), x), lambda x, y: x + y > x),
    "below again": (lambda x, y: R.subtract(R.add(x, y), y), lambda x, y: x + y - y),
    "left_shift": (R.left_shift, torch.bitwise_left_shift),
    "right_shift": (R.right_shift, torch.bitwise_right_shift),
    "negative": (lambda x, y: R.negative(R.add(x, y)), lambda x, y: -(x + y)),
    "abs": (lambda x, y: R.abs(R.multiply(x, y)), lambda x, y: abs(x * y)),
    "power": (lambda x, y: R.power(x, R.abs(y)), lambda x, y: torch.pow(x, y.abs())),
}


def truncated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """PyTorch's, which the lowest integer over -1 would end (SIGFPE): that wraps around."""
    lowest = (x == torch.iinfo(x.dtype).min) & (y == -1 if x.dtype != torch.uint8 else y < 0)
    quotient = torch.div(x, torch.where(lowest, 1, y), rounding_mode="trunc")
    return torch.where(lowest, x, quotient)


DIVISIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "divide": (R.divide, truncated),
    "floor_divide": (R.floor_divide, torch.floor_divide),
    "mod": (R.mod, torch.fmod),
    "floor_mod": (R.floor_mod, torch.remainder),
}


def extremes(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of integers near 0 and near both ends of the dtype."""
    limits = torch.iinfo(getattr(torch, dtype))
    ends = [limits.min, limits.min + 1, limits.max, limits.max - 1, limits.max // 3]
    numbers = [*ends, 0, 1, 2, 3, 5, 7, 8, 31, 33, 63, 64, 100]
    if limits.min:
        numbers += [-1, -2, -3, -5, -100]
    values = torch.tensor(sorted(set(numbers)), dtype=getattr(torch, dtype))
    return values.repeat_interleave(len(values)), values.repeat(len(values))


def program(op: Callable[..., Any], dtype: str, extent: int) -> Any:
    return build([((extent,), dtype)] * 2, op)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic_wraps_around(dtype: str) -> None:
    x, y = extremes(dtype)
    mod = program(lambda a, b: tuple(op(a, b) for op, _ in OPS.values()), dtype, len(x))
    for name, got in zip(OPS, run_kernels(mod, [x, y]), strict=True):
        expected = OPS[name][1](x, y)
        assert torch.equal(got, expected), (name, x[got != expected], y[got != expected])


@pytest.mark.parametrize("dtype", DTYPES)
def test_quotients_and_remainders_are_pytorchs_and_0_divides_by_nothing(dtype: str) -> None:
    x, y = extremes(dtype)
    mod = program(lambda a, b: tuple(op(a, b) for op, _ in DIVISIONS.values()), dtype, len(x))
    divides = y != 0
    for name, got in zip(DIVISIONS, run_kernels(mod, [x, y]), strict=True):
        expected = DIVISIONS[name][1](x[divides], y[divides])
        assert torch.equal(got[divides], expected), name


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_scalars_wrap_around_too(dtype: str) -> None:
    x, _ = extremes(dtype)
    limits = torch.iinfo(x.dtype)
    for number in (0, 1, limits.max, limits.min):
        literal = relax.const(number, dtype)
        mod = build(
            [((len(x),), dtype)],
            lambda a, c=literal: (R.add(a, c), R.subtract(c, a), R.multiply(a, c)),
        )
        scalar = torch.tensor(number, dtype=x.dtype)
        for got, expected in zip(
            run_kernels(mod, [x]), (x + scalar, scalar - x, x * scalar), strict=True
        ):
            assert torch.equal(got, expected), number


@in_emulator
def test_nor_do_cudas_kernels_count_on_no_overflow() -> None:
    programs = []
    for dtype in DTYPES:
        x, y = extremes(dtype)
        both = {**OPS, **DIVISIONS}
        mod = program(lambda a, b, all_=both: tuple(op(a, b) for op, _ in all_.values()), dtype,
                      len(x))  # fmt: skip
        programs.append((mod, [x, y]))
    for (_, (x, y)), results in zip(programs, run_cuda_modules(programs), strict=True):
        for name, got in zip({**OPS, **DIVISIONS}, results, strict=True):
            known = (y != 0) if name in DIVISIONS else torch.ones_like(y, dtype=torch.bool)
            expected = {**OPS, **DIVISIONS}[name][1](x[known], y[known])
            assert torch.equal(got[known], expected), (name, x.dtype)
