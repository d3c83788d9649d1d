# SPDX-License-Identifier: Apache-2.0
"""Concatenations that copy, and the ones that choose: the same bits, in a kernel of their own."""

from __future__ import annotations

import pytest
import torch
from tvm.relax import op

from amp_ir.loops.cpu.concatenation import MOST
from amp_ir.loops.fusion.fuse import fuse_loops
from kernel_check import kernels_of, run_kernels
from small_programs import program


def joined(shapes, axis, dtype):
    return program(lambda e, *parts: e(op.concat(list(parts), axis)), *shapes, dtypes=dtype)


def copies(mod):
    """How often the kernels of a module call memcpy."""
    return sum(str(f).count("memcpy") for f in kernels_of(fuse_loops(mod)).functions.values())


CASES = {
    "many rows": ([(2, 40)] * 9, 0, 9),
    "many of one element": ([(1,)] * 12, 0, 12),
    "of several sizes, in pieces": ([(MOST + 5,), (3,), (70,), (2 * MOST,)] + [(33,)] * 5, 0, 11),
    "few long rows": ([(3, 64), (3, 48), (3, 100)], 1, 3),
    "in the middle": ([(2, 3, 4, 9), (2, 3, 8, 9)], 2, 2),
    "few short rows are chosen from": ([(300, 5), (300, 7)], 1, 0),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool"])
@pytest.mark.parametrize("case", CASES)
def test_a_concatenation_has_the_bits_of_its_parts(case, dtype):
    shapes, axis, expected = CASES[case]
    mod = joined(shapes, axis, [dtype] * len(shapes))
    assert copies(mod) == expected
    parts = [torch.randint(-9, 9, shape).to(getattr(torch, dtype)) for shape in shapes]
    (got,) = run_kernels(mod, parts)
    assert torch.equal(got, torch.cat(parts, axis))


def test_copies_keep_every_bit_of_a_nan():
    bits = torch.tensor([0x7F81, 0x7FFF, -0x3F, 0x1234], dtype=torch.int16).repeat(10, 16)
    parts = [one.contiguous().view(torch.bfloat16) for one in bits.split(1)]
    mod = joined([(1, 64)] * 10, 0, ["bfloat16"] * 10)
    (got,) = run_kernels(mod, parts)
    assert torch.equal(got.view(torch.int16), bits)


def test_reshaped_and_computed_parts_are_copied_and_cast_ones_are_not():
    def build(e, x, y):
        parts = [e(op.reshape(x, (1, 40))), e(op.exp(y)), *[x] * 7]
        parts = [e(op.reshape(one, (1, 40))) for one in parts]
        return e(op.concat(parts, 0))

    mod = program(build, (40,), (5, 8))
    x, y = torch.randn(40), torch.randn(5, 8)
    (got,) = run_kernels(mod, [x, y])
    wanted = torch.stack([x, y.exp().reshape(40), *[x] * 7])
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_a_concatenation_that_is_computed_with_in_one_kernel_is_right_too():
    def build(e, *parts):
        return e(op.sum(e(op.multiply(e(op.concat(list(parts), 0)), parts[0])), axis=[1]))

    mod = program(build, *[(1, 64)] * 9)
    parts = [torch.randn(1, 64) for _ in range(9)]
    (got,) = run_kernels(mod, parts)
    wanted = (torch.cat(parts) * parts[0]).sum(1)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
