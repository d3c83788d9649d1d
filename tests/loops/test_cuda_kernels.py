# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels of every op of the dialect, run in the emulator, against the interpreter."""

from __future__ import annotations

import pytest
import torch

from amp_ir.ir.interpreter import interpret
from cuda_emulator import in_emulator
from dialect_cases import CASES, EXPANDED
from kernel_check import module_of, run_cuda_modules

# As for the CPU's kernels, see test_dialect_kernels.py; sums are taken in another order.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
NOISE = 5e-6
KERNELS = [case for case in CASES if case.op not in EXPANDED]
# Cases that are compiled together: g++ takes most of the time, and more for each call of it.
TOGETHER = 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("first", range(0, len(KERNELS), TOGETHER))
@in_emulator
def test_kernels_are_their_references(first: int, dtype: str) -> None:
    cases = KERNELS[first : first + TOGETHER]
    programs = []
    for case in cases:
        inputs = case.tensors(getattr(torch, dtype))
        programs.append((module_of(case.op, inputs, **case.options), inputs))
    for case, program, found in zip(cases, programs, run_cuda_modules(programs), strict=True):
        for got, expected in zip(found, interpret(*program), strict=True):
            assert got.dtype == expected.dtype, case
            if not expected.is_floating_point():
                assert torch.equal(got, expected), case
                continue
            tolerance = TOLERANCE[expected.dtype]
            torch.testing.assert_close(
                got, expected, rtol=tolerance, atol=NOISE, equal_nan=True,
                msg=lambda text, case=case: f"{case}: {text}",
            )  # fmt: skip
