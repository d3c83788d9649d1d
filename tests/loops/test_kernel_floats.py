# SPDX-License-Identifier: Apache-2.0
"""Kernels take floats for what they are: no law of real numbers is applied to them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tvm import relax
from tvm.relax import op as R

from cuda_emulator import in_emulator
from kernel_check import run_cuda_modules, run_kernels
from relax_functions import build


def number(value: float) -> relax.Constant:
    return relax.const(value, "float32")


# What Relax's names are in PyTorch.
T = SimpleNamespace(
    add=torch.add, subtract=torch.subtract, multiply=torch.multiply, divide=torch.divide,
    where=torch.where, equal=torch.eq, not_equal=torch.ne, less=torch.less, abs=torch.abs,
    negative=torch.negative,
)  # fmt: skip
# name -> the expression in Relax, or in PyTorch: R and n are the ops and the literals of either.
# Large sums round to what the large number leaves; NaN and inf are not numbers to cancel.
CASES: dict[str, Callable[[Any, Callable[[float], Any], Any, Any], Any]] = {
    "round": lambda R, n, x, y: R.subtract(R.add(x, n(1.5 * 2**23)), n(1.5 * 2**23)),
    "what a sum leaves": lambda R, n, x, y: R.subtract(R.add(x, y), y),
    "what a sum leaves of the other": lambda R, n, x, y: R.subtract(R.add(x, y), x),
    "compensation": lambda R, n, x, y: R.subtract(R.subtract(R.add(y, x), y), x),
    "itself less": lambda R, n, x, y: R.subtract(x, x),
    "zero times": lambda R, n, x, y: R.multiply(x, n(0.0)),
    "times zero": lambda R, n, x, y: R.multiply(n(0.0), x),
    "zero over": lambda R, n, x, y: R.divide(n(0.0), R.multiply(x, n(0.0))),
    "over itself": lambda R, n, x, y: R.divide(x, x),
    "is a number": lambda R, n, x, y: R.where(R.equal(x, x), n(1.0), n(2.0)),
    "is no number": lambda R, n, x, y: R.where(R.not_equal(x, x), n(1.0), n(2.0)),
    "the smaller less": lambda R, n, x, y: R.subtract(R.where(R.less(x, y), x, y), x),
}
# Ops before the expression: names that follow each other are kept in other ways at other depths.
BEFORE: list[Callable[[Any, Any], Any]] = [
    lambda R, x: x,
    lambda R, x: R.abs(x),
    lambda R, x: R.negative(R.abs(x)),
]


def program(name: str, depth: int, extent: int) -> tuple[Any, list[torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(extent, generator=random)
    x[:3] = torch.tensor([math.inf, math.nan, -0.0])
    y = 1e5 * torch.randn(extent, generator=random)

    def in_relax(a: Any, b: Any) -> Any:
        return R.negative(CASES[name](R, number, BEFORE[depth](R, a), b))

    return build([((extent,), "float32")] * 2, in_relax), [x, y]


def check(name: str, depth: int, inputs: list[torch.Tensor], got: torch.Tensor) -> None:
    x, y = inputs
    expected = -CASES[name](T, torch.tensor, BEFORE[depth](T, x), y)
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0)), (name, depth)
    assert torch.equal(got.isnan(), expected.isnan()), (name, depth)


@pytest.mark.parametrize("extent", [3, 64], ids=["one by one", "in vectors"])
@pytest.mark.parametrize("depth", range(len(BEFORE)))
@pytest.mark.parametrize("name", CASES)
def test_no_law_of_real_numbers_is_applied(name: str, depth: int, extent: int) -> None:
    mod, inputs = program(name, depth, extent)
    (got,) = run_kernels(mod, inputs)
    check(name, depth, inputs, got)


@in_emulator
def test_nor_in_cudas_kernels() -> None:
    asked = list(itertools.product(CASES, range(len(BEFORE))))
    programs = [program(name, depth, 256) for name, depth in asked]
    found = run_cuda_modules(programs)
    for (name, depth), (_, inputs), (got,) in zip(asked, programs, found, strict=True):
        check(name, depth, inputs, got)


def test_what_is_added_in_one_rounding_is_not_lost() -> None:
    # The exponential rounds its argument to an integer by adding and taking away a large number,
    # here of a value that is kept under a name.
    x = torch.linspace(-80, 80, 1024)
    (got,) = run_kernels(build([((1024,), "float32")], lambda a: R.exp(R.negative(a))), [x])
    torch.testing.assert_close(got.double(), torch.exp(-x.double()), rtol=1.3e-7, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_no_number_is_true_and_differs_from_all(dtype: str) -> None:
    x = torch.tensor([math.nan, 0.0, -0.0, math.inf, 2.0] * 13, dtype=getattr(torch, dtype))
    shape = (tuple(x.shape), dtype)
    for op, expected in (
        (lambda a: R.astype(a, "bool"), x.bool()),
        (lambda a: R.not_equal(a, a), x != x),
        (R.isnan, x.isnan()),
    ):
        (got,) = run_kernels(build([shape], op), [x])
        assert torch.equal(got, expected)
    (got,) = run_kernels(build([shape, shape], R.maximum), [x, x.flip(0)])
    assert torch.equal(got.nan_to_num(7.0), torch.maximum(x, x.flip(0)).nan_to_num(7.0))
