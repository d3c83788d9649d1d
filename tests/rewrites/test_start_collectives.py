# SPDX-License-Identifier: Apache-2.0
"""Whole collectives become starts and waits of buckets, with the same values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from tvm import relax

import amp_ir
from amp_ir.dialect import call_op, options_of
from amp_ir.dialect.rank_threads import run_ranks
from amp_ir.ir.bucket_sizes import BucketSizes
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.location import locations_of
from amp_ir.ir.step_module import Role
from amp_ir.loss_scaling.degrees.check_scale_degrees import check_scale_degrees
from amp_ir.rewrites.start_collectives import start_collectives
from captured_ranks import captured, op_names

PAIR = {"ranks": 2, "group": 0, "bucket": 0, "comm_dtype": ""}


@contextlib.contextmanager
def finished(
    builder: relax.BlockBuilder, inputs: list[relax.Var]
) -> Iterator[Callable[[list[relax.Expr]], None]]:
    """A function `main` of one dataflow block; what is yielded takes its results."""
    results: list[relax.Expr] = []
    with builder.function("main", inputs):
        with builder.dataflow():
            yield results.extend
            made = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(made)


def program(*shapes: tuple[int, ...], after: Any = None, **options: Any) -> tvm.IRModule:
    """Gradients that are doubled inputs, each reduced, then summed up; what the pass reads."""
    builder = relax.BlockBuilder()
    inputs = [
        relax.Var(f"x{k}", relax.TensorType(list(shape), "float32"))
        for k, shape in enumerate(shapes)
    ]
    with finished(builder, inputs) as emit_result:
        gradients = [builder.emit(relax.op.add(one, one)) for one in inputs]
        reduced = [
            builder.emit(call_op("amp_ir.all_reduce", [one], ranks=2, parameter=f"p{k}", **options))
            for k, one in enumerate(gradients)
        ]
        outputs = [builder.emit(relax.op.negative(one)) for one in reduced]
        emit_result(outputs)
    return builder.finalize()


def test_a_bucket_starts_at_its_last_gradient_and_is_waited_for_before_the_first_use() -> None:
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType([3], "float32")) for name in "xy")
    with finished(builder, [x, y]) as emit_result:
        g0, g1 = builder.emit(relax.op.add(x, x)), builder.emit(relax.op.add(y, y))
        sent = builder.emit(
            call_op("amp_ir.all_reduce_start", [g0, g1], parameters="p0,p1", **PAIR)
        )
        parts = [builder.emit(relax.TupleGetItem(sent, k)) for k in range(2)]
        got = builder.emit(call_op("amp_ir.all_reduce_wait", parts, **PAIR))
        means = []
        for k in range(2):
            part = builder.emit(relax.TupleGetItem(got, k))
            means.append(builder.emit(call_op("amp_ir.average", [part], ranks=2)))
        outputs = [builder.emit(relax.op.negative(one)) for one in means]
        emit_result(outputs)
    made = start_collectives(program((3,), (3,)))
    # In the pass the parts are taken at once; the order of their bindings does not matter.
    assert op_names(made) == op_names(builder.finalize())
    starts, waits = (
        list(Dataflow(made).calls(f"amp_ir.all_reduce_{half}").values())
        for half in ("start", "wait")
    )
    assert [options_of(one) for one in starts] == [{**PAIR, "parameters": "p0,p1"}]
    assert [options_of(one) for one in waits] == [PAIR]


def test_a_step_without_collectives_is_returned_unchanged() -> None:
    ir = start_collectives(program((3,)))
    assert start_collectives(ir) is ir


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
    st.integers(1, 120),
    st.integers(1, 120),
)
def test_each_gradient_is_sent_once_in_buckets_of_the_size(
    sizes: list[int], first: int, rest: int
) -> None:
    options = {"first_bucket_nbytes": first, "bucket_nbytes": rest}
    made = start_collectives(program(*((one,) for one in sizes), **options))
    starts = list(Dataflow(made).calls("amp_ir.all_reduce_start").values())
    sent = [[int(one.ty.shape[0]) for one in call.args] for call in starts]
    assert [one for bucket in sent for one in bucket] == sizes
    for k, bucket in enumerate(sent):
        limit = first if k == 0 else rest
        assert 4 * sum(bucket[:-1]) < limit
        assert k == len(sent) - 1 or 4 * sum(bucket) >= limit
    assert [options_of(one)["bucket"] for one in starts] == list(range(len(starts)))


def test_equal_gradients_are_sent_once() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([3], "float32"))
    with finished(builder, [x]) as emit_result:
        both = [builder.emit(call_op("amp_ir.all_reduce", [x], ranks=2)) for _ in range(2)]
        emit_result(both)
    made = start_collectives(builder.finalize())
    (start,) = Dataflow(made).calls("amp_ir.all_reduce_start").values()
    assert len(start.args) == 1
    one, other = interpret(made, [torch.arange(3.0)])
    assert torch.equal(one, torch.arange(3.0)) and torch.equal(one, other)


def test_an_average_comes_before_a_low_dtype() -> None:
    names = op_names(start_collectives(program((3,), comm_dtype="bfloat16")))
    assert names.index("amp_ir.average") < names.index("amp_ir.all_reduce_start")
    # 60000 + 60000 is beyond float16's range, and their mean is not.
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([2], "float16"))
    with finished(builder, [x]) as emit_result:
        mean = builder.emit(call_op("amp_ir.all_reduce", [x], ranks=2))
        emit_result([mean])
    made = start_collectives(builder.finalize())
    (found,) = interpret(made, [torch.full((2,), 60000.0, dtype=torch.float16)])
    assert torch.isfinite(found).all()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def training(scaler: Any = None, *, clips: bool = False) -> tuple[nn.Module, Any, Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


BATCH = torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize("clips", [False, True])
def test_averages_are_part_of_a_loss_scale(*, clips: bool) -> None:
    scaler = amp_ir.GradScaler("cpu", init_scale=2.0**10)
    model, optimizer, step = training(scaler, clips=clips)
    mod = captured(step, BATCH, [model], [optimizer], scaler=[scaler])
    made = mod.with_ir(start_collectives(mod.ir))
    assert "amp_ir.average" not in op_names(made.ir)
    scales = [
        call.args[1]
        for call in Dataflow(made.ir).values.values()
        if isinstance(call, relax.Call) and call.op.name == "amp_ir.unscale"
    ]
    assert len(set(scales)) == 1
    # One degree more or less would be an error.
    check_scale_degrees(made)
    state = [mod.state[one.name] for one in mod.signature.inputs if one.role is not Role.BATCH]
    inputs = [one if isinstance(one, torch.Tensor) else one() for one in state]
    for got, expected in zip(
        interpret(made, [*inputs, *BATCH]), interpret(mod, [*inputs, *BATCH]), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_as_threads_train_as_one_process_on_all_batches(count: int) -> None:
    model, optimizer, step = training()
    x, y = torch.randn(4 * count, 6), torch.randint(0, 3, (4 * count,))
    mod = captured(step, BATCH, [model], [optimizer], count, sizes=BucketSizes(100, 40, 20))
    made = start_collectives(mod.ir)
    assert op_names(made).count("amp_ir.all_reduce_start") > 1
    inputs = [one for one in mod.signature.inputs if one.role is not Role.BATCH]
    state = [mod.state[one.name] for one in inputs]
    state = [one if isinstance(one, torch.Tensor) else one() for one in state]

    def of_rank(rank: int) -> list[torch.Tensor]:
        rows = slice(4 * rank, 4 * rank + 4)
        return interpret(made, [*state, x[rows], y[rows]])

    found = run_ranks(count, of_rank)
    step(x, y)  # PyTorch, on everything
    expected = [one.detach() for one in model.parameters()]
    updated = [k for k, one in enumerate(mod.signature.outputs) if one.role is Role.PARAMETER]
    for rank in found:
        for k, parameter in zip(updated, expected, strict=True):
            torch.testing.assert_close(rank[k], parameter, rtol=1e-5, atol=1e-6)
            assert torch.equal(rank[k], found[0][k])


def test_a_call_names_the_places_of_its_gradients() -> None:
    model, optimizer, step = training()
    mod = captured(step, BATCH, [model], [optimizer])
    (start,) = Dataflow(start_collectives(mod.ir)).calls("amp_ir.all_reduce_start").values()
    assert options_of(start)["parameters"] == "2.weight,2.bias,0.weight,0.bias"
    places = {(one.module, one.phase) for one in locations_of(start.span)}
    assert places == {("0", "backward"), ("2", "backward")}
