# SPDX-License-Identifier: Apache-2.0
"""Instructions for whole vectors: where a CPU has them, results are as without."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import tvm
from tvm import tirx
from tvm.relax import op as R

from amp_ir.ir.target import CPU_VARIABLE, cpu
from amp_ir.ir.vector_instructions import ROUND
from amp_ir.loops.fusion.fuse import fuse_loops
from amp_ir.vm.build import KERNEL_PIPELINE
from amp_ir.vm.whole_vectors import whole_vectors
from kernel_check import kernels_of, run_kernels
from relax_functions import build

needs_bfloat16 = pytest.mark.skipif(
    not cpu().has("avx512bf16"), reason="LLVM may not use AVX512-BF16"
)
needs_avx512 = pytest.mark.skipif(not cpu().has("avx512f"), reason="LLVM may not use AVX-512")


def as_floats(bits: torch.Tensor) -> torch.Tensor:
    """Numbers below 2^32 as the bits of float32."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def machine_code(op: Any, *dtypes: str, extent: int = 64) -> str:
    mod = build([((extent,), dtype) for dtype in dtypes], op)
    compiled = tvm.compile(
        kernels_of(fuse_loops(mod)), cpu().tvm_target, tir_pipeline=KERNEL_PIPELINE
    )
    return str(compiled.mod.inspect_source("asm"))


def rounding_cases() -> torch.Tensor:
    """All upper halves of a float32, each with the lower halves beside a tie, and others."""
    upper = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234])
    return as_floats((upper + lower).flatten())


def one_by_one(op: Any, x: torch.Tensor, columns: int) -> torch.Tensor:
    """An op of rows that fill no vector; the factors keep them from being taken as one row."""
    rows, ones = x.reshape(-1, columns), torch.ones(columns)
    shapes = [(tuple(rows.shape), "float32"), ((columns,), "float32")]
    (got,) = run_kernels(build(shapes, lambda a, b: op(R.multiply(a, b))), [rows, ones])
    return got.flatten()


@pytest.mark.parametrize("in_vectors", [True, False], ids=["in vectors", "one by one"])
def test_each_float32_is_rounded_to_the_nearest_bfloat16(in_vectors: bool) -> None:
    """Subnormal ones too, which the instruction takes for 0."""

    def cast(a: Any) -> Any:
        return R.astype(a, "bfloat16")

    x = rounding_cases()
    if in_vectors:
        (got,) = run_kernels(build([(tuple(x.shape), "float32")], cast), [x])
    else:
        got = one_by_one(cast, x, 7)
    expected = x.bfloat16()
    assert torch.equal(got.isnan(), expected.isnan())
    ok = ~expected.isnan()
    assert torch.equal(got.view(torch.int16)[ok], expected.view(torch.int16)[ok])


def test_a_nan_keeps_its_sign_and_upper_digits() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0xFF812345, 0xFFFFFFFF] * 4)
    x = as_floats(bits)
    (got,) = run_kernels(build([((16,), "float32")], lambda a: R.astype(a, "bfloat16")), [x])
    quiet = torch.tensor([0x7FC0, 0x7FC0, 0xFFC1, 0xFFFF] * 4, dtype=torch.int32)
    assert torch.equal(got.view(torch.int16).to(torch.int32) & 0xFFFF, quiet)


def test_exponentials_are_the_same_in_vectors_and_one_by_one() -> None:
    special = [math.inf, -math.inf, 88.7228, 88.7229, 89.5, -87.33, -87.34, -103.9, -104.1, 1e30]
    x = torch.cat([torch.tensor(special), torch.linspace(-110.0, 95.0, 11 * 80 - 10)])
    (whole,) = run_kernels(build([(tuple(x.shape), "float32")], R.exp), [x])
    assert torch.equal(whole, one_by_one(R.exp, x, 11))
    torch.testing.assert_close(whole, x.exp(), rtol=3e-7, atol=2**-149)
    (nan,) = run_kernels(build([((11,), "float32")], R.exp), [torch.full((11,), math.nan)])
    assert nan.isnan().all()


@needs_bfloat16
def test_a_vector_is_rounded_by_an_instruction() -> None:
    code = machine_code(lambda a: R.astype(a, "bfloat16"), "float32")
    assert "vcvtneps2bf16" in code and "vpmovdw" not in code


@needs_avx512
def test_a_vector_is_scaled_by_an_instruction_and_under_a_mask() -> None:
    """Without the mask, what is rounded to 0 would take a hundred times as long."""
    scaled = [one for one in machine_code(R.exp, "float32").splitlines() if "vscalefps" in one]
    assert scaled
    assert all("{z}" in one for one in scaled)


@pytest.mark.skipif(CPU_VARIABLE in os.environ, reason="a CPU is named")
def test_what_pytorch_finds_in_the_cpu_is_used() -> None:
    """LLVM goes by the model, which a virtual machine may hide."""
    assert cpu().has("avx512bf16") == torch.cpu._is_avx512_bf16_supported()


@needs_bfloat16
def test_vectors_of_another_length_are_refused() -> None:
    x = tirx.decl_buffer((8,), "float32", "x")
    y = tirx.decl_buffer((8,), "uint16", "y")
    eight = tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), 8)
    rounded = tirx.call_llvm_pure_intrin("uint16x8", ROUND, tirx.BufferLoad(x, [eight]))
    with pytest.raises(AssertionError, match="has vectors of 8"):
        whole_vectors(tirx.PrimFunc([x, y], tirx.BufferStore(y, rounded, [eight])))
