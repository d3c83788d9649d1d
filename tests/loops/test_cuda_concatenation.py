# SPDX-License-Identifier: Apache-2.0
"""Concatenations in CUDA kernels: one load an element, as wide as the parts allow, and right."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
import torch
from tvm.relax import op

from amp_ir.ir.interpreter import interpret
from amp_ir.loops.cuda import emit_cuda
from amp_ir.loops.fusion.fuse import fuse_loops
from cuda_emulator import in_emulator
from kernel_check import kernels_of, run_cuda_modules
from small_programs import program

DTYPES = ["float32", "bfloat16", "float16"]


def as_it_is(e: Any, x: Any) -> Any:
    return x


def relu(e: Any, x: Any) -> Any:
    return e(op.nn.relu(x))


def softmax(e: Any, x: Any) -> Any:
    return e(op.nn.softmax(e(op.astype(x, "float32"))))


def column_sums(e: Any, x: Any) -> Any:
    return e(op.sum(e(op.astype(x, "float32")), axis=[0]))


def total(e: Any, x: Any) -> Any:
    return e(op.sum(e(op.astype(x, "float32"))))


def flattened(e: Any, x: Any) -> Any:
    return e(op.reshape(e(op.negative(x)), (-1,)))


def doubled(e: Any, x: Any) -> Any:
    """Concatenate a concatenation: parts of parts."""
    return e(op.negative(e(op.concat([x, e(op.nn.relu(x))], -1))))


CONSUMERS = [as_it_is, relu, softmax, column_sums, total, flattened, doubled]


def joined(consume: Any, axis: int, computed: int, *parts: Any) -> Any:
    def build(e: Any, *xs: Any) -> Any:
        xs = tuple(e(op.nn.relu(x)) if k == computed else x for k, x in enumerate(xs))
        return consume(e, e(op.concat(list(xs), axis)))

    dtypes = [str(x.dtype).removeprefix("torch.") for x in parts]
    return program(build, *(tuple(x.shape) for x in parts), dtypes=dtypes)


def random_case(random: Random) -> tuple[Any, list[torch.Tensor]]:
    """Parts that differ along one axis, in lengths around multiples of a vector."""
    rank = random.randint(1, 4)
    axis = random.randrange(rank)
    lengths = [1, 2, 3, 4, 7, 8, 12, 16, 24, 36, 61, 64]
    common = [random.choice(lengths if d == rank - 1 else [1, 2, 3, 5]) for d in range(rank)]
    ends = [random.choice(lengths) for _ in range(random.randint(2, 9))]
    if random.random() < 0.2:
        ends[random.randrange(len(ends))] = 0
    dtype = getattr(torch, random.choice(DTYPES))
    shapes = [tuple(n if d == axis else k for d, k in enumerate(common)) for n in ends]
    parts = [torch.randn(shape).to(dtype) for shape in shapes]
    computed = random.randrange(len(parts) + 1)
    return joined(random.choice(CONSUMERS), axis, computed, *parts), parts


def rotated(e: Any, x: Any, sine: Any, cosine: Any) -> Any:
    """Apply rotary embeddings: x cos + [-x2, x1] sin, of halves along the last axis."""
    last = len(x.ty.shape) - 1
    half, whole = int(x.ty.shape[last]) // 2, int(x.ty.shape[last])
    low = e(op.strided_slice(x, [last], [0], [half]))
    high = e(op.strided_slice(x, [last], [half], [whole]))
    other = e(op.concat([e(op.negative(high)), low], last))
    return e(op.add(e(op.multiply(x, cosine)), e(op.multiply(other, sine))))


def of_rows(e: Any, table: Any, ids: Any, row: Any) -> Any:
    """Join rows that are looked up, and one row for all, as of a class token."""
    rows = e(op.take(table, ids, axis=0))
    first = e(op.broadcast_to(row, (int(ids.ty.shape[0]), int(row.ty.shape[1]))))
    return e(op.nn.relu(e(op.concat([first, rows, e(op.negative(rows))], 1))))


def of_columns(e: Any, x: Any, y: Any) -> Any:
    """Join transposed tensors, whose lanes are not side by side in memory."""
    parts = [e(op.permute_dims(x)), e(op.permute_dims(y))]
    return e(op.nn.relu(e(op.concat(parts, 1))))


def of_two_loads(e: Any, x: Any, y: Any, z: Any) -> Any:
    """Join parts of one load, of two, and of one that both also have elsewhere."""
    parts = [x, e(op.add(x, y)), e(op.multiply(e(op.add(y, z)), x))]
    return e(op.nn.relu(e(op.concat(parts, 1)))), x


WRITTEN = [
    (rotated, [(2, 3, 5, 64), (5, 64), (5, 64)]),
    (rotated, [(2, 3, 5, 24), (5, 24), (5, 24)]),
    (rotated, [(2, 3, 5, 6), (5, 6), (5, 6)]),
    (of_columns, [(64, 5), (36, 5)]),
    (of_two_loads, [(7, 16), (7, 16), (7, 16)]),
    (of_two_loads, [(7, 5), (7, 5), (7, 5)]),
]


def written_cases() -> list[tuple[Any, list[torch.Tensor]]]:
    cases = []
    for body, shapes in WRITTEN:
        for dtype in DTYPES:
            inputs = [torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes]
            cases.append((program(body, *shapes, dtypes=[dtype] * len(shapes)), inputs))
    ids = torch.tensor([4, 0, 2, 2, 1, 3])
    for columns in (16, 13):
        inputs = [torch.randn(5, columns), ids, torch.randn(1, columns)]
        dtypes = ["float32", "int64", "float32"]
        cases.append((program(of_rows, *(x.shape for x in inputs), dtypes=dtypes), inputs))
    for dtype in (torch.bool, torch.int64):
        inputs = [torch.randint(0, 2, (3, n)).to(dtype) for n in (16, 9, 7)]
        cases.append((joined(as_it_is, 1, -1, *inputs), inputs))
    return cases


def compare(cases: list[tuple[Any, list[torch.Tensor]]]) -> None:
    for (mod, inputs), found in zip(cases, run_cuda_modules(cases), strict=True):
        for got, expected in zip(found, interpret(mod, inputs), strict=True):
            if not expected.is_floating_point():
                assert torch.equal(got, expected), mod.script()
                continue
            # Half a unit in the last place, twice where what is rounded is computed with again.
            rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[got.dtype]
            torch.testing.assert_close(
                got, expected, rtol=rtol, atol=rtol, msg=lambda text, mod=mod: text + mod.script()
            )


@pytest.mark.parametrize("seed", range(4))
@in_emulator
def test_random_concatenations_have_the_elements_of_their_parts(seed: int) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    compare([random_case(random) for _ in range(16)])


@in_emulator
def test_parts_of_every_kind_are_read_right() -> None:
    torch.manual_seed(0)
    compare(written_cases())


def loads_of(shapes: list[tuple[int, ...]], axis: int, dtype: str) -> list[tuple[int, int]]:
    """How many lanes each statement of the kernel of a relu loads from memory, and from where."""
    parts = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape in shapes]
    text = str(kernels_of(fuse_loops(joined(relu, axis, -1, *parts), emitter=emit_cuda)))
    lines = [line for line in text.splitlines() if re.search(r"= .*\bin\d+\[", line)]
    return [(_lanes(line), len(re.findall(r"\bin\d+\[", line))) for line in lines]


def _lanes(line: str) -> int:
    found = re.search(r"T\.Ramp\([^\[\]]*, 1, (\d+)\)\]", line)
    return int(found[1]) if found else 1


# Shapes, axis and dtype; lanes and sources of each load.
LOADS = {
    "a stack": ([(300, 1, 64)] * 9, 1, "bfloat16", [(8, 9)]),
    "columns": ([(300, 64), (300, 36)], 1, "bfloat16", [(4, 2)]),
    "columns of which 4 are a run": ([(300, 60), (300, 36)], 1, "bfloat16", [(4, 2)]),
    "odd columns": ([(300, 13), (300, 19)], 1, "bfloat16", [(1, 2)]),
    "float32": ([(300, 64), (300, 32)], 1, "float32", [(4, 2)]),
    "rows": ([(20, 64), (30, 64)], 0, "float16", [(8, 2)]),
}


@pytest.mark.parametrize("case", LOADS)
def test_an_element_is_loaded_once_and_with_its_neighbours(case: str) -> None:
    *arguments, expected = LOADS[case]
    assert loads_of(*arguments) == expected
