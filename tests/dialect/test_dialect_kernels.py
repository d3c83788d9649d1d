# SPDX-License-Identifier: Apache-2.0
"""Every op of the dialect: its declared types, its reference in all dtypes, its compiled kernel."""

from __future__ import annotations

import pytest
import torch

from amp_ir.dialect import DECLARATIONS
from amp_ir.ir.interpreter import interpret
from amp_ir.loops.lowering_registry import LOWERINGS
from dialect_cases import CASES, EXPANDED, Case
from kernel_check import module_of, run_kernels

# float32: a few roundings (2^-24 each) and sums of up to 100 terms of ordinary size. bfloat16: the
# result is rounded once, and float32 noise may move it to the neighbour: 2^-7 of it.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7}
NOISE = 5e-6


def test_every_op_has_a_case_and_a_kernel():
    # A loop is what its body is: tests/capture/test_rolled_loops.py.
    ops = set(DECLARATIONS) - {"amp_ir.loop"}
    assert {case.op for case in CASES} == ops
    assert ops - set(LOWERINGS) == EXPANDED


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_same_in_float64_and_rounds_once(case: Case):
    reference = DECLARATIONS[case.op].reference
    low = _tuple(reference(*case.tensors(torch.bfloat16), **case.options))
    # The same arguments, held in float64.
    wide = [
        one.double() if one.is_floating_point() else one for one in case.tensors(torch.bfloat16)
    ]
    exact = _tuple(reference(*wide, **case.options))
    for rounded, value in zip(low, exact, strict=True):
        tolerance = TOLERANCE.get(rounded.dtype, 0.0)
        noise = NOISE
        if case.op in EXPANDED:
            # These store what one of their kernels leaves for the next: scores, weights and their
            # gradients, or gates and states of a few time steps, each rounded by half of 2^-8 of
            # ordinary numbers. Eight of them reach a result.
            noise = 8 * 2**-9 * float(value.abs().max())
        torch.testing.assert_close(
            rounded.double(), value.double(), rtol=tolerance, atol=noise, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", [one for one in CASES if one.op not in EXPANDED], ids=str)
def test_kernel_is_the_reference(case: Case, dtype: torch.dtype):
    inputs = case.tensors(dtype)
    mod = module_of(case.op, inputs, **case.options)
    for got, expected in zip(run_kernels(mod, inputs), interpret(mod, inputs), strict=True):
        assert got.dtype == expected.dtype
        if not expected.is_floating_point():
            assert torch.equal(got, expected)
            continue
        tolerance = TOLERANCE[expected.dtype]
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=NOISE, equal_nan=True)


def _tuple(results: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else results
