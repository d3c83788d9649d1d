# SPDX-License-Identifier: Apache-2.0
"""What a CPU has instructions for, beyond arithmetic."""

from __future__ import annotations

import functools
from typing import Any

from tvm import tirx

from amp_ir.ir.target import CompileTarget
from amp_ir.ir.vector_instructions import ROUND, SCALE
from amp_ir.loops.elements import DeviceFunctions, dtype_of


@functools.cache
def functions_of(target: CompileTarget) -> DeviceFunctions:
    """Return the functions that kernels for this CPU are written with."""
    return DeviceFunctions(
        _fence,
        bfloat16_bits=_bfloat16_bits if target.has("avx512bf16") else None,
        scaled=_scaled if target.has("avx512f") else None,
    )


def _fence(x: Any) -> Any:
    """Return `x` in LLVM's arithmetic fence, which no contraction crosses; it is free."""
    return tirx.call_llvm_pure_intrin(dtype_of(x), "llvm.arithmetic.fence", x)


def _bfloat16_bits(x: Any) -> Any:
    return tirx.call_llvm_pure_intrin("uint16", ROUND, x)


def _scaled(x: Any, exponent: Any, is_zero: Any) -> Any:
    return tirx.call_llvm_pure_intrin("float32", SCALE, x, exponent, is_zero)
