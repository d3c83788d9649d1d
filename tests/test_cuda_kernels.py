# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels of every op of the dialect, run in the emulator, against the interpreter."""

from __future__ import annotations

import pytest
import torch
from cuda_emulator import in_emulator
from dialect_cases import CASES
from kernel_check import module_of, run_cuda_kernels

from amp_ir.interpreter import interpret
from amp_ir.passes.expand_attention import BACKWARD, FORWARD

# As for the CPU's kernels, see test_dialect_kernels.py; sums are taken in another order.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
NOISE = 5e-6
KERNELS = [case for case in CASES if case.op not in (FORWARD, BACKWARD)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("number", range(len(KERNELS)), ids=[str(case) for case in KERNELS])
@in_emulator
def test_kernel_is_the_reference(number: int, dtype: str) -> None:
    case = KERNELS[number]
    inputs = case.tensors(getattr(torch, dtype))
    mod = module_of(case.op, inputs, **case.options)
    for got, expected in zip(run_cuda_kernels(mod, inputs), interpret(mod, inputs), strict=True):
        assert got.dtype == expected.dtype
        if not expected.is_floating_point():
            assert torch.equal(got, expected)
            continue
        tolerance = TOLERANCE[expected.dtype]
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=NOISE, equal_nan=True)
