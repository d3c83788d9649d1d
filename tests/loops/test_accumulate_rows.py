# SPDX-License-Identifier: Apache-2.0
"""A table's gradient is added to the table, or to another gradient of it, in that one's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.relax import op as R

import amp_ir
from amp_ir.api import lower
from amp_ir.dialect import call_op
from amp_ir.host import native
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.memory_plan import MemoryRole
from amp_ir.loops.fusion.accumulate_rows import find_accumulations
from cuda_emulator import in_emulator
from kernel_check import run_cuda_kernels, run_kernels

ROWS, WIDTH = 30, 64
Body = Callable[[relax.BlockBuilder, relax.Var, relax.Var, relax.Var], relax.Expr]


def program(
    body: Body,
    *,
    padding_idx: int | None = None,
    dtype: str = "float32",
    shape: tuple[int, int] = (2, 6),
) -> Any:
    """`body(builder, table, gradient, ids)`, where the gradient is of a table [ROWS, WIDTH]."""
    builder = relax.BlockBuilder()
    table = relax.Var("table", relax.TensorType([ROWS, WIDTH], dtype))
    grad = relax.Var("grad", relax.TensorType([*shape, WIDTH], "float32"))
    ids = relax.Var("ids", relax.TensorType([*shape], "int64"))
    options = {"num_embeddings": ROWS, "padding_idx": padding_idx, "out_dtype": dtype}
    with builder.function("main", [table, grad, ids]):
        with builder.dataflow():
            call = call_op("amp_ir.embedding_backward", [grad, ids], **options)
            value = body(builder, table, builder.emit(call), ids)
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    ids = torch.tensor([[3, 3, 0, 29, 3, 7], [7, 0, 0, 1, 2, 3]])
    return [torch.randn(ROWS, WIDTH).to(dtype), torch.randn(2, 6, WIDTH), ids]


def table_first(builder: Any, table: Any, gradient: Any, _ids: Any) -> relax.Expr:
    return builder.emit(R.add(builder.emit(R.tanh(table)), gradient))


def gradient_first(builder: Any, table: Any, gradient: Any, _ids: Any) -> relax.Expr:
    return builder.emit(R.add(gradient, builder.emit(R.tanh(table))))


def input_as_base(builder: Any, table: Any, gradient: Any, _ids: Any) -> relax.Expr:
    return relax.Tuple([builder.emit(R.add(table, gradient)), builder.emit(R.negative(table))])


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("body", [table_first, gradient_first, input_as_base])
def test_the_sum_is_that_of_the_interpreter(body: Body, padding_idx: int | None) -> None:
    mod = program(body, padding_idx=padding_idx)
    assert len(find_accumulations(Dataflow(mod)).sums) == 1
    given = inputs()
    found, expected = run_kernels(mod, given), interpret(mod, given)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def half(builder: Any, table: Any, gradient: Any, _ids: Any) -> relax.Expr:
    product = builder.emit(R.multiply(gradient, relax.const(0.5, "float32")))
    return builder.emit(R.add(builder.emit(R.tanh(table)), product))


def minus_the_gradient(builder: Any, table: Any, gradient: Any, _ids: Any) -> relax.Expr:
    factor = builder.emit(R.mean(table))
    product = builder.emit(R.negative(builder.emit(R.multiply(factor, gradient))))
    return builder.emit(R.subtract(builder.emit(R.tanh(table)), product))


@in_emulator
@pytest.mark.parametrize("body", [half, minus_the_gradient])
def test_the_sum_may_take_a_multiple_of_the_gradient(body: Body) -> None:
    mod = program(body)
    assert len(find_accumulations(Dataflow(mod)).sums) == 1
    given = inputs()
    (expected,) = interpret(mod, given)
    # One rounding more or less, by tanh and the order of sums.
    torch.testing.assert_close(run_kernels(mod, given)[0], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(run_cuda_kernels(mod, given)[0], expected, rtol=1e-6, atol=1e-6)


@in_emulator
@pytest.mark.parametrize("items", [12, 0])
@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan"), 2.0])
def test_a_factor_that_is_not_finite_reaches_every_row(number: float, items: int) -> None:
    """Zero times infinity is NaN, in the rows of a gradient that no id has."""

    def body(builder: Any, table: Any, gradient: Any, _ids: Any) -> relax.Expr:
        product = builder.emit(R.multiply(gradient, builder.emit(R.mean(table))))
        return builder.emit(R.subtract(table, product))

    mod = program(body, padding_idx=3, shape=(items // 6, 6))
    assert len(find_accumulations(Dataflow(mod)).sums) == 1
    table = torch.full((ROWS, WIDTH), -1.0)
    table[8, 5] = number
    ids = torch.tensor([[3, 3, 0, 29, 3, 7], [7, 0, 0, 1, 2, 3]])[: items // 6]
    given = [table, torch.randn(items // 6, 6, WIDTH), ids]
    (expected,) = interpret(mod, given)
    assert bool(expected[20].isnan().all()) == (number != 2.0)
    for run in (run_kernels, run_cuda_kernels):
        (found,) = run(mod, given)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_rows_are_summed_before_they_are_added() -> None:
    # Added one by one to 1, each 2^-25 would be lost.
    mod = program(lambda b, table, gradient, _ids: b.emit(R.add(table, gradient)))
    table, grad = torch.ones(ROWS, WIDTH), torch.full((2, 6, WIDTH), 2.0**-25)
    (found,) = run_kernels(mod, [table, grad, torch.full((2, 6), 4)])
    assert torch.equal(found[4], torch.full((WIDTH,), 1 + 3 * 2.0**-23))


def read_twice(builder: Any, table: Any, gradient: Any, _ids: Any) -> relax.Expr:
    return builder.emit(R.multiply(builder.emit(R.add(table, gradient)), gradient))


def broadcast(builder: Any, table: Any, gradient: Any, _ids: Any) -> relax.Expr:
    row = builder.emit(R.sum(table, [0], keepdims=True))
    return builder.emit(R.add(row, gradient))


def gradient_minus(builder: Any, table: Any, gradient: Any, _ids: Any) -> relax.Expr:
    return builder.emit(R.subtract(gradient, builder.emit(R.tanh(table))))


def multiple_read_twice(builder: Any, table: Any, gradient: Any, _ids: Any) -> relax.Expr:
    product = builder.emit(R.multiply(gradient, relax.const(0.5, "float32")))
    return builder.emit(R.multiply(builder.emit(R.add(table, product)), product))


def times_a_row(builder: Any, table: Any, gradient: Any, _ids: Any) -> relax.Expr:
    row = builder.emit(R.mean(table, [0]))
    return builder.emit(R.add(table, builder.emit(R.multiply(gradient, row))))


@pytest.mark.parametrize(
    "body", [read_twice, broadcast, gradient_minus, multiple_read_twice, times_a_row]
)
def test_other_sums_stay_as_they_are(body: Body) -> None:
    mod = program(body)
    assert not find_accumulations(Dataflow(mod)).sums
    given = inputs()
    torch.testing.assert_close(run_kernels(mod, given)[0], interpret(mod, given)[0])


def test_low_precision_keeps_its_two_roundings() -> None:
    assert not find_accumulations(Dataflow(program(table_first, dtype="bfloat16"))).sums


def tied(
    untied: bool = False, make: Any = torch.optim.SGD
) -> tuple[nn.Module, torch.optim.Optimizer, Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    table, scores = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
    if not untied:
        scores.weight = table.weight
    model = nn.Sequential(table, nn.Tanh(), scores)
    optimizer = make(model.parameters(), lr=0.5)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step, (torch.randint(0, 512, (2, 8)),)


def gradients_of_tables(mod: Any) -> list[Any]:
    """Values of a table's size, without the workspace of one call.

    Without AVX-512, oneDNN has no primitive that adds a product to what is there: the call holds
    the product in its workspace.
    """
    values = [v for v in lower(mod).plan.values if v.role is not MemoryRole.WORKSPACE]
    return [v for v in values if v.offset_bytes is not None and v.nbytes == 512 * 64 * 4]


def test_tied_weights_hold_one_gradient() -> None:
    model, optimizer, step, batch = tied(make=torch.optim.Adagrad)
    mod, _ = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    tables = gradients_of_tables(mod)
    together = [
        (a.name, b.name)
        for k, a in enumerate(tables)
        for b in tables[:k]
        if a.first_use <= b.last_use and b.first_use <= a.last_use
    ]
    assert len(tables) == 2 and not together
    assert tables[0].offset_bytes == tables[1].offset_bytes


def test_with_sgd_tied_weights_hold_no_gradient_and_train_as_in_pytorch() -> None:
    model, optimizer, step, batch = tied()
    mod, _ = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    assert not gradients_of_tables(mod) or not native.has("amp_ir.onednn.matmul_accumulate")
    train = amp_ir.compile(mod)
    peer, _, peer_step, _ = tied()
    for _ in range(3):
        torch.testing.assert_close(train(*batch), peer_step(*batch), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model[0].weight, peer[0].weight, rtol=1e-4, atol=1e-6)


def embeddings(padding_idx: int | None = None) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    # Ids occur several times, and columns fill no vector.
    model = nn.Sequential(nn.Embedding(512, 36, padding_idx=padding_idx), nn.Linear(36, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_sgd_writes_the_rows_of_a_table_that_occur(padding_idx: int | None) -> None:
    model, optimizer, step = embeddings(padding_idx)
    batches = [torch.randint(0, 20, (4, 16)) for _ in range(4)]
    mod, _ = amp_ir.trace_step(step, (batches[0],), model=model, optimizer=optimizer)
    tables = [v for v in lower(mod).plan.values if v.nbytes == 512 * 36 * 4]
    assert [v.role for v in tables] == [MemoryRole.PARAMETER]
    # Bytes of rates and of the roofline: of the 64 rows, read and written.
    (call,) = [c for c in lower(mod).plan.calls if c.ops == ("embedding_backward",)]
    assert call.written_nbytes == 64 * 36 * 4
    assert call.read_nbytes < 3 * call.written_nbytes
    train = amp_ir.compile(mod)
    peer, _, peer_step = embeddings(padding_idx)
    before = model[0].weight.detach().clone()
    for batch in batches:
        torch.testing.assert_close(train(batch), peer_step(batch), rtol=1e-6, atol=0.0)
    # The gradient of the layer behind is a sum in another order than PyTorch's on some CPUs: that
    # may move a weight below 4 by a unit in its last place.
    torch.testing.assert_close(model[0].weight, peer[0].weight, rtol=0.0, atol=2.5e-7)
    assert torch.equal(model[0].weight[20:], before[20:])
    assert not torch.equal(model[0].weight[:20], before[:20])


def test_the_kernel_says_that_it_may_write_over_its_base() -> None:
    from amp_ir.loops.fusion.fuse import fuse_loops

    fused = fuse_loops(program(table_first))
    kernels = [f for f in fused.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    marked = [f for f in kernels if "amp_ir.inplace" in f.attrs]
    pairs = [[int(n) for n in pair] for f in marked for pair in f.attrs["amp_ir.inplace"]]
    assert [0, 2] in pairs
