# SPDX-License-Identifier: Apache-2.0
"""Kernels whose outer extents are arguments: the same elements, for every shape."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx import For, ForKind

import amp_ir
from amp_ir import pipeline
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.target import cpu
from amp_ir.vm import build as build_stage
from amp_ir.vm.open_kernels import open_kernels, opened_kernel, reciprocal_of
from relax_functions import assert_ir_equal

# What LLVM may assume about a loop is not what this option lets it check at run time.
UNCHECKED = ["-vectorize-scev-check-threshold:uint=0"]


def copying(
    rows: int,
    columns: int,
    place: Any,
    *,
    name: str = "row",
    kind: Any = ForKind.SERIAL,
    inner: Any = ForKind.VECTORIZED,
) -> tirx.PrimFunc:
    """A kernel y[row, column] = x[place(row, column)] over `rows` rows."""
    x = tirx.decl_buffer((rows * columns,), "float32", "x")
    y = tirx.decl_buffer((rows * columns,), "float32", "y")
    row, column = tirx.Var(name, "int32"), tirx.Var("tail", "int32")
    store = tirx.BufferStore(y, tirx.BufferLoad(x, [place(row, column)]), [row * columns + column])
    body = For(row, 0, rows, kind, For(column, 0, columns, inner, store))
    return tirx.PrimFunc([x, y], body).with_attr("tirx.noalias", True)


def library_of(functions: dict[str, tirx.PrimFunc], options: Any = ()) -> tvm.runtime.Module:
    target = {"kind": "llvm", "mcpu": cpu().arch}
    built_for = tvm.target.Target(target | ({"cl-opt": list(options)} if options else {}))
    named = {name: one.with_attr("global_symbol", name) for name, one in functions.items()}
    with built_for:
        return tvm.tirx.build(
            tvm.IRModule(named), target=built_for, pipeline=build_stage.KERNEL_PIPELINE
        )


def kernels_of(step: PlannedStep) -> dict[str, tirx.PrimFunc]:
    return {v.name_hint: f for v, f in step.ir.functions.items() if v.name_hint != "main"}


def test_extents_and_numbers_of_rows_are_parameters_and_short_rows_stay():
    kernel = copying(1024, 64, lambda row, column: row // 128 % 8 * 64 + column)

    # fmt: off
    @T.prim_func(private=True)
    def expected(x: T.Buffer((2147483647,), "float32"), y: T.Buffer((2147483647,), "float32"),
                 n0: T.int32, n1: T.int64, n2: T.int64, n3: T.int64, n4: T.int64, n5: T.int32):
        T.func_attr({"tirx.noalias": True})
        for row in range(n0):
            for tail in T.vectorized(64):
                y[row * 64 + tail] = x[
                    (T.Cast("int32", T.Cast("int64", row) * n1 >> n2)
                     - T.Cast("int32", T.Cast("int64", T.Cast("int32", T.Cast("int64", row) * n1
                                                              >> n2)) * n3 >> n4) * n5)
                    * 64 + tail]
    # fmt: on

    opened, values = opened_kernel(kernel)
    assert values == [1024, 2**31, 38, 2**31, 34, 8]
    assert_ir_equal(tvm.IRModule({"k": opened}), tvm.IRModule({"k": expected}))


@given(st.integers(1, 2**31 - 1) | st.integers(1, 300), st.integers(0, 2**31 - 1))
def test_quotients_by_reciprocals_are_exact(divisor: int, number: int):
    reciprocal, shift = reciprocal_of(divisor)
    for near in (number, 2**31 - 1):
        multiple = near // divisor * divisor
        for a in (near, multiple, max(multiple - 1, 0)):
            assert a * reciprocal < 2**63
            assert (a * reciprocal) >> shift == a // divisor


def turning(heads: int, length: int) -> tirx.PrimFunc:
    """A kernel that exchanges two axes and doubles their rows, but for the last one of each head.

    x[length, heads, length] -> y[heads, length, length].
    """
    size = heads * length * length
    x = tirx.decl_buffer((size,), "float32", "x")
    y = tirx.decl_buffer((size,), "float32", "y")
    row, step, lane = (tirx.Var(name, "int32") for name in ("row", "step", "lane"))
    place = row % length * heads + row // length
    column = step * 16 + lane
    factor = tirx.Select(
        row % length >= length - 1, *(tirx.const(v, "float32") for v in (1.0, 2.0))
    )
    value = tirx.BufferLoad(x, [place * length + column]) * factor
    store = tirx.BufferStore(y, value, [row * length + column])
    lanes = For(lane, 0, 16, ForKind.VECTORIZED, store)
    steps = For(step, 0, length // 16, ForKind.SERIAL, lanes)
    body = For(row, 0, heads * length, ForKind.PARALLEL, steps)
    return tirx.PrimFunc([x, y], body).with_attr("tirx.noalias", True)


@pytest.mark.parametrize(("heads", "length"), [(12, 96), (3, 160), (96, 128)])
def test_a_kernel_of_long_rows_is_the_same_for_every_length(heads: int, length: int):
    opened, _ = opened_kernel(turning(8, 256))
    other, values = opened_kernel(turning(heads, length))
    assert tvm_ffi.structural_equal(opened, other)
    x = np.arange(heads * length * length, dtype="float32").reshape(length, heads, length)
    wanted = x.transpose(1, 0, 2) * 2
    wanted[:, -1] /= 2
    y = tvm.runtime.tensor(np.full(x.size, -1, "float32"))
    library_of({"k": opened})["k"](tvm.runtime.tensor(x.ravel()), y, *values)
    assert np.array_equal(y.numpy().reshape(wanted.shape), wanted)


def test_a_kernel_of_short_rows_keeps_their_length():
    opened, values = opened_kernel(turning(200, 16))
    assert "y[row * 16 + (step * 16 + lane)]" in opened.script()
    assert values[0] == 200 * 16


def shifting(rows: int, columns: int, *, kind: Any = ForKind.SERIAL) -> tirx.PrimFunc:
    """A kernel y[row, column] = x[row, column + 1], and 0 in the last column, as one loop."""
    size = rows * columns
    x = tirx.decl_buffer((size,), "float32", "x")
    y = tirx.decl_buffer((size,), "float32", "y")
    step, lane = tirx.Var("step", "int32"), tirx.Var("lane", "int32")
    place = step * 16 + lane
    column = tirx.floormod(place, columns)
    load = tirx.BufferLoad(x, [tirx.floordiv(place, columns) * columns + (column + 1) % columns])
    value = tirx.Select(column >= columns - 1, tirx.const(0.0, "float32"), load)
    store = tirx.BufferStore(y, value, [place])
    loop = For(step, 0, size // 16, kind, For(lane, 0, 16, ForKind.VECTORIZED, store))
    return tirx.PrimFunc([x, y], loop).with_attr("tirx.noalias", True)


@pytest.mark.parametrize("kind", [ForKind.SERIAL, ForKind.PARALLEL])
@pytest.mark.parametrize("shape", [(4, 128), (3, 96), (2, 24), (10, 48), (5, 80)])
def test_a_kernel_of_few_elements_is_the_same_for_every_shape(shape: tuple[int, int], kind: Any):
    opened, values = opened_kernel(shifting(*shape, kind=kind))
    other, others = opened_kernel(shifting(4, 120, kind=kind))
    assert tvm_ffi.structural_equal(opened, other)
    x = np.arange(shape[0] * shape[1], dtype="float32").reshape(shape)
    wanted = np.concatenate([x[:, 1:], np.zeros_like(x[:, :1])], 1)
    y = tvm.runtime.tensor(np.full(x.size, -1, "float32"))
    library_of({"k": other})["k"](tvm.runtime.tensor(x.ravel()), y, *values)
    assert len(values) == len(others)
    assert np.array_equal(y.numpy().reshape(shape), wanted)


def test_a_kernel_of_more_elements_keeps_the_length_of_its_rows():
    opened, values = opened_kernel(shifting(4, 144))
    assert values == []
    assert "% 144" in opened.script()


def normalizing(rows: int) -> tuple[torch.nn.Module, Any, torch.Tensor]:
    torch.manual_seed(rows)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = (model(x) * x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(rows, 64)
    mod, _ = amp_ir.trace_step(step, (x,), model=model, optimizer=optimizer)
    return model, mod, x


def looking_up(entries: int, count: int) -> tuple[torch.nn.Embedding, Any, torch.Tensor]:
    torch.manual_seed(entries)
    table, ids = torch.nn.Embedding(entries, 128), torch.randint(0, entries, (count,))
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)

    def step(ids):
        loss = table(ids).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    mod, _ = amp_ir.trace_step(step, (ids,), model=table, optimizer=optimizer)
    return table, mod, ids


def test_tables_of_other_entries_have_one_kernel_of_gradients_for_any_number_of_ids():
    def kernel(entries: int, count: int) -> list[str]:
        step = open_kernels(pipeline.lower(looking_up(entries, count)[1]))
        return [one.symbol for one in step.plan.calls if "embedding_backward" in str(one.ops)]

    found = kernel(300, 64)
    assert len(found) == 1 and found == kernel(4000, 1040)
    for entries, count in ((300, 64), (4000, 1040)):
        table, mod, ids = looking_up(entries, count)
        wanted = copy.deepcopy(table)
        wanted(ids).square().mean().backward()
        amp_ir.compile(mod)(ids)
        # Float32 sums of a few rows in another order.
        torch.testing.assert_close(
            table.weight.detach(), (wanted.weight - 0.1 * wanted.weight.grad).detach()
        )


@pytest.mark.parametrize(("rows", "others"), [(768, 512), (512, 384)], ids=["parts", "blocks"])
def test_kernels_of_another_batch_have_one_name_and_other_arguments(rows: int, others: int):
    """Of 512 rows 16 parts have blocks of 16 rows, of 384 rows blocks of 12."""

    def kernels(rows: int) -> tuple[set[str], set[str]]:
        step_ir = open_kernels(pipeline.lower(normalizing(rows)[1])).ir
        names = {v.name_hint for v in step_ir.functions if v.name_hint != "main"}
        return names, set(re.findall(r"(kernel_\w+)\(", step_ir["main"].script()))

    (first, called), (second, _) = kernels(rows), kernels(others)
    assert first == called
    # What is left divides by the number of elements, or has another one of its own.
    assert len(first & second) >= len(first) - 2


def test_a_second_batch_computes_what_pytorch_does():
    """Its kernels are those of the first one: rows, parts and blocks are arguments."""
    for rows in (512, 384, 40):
        model, mod, x = normalizing(rows)
        wanted = copy.deepcopy(model)
        (wanted(x) * x).square().mean().backward()
        amp_ir.compile(mod)(x)
        for one, other in zip(model.parameters(), wanted.parameters(), strict=True):
            # Float32 sums of at most 512 products in another order.
            expected = other.detach() - 0.1 * other.grad
            torch.testing.assert_close(one.detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "place", "count", "wanted"),
    [
        ({}, lambda r, c: r % 4, 4, lambda r, c: r % 4),
        ({}, lambda r, c: (r * 2 + c) % 4, 0, lambda r, c: (r * 2 + c) % 4),
        ({}, lambda r, c: tirx.bitwise_and(r, 3), 0, lambda r, c: r % 4),
        ({}, lambda r, c: _through("int16", r), 0, lambda r, c: r),
        ({"inner": ForKind.SERIAL}, lambda r, c: r % 4, 0, lambda r, c: r % 4),
        ({"name": "item"}, lambda r, c: r % 4, 4, lambda r, c: r % 4),
        ({"kind": ForKind.PARALLEL}, lambda r, c: (r * 2 + c) % 4, 1, lambda r, c: (r * 2 + c) % 4),
    ],
    ids=["row", "with a column", "bits", "narrow", "no vectors", "no row", "parallel"],
)
def test_no_counter_of_an_unknown_extent_is_taken_apart_by_a_known_number(
    options: dict[str, Any], place: Any, count: int, wanted: Any
):
    """Else LLVM reads 8 neighbours for 8 counters modulo 4 (llvm/llvm-project#191382)."""
    opened, values = opened_kernel(copying(400, 2, place, **options))
    assert len(values) == count
    run_copying(opened, values, 400, wanted)
    # One of few elements has parameters: its modulus is no power of two to LLVM.
    run_copying(*opened_kernel(copying(40, 2, place, **options)), 40, wanted)


def run_copying(kernel: tirx.PrimFunc, values: list[int], rows: int, wanted: Any) -> None:
    size = 2 * rows
    x, y = np.arange(size, dtype="float32"), tvm.runtime.tensor(np.zeros(size, "float32"))
    library_of({"k": kernel})["k"](tvm.runtime.tensor(x), y, *values)
    assert np.array_equal(y.numpy(), x[wanted(*np.divmod(np.arange(size), 2))])


def _through(dtype: str, x: Any) -> Any:
    return tirx.Cast("int32", tirx.Cast(dtype, x))


def resized(dtype: torch.dtype) -> pipeline.StepModule:
    """The gradient of a bicubic resizing, which reads tables at the row modulo 4."""

    def step(x):
        x = x.detach().requires_grad_()
        torch.nn.functional.interpolate(x, size=(6, 4), mode="bicubic").square().sum().backward()
        return x.grad

    mod, _ = amp_ir.trace_step(
        step, (torch.ones(2, 3, 4, 5, dtype=dtype),), model=torch.nn.Flatten()
    )
    return mod


def code_of(kernels: dict[str, tirx.PrimFunc], options: Any = ()) -> list[str]:
    """Return LLVM's code, without the lines that name the target."""
    lines = library_of(kernels, options).inspect_source("ll").splitlines()
    return [line for line in lines if not line.startswith("!")]


def test_no_kernel_of_a_resizing_rests_on_checks_that_llvm_loses():
    """The code is that of a vectoriser that checks nothing while a kernel runs."""
    planned = pipeline.lower(resized(torch.float32))

    def forced(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
        """The kernel with an outer loop of unknown extent, whatever it contains."""
        loop, n = kernel.body, tirx.Var("n", "int32")
        body = For(loop.loop_var, loop.min, n, loop.kind, loop.body)
        return tirx.PrimFunc([*kernel.params, n], body, attrs=kernel.attrs)

    kernels = kernels_of(open_kernels(planned))
    assert len(kernels) >= 3
    assert code_of(kernels) == code_of(kernels, UNCHECKED)
    wrong = {name: forced(kernel) for name, kernel in kernels_of(planned).items()}
    assert code_of(wrong) != code_of(wrong, UNCHECKED)


def test_rows_that_merged_kernels_compute_are_divided_as_what_is_not_negative():
    """A convolution in float64 beside its loss: TVM lowered divisions in each other for minutes."""
    layer = torch.nn.Conv3d(1, 4, 3, padding=1).double()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = torch.randn(2, 1, 4, 4, 4, dtype=torch.float64)
    mod, _ = amp_ir.trace_step(step, (batch,), model=layer, optimizer=optimizer)
    assert not divisions_by_parameters(pipeline.lower(mod))


def divisions_by_parameters(planned: PlannedStep) -> list[Any]:
    """Divisions and remainders by parameters in the opened kernels: TVM lowers each to several."""
    found: list[Any] = []

    def note(division: Any) -> None:
        if isinstance(division.b, tirx.Var):
            found.append(division)

    for kernel in kernels_of(open_kernels(planned)).values():
        tvm_ffi.structural_walk(kernel.body, ((tirx.FloorDiv, tirx.FloorMod), note))
    return found


@pytest.mark.parametrize("padding_mode", ["border", "zeros"])
def test_places_that_are_read_are_divided_as_what_is_not_negative(padding_mode: str):
    """A small volume that is sampled: TVM lowered divisions in each other without an end."""
    layer = torch.nn.Conv3d(1, 2, 3, padding=1)

    def step(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        sampled = F.grid_sample(layer(x), grid, padding_mode=padding_mode, align_corners=True)
        loss = sampled.square().mean()
        loss.backward()
        return loss.detach()

    batch = torch.randn(2, 1, 4, 4, 4), torch.randn(2, 3, 3, 3, 3)
    mod, _ = amp_ir.trace_step(step, batch, model=layer)
    planned = pipeline.lower(mod)
    assert any(len(opened_kernel(one)[1]) > 9 for one in kernels_of(planned).values())
    assert not divisions_by_parameters(planned)


def shuffled_pixels(h: torch.Tensor) -> torch.Tensor:
    """What is shuffled and back again, but for a border."""
    return F.pixel_unshuffle(F.pixel_shuffle(h, 2)[:, :, :-2, 2:], 2)


def shuffled_channels(h: torch.Tensor) -> torch.Tensor:
    """Three units of ShuffleNet in small."""
    for groups in (2, 4, 2):
        left, right = F.channel_shuffle(h, groups).chunk(2, 1)
        h = torch.cat([left.relu(), right], 1)
    return h


@pytest.mark.parametrize("views", [shuffled_pixels, shuffled_channels])
def test_a_kernel_of_many_divisions_in_each_other_keeps_its_numbers(views: Any):
    """Opened, kernels were up to 24 times as long, and TVM took minutes for each."""
    layer = torch.nn.Conv2d(3, 8, 3, padding=1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = views(layer(x)).abs().mean()
        loss.backward()
        return loss.detach()

    mod, _ = amp_ir.trace_step(step, (torch.randn(2, 3, 4, 4),), model=layer)
    for kernel in kernels_of(pipeline.lower(mod)).values():
        opened, _ = opened_kernel(kernel)
        assert len(opened.script()) < 5 * len(kernel.script())
