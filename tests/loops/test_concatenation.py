# SPDX-License-Identifier: Apache-2.0
"""Concatenations that copy, and the ones that choose: the same bits, in a kernel of their own."""

from __future__ import annotations

import re
from random import Random

import pytest
import torch
from tvm import relax
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


# Consumers of a concatenation: what is emitted, and the same by PyTorch in float64.
CONSUMERS = {
    "relu": (lambda e, x: e(op.nn.relu(x)), torch.relu),
    "scaled by one broadcast": (
        lambda e, x: e(op.multiply(x, e(op.nn.relu(relax.const(2.0, "float32"))))),
        lambda x: x * 2,
    ),
    "cast": (lambda e, x: e(op.astype(x, "float32")), lambda x: x),
    "flattened": (lambda e, x: e(op.reshape(e(op.negative(x)), (-1,))), lambda x: -x.flatten()),
    "gelu and cast": (
        lambda e, x: e(op.astype(e(op.nn.gelu(x)), "bfloat16")),
        torch.nn.functional.gelu,
    ),
}
# Half a unit in the last place of the result, and float32's few roundings before.
RTOL = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def _random_shapes(random):
    """Shapes that differ along one axis, and the axis; lengths around multiples of a vector."""
    rank = random.randint(1, 4)
    axis = random.randrange(rank)
    lengths = [1, 3, 7, 16, 17, 32, 48, 61]
    common = [random.choice(lengths if d == rank - 1 else [1, 2, 3, 5]) for d in range(rank)]
    ends = [random.choice(lengths) for _ in range(random.randint(2, 9))]
    if rank == 1:
        ends[0] *= random.choice([1, 1024])
    return [tuple(n if d == axis else k for d, k in enumerate(common)) for n in ends], axis


@pytest.mark.parametrize("seed", range(40))
def test_computed_parts_and_what_is_computed_from_them(seed):
    random = Random(seed)
    torch.manual_seed(seed)
    shapes, axis = _random_shapes(random)
    name, dtype = random.choice([*CONSUMERS]), random.choice(["float32", "bfloat16", "float16"])
    emit, wanted_of = CONSUMERS[name]
    if dtype != "float32" and name == "scaled by one broadcast":
        emit, wanted_of = CONSUMERS["relu"]
    computed = random.randrange(len(shapes))

    def build(e, *parts):
        parts = [e(op.nn.relu(x)) if k == computed else x for k, x in enumerate(parts)]
        return emit(e, e(op.concat(parts, axis)))

    mod = program(build, *shapes, dtypes=[dtype] * len(shapes))
    parts = [torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes]
    (got,) = run_kernels(mod, parts)
    exact = [x.double().relu() if k == computed else x.double() for k, x in enumerate(parts)]
    wanted = wanted_of(torch.cat(exact, axis))
    torch.testing.assert_close(got.double(), wanted, rtol=RTOL[got.dtype], atol=1e-6)


def reads(mod):
    """How often the kernels of a module load from an input."""
    text = str(kernels_of(fuse_loops(mod)))
    return len(re.findall(r"= in\d+\[", text))


FUSED = {
    "a stack": ([(300, 1, 64)] * 9, 1, 9),
    "columns": ([(300, 64), (300, 32), (300, 48)], 1, 3),
    "columns and some more": ([(300, 64), (300, 37)], 1, 3),  # vectors, and the last five
    "rows": ([(200, 64), (300, 64)], 0, 2),
    "one long row": ([(70000,), (40000,)], 0, 4),
    "too short for vectors": ([(300, 5), (300, 7)], 1, 2),
    "too many": ([(300, 64)] * 17, 1, 17),
}


@pytest.mark.parametrize("case", FUSED)
def test_each_part_is_read_in_its_own_loop(case):
    shapes, axis, expected = FUSED[case]
    mod = program(lambda e, *x: e(op.nn.relu(e(op.concat(list(x), axis)))), *shapes)
    assert reads(mod) == expected
    parts = [torch.randn(shape) for shape in shapes]
    (got,) = run_kernels(mod, parts)
    assert torch.equal(got, torch.cat(parts, axis).relu())


def test_parts_of_images_with_channels_last():
    # As of a U-Net: one of them computed with, the channels joined, and one sum of both.
    def build(e, x, y):
        x, y = (e(op.permute_dims(one, [0, 3, 1, 2])) for one in (x, y))
        joined = e(op.nn.relu(e(op.concat([e(op.negative(x)), y], 1))))
        return e(op.permute_dims(joined, [0, 2, 3, 1]))

    x, y = torch.randn(2, 5, 7, 32), torch.randn(2, 5, 7, 48)
    mod = program(build, x.shape, y.shape)
    (got,) = run_kernels(mod, [x, y])
    assert torch.equal(got, torch.cat([-x, y], 3).relu())
