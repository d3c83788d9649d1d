# SPDX-License-Identifier: Apache-2.0
"""The kernels' own exp, log, tanh, erf ...: error bounds against float64."""

from __future__ import annotations

import ctypes
import functools
import math
import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm
from tvm.relax import op as R

import amp_ir
from amp_ir.ir.target import cpu
from amp_ir.loops import math as m
from amp_ir.loops.builders import pointwise
from amp_ir.loops.fusion.fuse import fuse_loops
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.vm.build import KERNEL_PIPELINE
from kernel_check import evaluate, kernels_of, module_of, run_kernels
from relax_functions import build

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 88.7, 89.0, -103.0, -105.0]


def everything(low: float, high: float) -> torch.Tensor:
    """Dense samples of a range, and special values."""
    return torch.cat([torch.linspace(low, high, 40001), torch.tensor(SPECIAL)])


# name -> op, exact function, range, and the bound that math.py states ("relative" or "absolute").
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], float, float, str, float]] = {
    "exp": (R.exp, torch.exp, -87.0, 88.5, "relative", 2.5e-7),
    "log": (R.log, torch.log, 1e-30, 1000.0, "relative", 2.5e-7),
    "tanh": (R.tanh, torch.tanh, -12.0, 12.0, "absolute", 2.5e-7),
    "erf": (R.erf, torch.erf, -5.0, 5.0, "relative", 3e-7),
    "sigmoid": (R.sigmoid, torch.sigmoid, -80.0, 80.0, "relative", 4e-7),
}


@pytest.mark.parametrize("name", CASES)
def test_error_stays_below_the_stated_bound(name: str) -> None:
    op, exact, low, high, kind, bound = CASES[name]
    x = everything(low, high)
    (got,) = run_kernels(build([(tuple(x.shape), "float32")], op), [x])
    expected = exact(x.double())
    finite = expected.isfinite() & (expected.abs() < 3e38) & (expected.abs() > 1e-37)
    error = (got.double() - expected)[finite].abs()
    if kind == "relative":
        # Near log(1) = 0 the argument's own rounding dominates: compare absolutely there.
        error = error / expected[finite].abs().clamp(min=0.1 if name == "log" else 1e-300)
    assert error.max() <= bound


@pytest.mark.parametrize("name", CASES)
def test_special_values_are_pytorchs(name: str) -> None:
    op, exact, *_ = CASES[name]
    x = torch.tensor(SPECIAL)
    (got,) = run_kernels(build([(tuple(x.shape), "float32")], op), [x])
    expected = exact(x)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isinf(), expected.isinf())
    ok = expected.isfinite()
    # A subnormal has few digits: two of its last place, 2^-149.
    torch.testing.assert_close(got[ok], expected[ok], rtol=1e-6, atol=2**-148)
    assert torch.equal(got[ok].signbit(), expected[ok].signbit())


on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags' numbers are x86's")
# Flags of arithmetic with subnormal numbers and of results that are, or are rounded to 0: an Intel
# CPU takes a hundred times as long for them.
DENORMAL, UNDERFLOW = 0x02, 0x10


def with_flags(mod: tvm.IRModule, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Run the one kernel of a module; return its results and which of the flags it raises."""
    libm = ctypes.CDLL("libm.so.6")
    fused = fuse_loops(mod)
    compiled = tvm.compile(kernels_of(fused), cpu().tvm_target, tir_pipeline=KERNEL_PIPELINE)
    raised = []

    def run(name: str, arguments: list[torch.Tensor]) -> None:
        kernel, given = compiled[name], [tvm.runtime.from_dlpack(one) for one in arguments]
        assert libm.feclearexcept(DENORMAL | UNDERFLOW) == 0
        kernel(*given)
        raised.append(libm.fetestexcept(DENORMAL | UNDERFLOW))

    results = evaluate(fused, inputs, run)
    assert len(raised) == 1
    return results, raised[0]


@on_x86
@pytest.mark.parametrize("extent", [128, 11], ids=["in vectors", "one by one"])
def test_the_exponential_of_a_mask_does_not_underflow(extent: int) -> None:
    hidden = [-math.inf, torch.finfo(torch.float32).min, -1e4, -105.0]
    x = torch.tensor(([*hidden, -80.0, 0.0, 1.0, math.inf] * 16)[:extent])
    (got,), raised = with_flags(build([(tuple(x.shape), "float32")], R.exp), [x])
    torch.testing.assert_close(got, x.exp())
    assert raised == 0


@on_x86
@pytest.mark.parametrize("name", ["gelu", "gelu_backward"])
def test_no_number_of_gelu_is_subnormal(name: str) -> None:
    x = torch.cat([torch.linspace(-20.0, 20.0, 40001), torch.linspace(-1e4, 1e4, 1024)])
    if name == "gelu":
        mod, inputs = build([(tuple(x.shape), "float32")], R.nn.gelu), [x]
        expected = x * 0.5 * torch.special.erfc(x.double() * -math.sqrt(0.5))
    else:
        inputs = [torch.ones_like(x), x]
        mod = module_of("amp_ir.gelu_backward", inputs, approximate="none")
        wide = x.double()
        expected = 0.5 * torch.special.erfc(wide * -math.sqrt(0.5))
        expected += wide * torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    (got,), raised = with_flags(mod, inputs)
    assert raised == 0
    # The bell is 0 where it is less than 7.6e-37. Its argument, of up to 83, has been rounded.
    ordinary = (x + 0.75).abs() > 0.1  # the gradient is a difference there
    torch.testing.assert_close(got.double()[ordinary], expected[ordinary], rtol=8e-6, atol=4e-36)


def test_a_second_lowering_of_an_op_is_refused() -> None:
    def again(op: Lowering, x: Any) -> Any:
        return pointwise(x.shape, "float32", lambda *i: m.exp(x[i]))

    with pytest.raises(ValueError, match="relax.exp has a lowering already"):
        lowers("relax.exp")(again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_products_of_a_choice_between_two_numbers(dtype: torch.dtype) -> None:
    """TVM's interval analysis fails on these under a name, which equal ones are given."""

    def function(x: Any, y: Any, z: Any) -> Any:
        a, b, z = R.multiply(x, y), R.add(x, y), R.multiply(z, z)
        chosen, larger = R.where(R.greater(a, b), a, b), R.maximum(a, z)
        results = [R.multiply(one, z) for one in (chosen, chosen, larger, larger)]
        results += [R.divide(one, z) for one in (chosen, chosen)]
        results = [R.multiply(one, x) for one in results]
        return functools.reduce(R.add, results)

    name = str(dtype).removeprefix("torch.")
    x, y = torch.linspace(-2, 2, 37, dtype=dtype), torch.linspace(3, -3, 37, dtype=dtype)
    z = x.abs() + 1
    (got,) = run_kernels(build([((37,), name)] * 3, function), [x, y, z])
    a, b, z = x * y, x + y, z * z
    chosen, larger = torch.where(a > b, a, b), torch.maximum(a, z)
    torch.testing.assert_close(got, 2 * x * (chosen * z + larger * z + chosen / z))


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.mark.parametrize("wanted", INTEGERS, ids=str)
def test_integers_wrap_as_in_pytorch(wanted: torch.dtype) -> None:
    """Of what is known as it compiles, too: TVM refused arange(-6, 6).to(torch.uint8)."""

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        made = [torch.arange(-300, 300, 7), torch.arange(-6, 6), torch.arange(2**31 - 3, 2**31 + 3)]
        given = [one.to(dtype) for one in (*made, x + 1) for dtype in INTEGERS]
        return [one.to(wanted) for one in given]

    x = torch.randint(-(2**40), 2**40, (333,))
    found = amp_ir.jit(step, model=torch.nn.Linear(1, 1))(x)
    for one, expected in zip(found, step(x), strict=True):
        assert torch.equal(one, expected)
