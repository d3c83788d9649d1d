# SPDX-License-Identifier: Apache-2.0
"""Each schedule of a group, at shapes that take it, run in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import op as R

from amp_ir.ir.interpreter import interpret
from amp_ir.loops.cuda import emit_cuda, tiles
from amp_ir.loops.fusion import cuda_launches
from amp_ir.loops.fusion.fuse import fuse_loops
from amp_ir.loops.fusion.horizontal import fuse_horizontally
from amp_ir.loops.fusion.share_kernels import share_kernels
from cuda_emulator import in_emulator
from kernel_check import run_cuda_kernels
from relax_functions import build, sample


def normalised(x: Any) -> Any:
    return R.nn.softmax(x)


def normalised_and_summed(x: Any) -> tuple[Any, Any]:
    y = R.nn.softmax(x)
    return y, R.sum(R.multiply(y, x), axis=0)


def sum_of(*axes: int) -> Callable[[Any], Any]:
    return lambda x: R.sum(R.astype(x, "float32"), axis=list(axes))


def two_sums(x: Any) -> tuple[Any, Any]:
    x = R.astype(x, "float32")
    return R.sum(x, axis=0), R.sum(R.multiply(x, x), axis=0)


def largest(x: Any) -> Any:
    return R.max(R.abs(x))


# Shape, body, and (blocks, threads) of the launches that float32 takes.
LAUNCHES: dict[str, tuple[tuple[int, ...], Callable[..., Any], list[tuple[int, int]]]] = {
    "elements, one by one": ((3, 37), R.exp, [(1, 256)]),
    "elements, in vectors": ((64, 1024), R.exp, [(64, 256)]),
    "a warp has several rows": ((33, 40), normalised, [(3, 256)]),
    "a block has a row": ((5, 1030), normalised, [(5, 256)]),
    "a block has a long row": ((70, 20000), normalised, [(70, 1024)]),
    "blocks share a row": ((3, 20000), normalised, [(60, 256)] * 3),
    "blocks share everything": ((90000,), largest, [(88, 256), (1, 256)]),
    "tiles over all lines": ((7, 72), sum_of(0), [(1, 256)]),
    "tiles over parts of the lines": ((300, 72), sum_of(0), [(10, 256), (3, 256)]),
    "tiles in each of several groups": ((4, 300, 40), sum_of(1), [(20, 256), (5, 256)]),
    "a line of threads has few lanes": ((3000, 24), two_sums, [(24, 256), (2, 256)]),
    "more blocks than fill a GPU": ((300000, 8), two_sums, [(625, 256), (2, 1024)]),
    "rows in between": ((6, 70, 52), sum_of(0, 2), [(9, 256)]),
    "rows that are added up too": ((300, 72), normalised_and_summed, [(75, 128), (3, 256)]),
    "wide rows that are added up too": ((9, 20002), normalised_and_summed, [(9, 1024), (626, 256)]),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_group_is_launched_in_its_way(name: str) -> None:
    shape, body, expected = LAUNCHES[name]
    (kernel,) = kernels(build([(shape, "float32")], body))
    assert list(launches(kernel.body)) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAUNCHES)
@in_emulator
def test_every_way_gives_the_right_numbers(name: str, dtype: str) -> None:
    shape, body, _ = LAUNCHES[name]
    mod = build([(shape, dtype)], body)
    inputs = [sample(shape, dtype)]
    found = run_cuda_kernels(mod, inputs)
    # Sums of n terms: a part has few of them, and there are few parts. bfloat16 rounds results.
    tolerance = 1e-4 if dtype == "float32" else 2**-7
    for got, expected in zip(found, interpret(mod, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@in_emulator
def test_a_thread_with_many_lines_adds_blocks_of_them_to_a_wide_value(monkeypatch: Any) -> None:
    monkeypatch.setattr(tiles, "MANY_BLOCKS", 2)
    monkeypatch.setattr(tiles, "MOST_BLOCKS", 2)
    mod = build([((3001, 24), "float32")], two_sums)
    (kernel,) = kernels(mod)
    assert list(launches(kernel.body)) == [(2, 256), (2, 256)]
    inputs = [sample((3001, 24), "float32")]
    for got, expected in zip(run_cuda_kernels(mod, inputs), interpret(mod, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype, lanes", [("float32", 4), ("bfloat16", 8), ("float16", 8)])
def test_loads_and_stores_are_16_bytes_wide(dtype: str, lanes: int) -> None:
    (kernel,) = kernels(build([((64, 1024), dtype), ((1024,), dtype)], R.add))
    assert vector_widths(kernel) == {lanes}


def test_a_kernel_of_column_sums_stores_a_vector_at_once() -> None:
    def body(x: Any) -> tuple[Any, Any]:
        y = R.astype(R.nn.relu(x), "float32")
        return y, R.sum(y, axis=0)

    (kernel,) = kernels(build([((4096, 256), "bfloat16")], body))
    assert vector_widths(kernel) == {4}


def test_a_row_whose_length_no_vector_divides_is_read_element_by_element() -> None:
    (kernel,) = kernels(build([((64, 1023), "float32")], normalised))
    assert vector_widths(kernel) == set()


def test_arithmetic_is_of_the_devices_own_functions() -> None:
    (kernel,) = kernels(build([((64, 1024), "bfloat16")], R.tanh))
    called = {"tanhf", "amp_ir_bfloat16_bits"}
    assert {name for name in called if f'"{name}"' in kernel.script()} == called


SHAPES = [(300,), (1024,), (300,), (3, 1000), (1024,), (300,), (7,)]


def updates(*pairs: Any) -> tuple[Any, ...]:
    """Seven updates of a parameter by its gradient that share nothing but the rate."""
    rate, *tensors = pairs
    return tuple(
        R.subtract(p, R.multiply(rate, R.astype(g, "float32")))
        for p, g in zip(tensors[::2], tensors[1::2], strict=True)
    )


def updates_module(low: str) -> tvm.IRModule:
    specs = [one for shape in SHAPES for one in ((shape, "float32"), (shape, low))]
    return build([((), "float32"), *specs], updates)


def test_independent_kernels_are_one_launch() -> None:
    fused = fuse_loops(updates_module("bfloat16"), emitter=emit_cuda)
    merged = fuse_horizontally(fused, cuda_launches)
    (kernel,) = [one for one in merged.functions.values() if not isinstance(one, relax.Function)]
    assert list(launches(kernel.body)) == [(8, 256)]


@pytest.mark.parametrize("low", ["float32", "bfloat16"])
@in_emulator
def test_merged_kernels_give_the_right_numbers(low: str) -> None:
    mod = updates_module(low)
    inputs = [torch.tensor(0.1)]
    inputs += [sample(shape, dtype) for shape in SHAPES for dtype in ("float32", low)]
    for got, expected in zip(run_cuda_kernels(mod, inputs), interpret(mod, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def rows_of(x: Any) -> tuple[Any, ...]:
    """Every other pair of rows, each in a kernel of its own."""
    two = [R.strided_slice(x, [0], [k], [k + 2]) for k in range(0, 12, 4)]
    return tuple(R.nn.softmax(one) for one in two)


def test_kernels_that_start_elsewhere_are_one_with_vectors_still() -> None:
    mod = build([((12, 64), "bfloat16")], rows_of)
    shared = share_kernels(fuse_loops(mod, emitter=emit_cuda))
    kernels = [one for one in shared.functions.values() if not isinstance(one, relax.Function)]
    # The first one starts at 0, which adds nothing.
    assert len(kernels) == 2
    assert [vector_widths(one) for one in kernels] == [{8}, {8}]


@in_emulator
def test_shared_kernels_give_the_right_numbers() -> None:
    mod = build([((12, 64), "bfloat16")], rows_of)
    inputs = [sample((12, 64), "bfloat16")]
    for got, expected in zip(run_cuda_kernels(mod, inputs), interpret(mod, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7)


def kernels(mod: tvm.IRModule) -> list[tvm.tirx.PrimFunc]:
    fused = fuse_loops(mod, emitter=emit_cuda)
    return [one for one in fused.functions.values() if not isinstance(one, relax.Function)]


def launches(statement: Any) -> Iterator[tuple[int, int]]:
    if isinstance(statement, tvm.tirx.SeqStmt):
        for one in statement.seq:
            yield from launches(one)
    else:
        yield int(statement.value), int(statement.body.value)


def vector_widths(kernel: tvm.tirx.PrimFunc) -> set[int]:
    """The elements of each vector that is loaded or stored."""
    found: set[int] = set()

    def visit(node: tvm.tirx.Ramp) -> None:
        found.add(int(node.lanes))

    tvm_ffi.structural_walk(kernel.body, (tvm.tirx.Ramp, visit))
    return found
