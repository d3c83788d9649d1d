# SPDX-License-Identifier: Apache-2.0
"""A loss in chunks of rows: what it becomes, what is left alone, the numbers, and budgets held."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import amp_ir
from amp_ir.api import lower
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.dialect import call_op
from amp_ir.dispatch.accumulate_matmuls import ACCUMULATE
from amp_ir.errors import BudgetError
from amp_ir.host import native
from amp_ir.ir import memory_plan
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.location import Location
from amp_ir.ir.memory_plan import ChunkedLoss, MemoryPlan, MemoryRole, PlannedStep
from amp_ir.ir.step_module import StepModule
from amp_ir.memory.chunking import chunk_loss as chunking
from amp_ir.memory.chunking import row_rules
from amp_ir.memory.chunking.chunk import rows_of_call
from amp_ir.memory.chunking.chunk_loss import CHUNK_COUNTS, chunk_losses
from amp_ir.memory.chunking.row_rules import row_axes, shape_of
from amp_ir.report.memory import report_memory
from dialect_cases import CASES, Case
from relax_cases import RELAX_CASES, module
from relax_functions import assert_ir_equal

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WIDTH = 4
# Sums of at most 40 rows in float64, 2^-53 a rounding, in another order; as many sums in a row.
SAME_BUT_FOR_ORDER = 1e-12


def head(
    loss_of: Loss, *, rows: int, classes: int, returns_scores: bool = False, dropout: float = 0.0
) -> tuple[StepModule, list[torch.Tensor]]:
    """A layer, a head and a loss on rows of scores, with SGD; and its inputs in order."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, classes))
    drop = nn.Dropout(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = drop(model(x)) if dropout else model(x)
        loss = loss_of(scores, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.detach(), scores.detach()) if returns_scores else loss.detach()

    labels = torch.randint(0, classes, (rows,))
    labels[::3] = -100
    batch = (torch.randn(rows, WIDTH), labels)
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    return mod, inputs_of(mod, args)


def inputs_of(mod: StepModule, args: Any) -> list[torch.Tensor]:
    """The tensors that the step is given, state first; hyper-parameters are read by a function."""
    batch = iter(mod.signature.flatten_batch(args))
    inputs = []
    for one in mod.signature.inputs:
        value: Any = mod.state[one.name] if one.is_state else next(batch)
        value = value() if callable(value) else value
        inputs.append(torch.as_tensor(value, dtype=getattr(torch, one.dtype)).detach())
    return inputs


def peak_elements(ir: tvm.IRModule) -> int:
    """Elements of the largest tensor that any op makes."""
    bindings = [one for block in ir["main"].body.blocks for one in block.bindings]
    tensors = [one.var for one in bindings if isinstance(one.var.ty, relax.TensorType)]
    return max(int(torch.Size(shape_of(one)).numel()) for one in tensors)


def check_same(before: tvm.IRModule, after: tvm.IRModule, inputs: list[torch.Tensor]) -> None:
    """Both steps give the same in float64, up to the order of sums over rows."""
    wide = [one.double() if one.is_floating_point() else one for one in inputs]
    expected = interpret(before, wide, float_dtype=torch.float64)
    found = interpret(after, wide, float_dtype=torch.float64)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=SAME_BUT_FOR_ORDER, atol=SAME_BUT_FOR_ORDER, equal_nan=True
        )


def test_a_head_and_its_loss_become_chunks_of_rows() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((5, 2), "float32"),
            w: R.Tensor((2, 9), "float32"),
            t: R.Tensor((5, 9), "float32"),
        ):
            with R.dataflow():
                s = R.matmul(x, w)
                y = R.nn.log_softmax(s, axis=1)
                p = R.multiply(y, t)
                loss = R.sum(p, axis=[0, 1])
                g = R.subtract(R.exp(y), t)
                wt = R.permute_dims(w, axes=[1, 0])
                dx = R.matmul(g, wt)
                xt = R.permute_dims(x, axes=[1, 0])
                dw = R.matmul(xt, g)
                R.output(loss, dx, dw)
            return (loss, dx, dw)

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor((5, 2), "float32"),
            w: R.Tensor((2, 9), "float32"),
            t: R.Tensor((5, 9), "float32"),
        ):
            with R.dataflow():
                wt = R.permute_dims(w, axes=[1, 0])
                x0 = R.strided_slice(x, axes=[0], begin=[0], end=[2])
                s0 = R.matmul(x0, w)
                y0 = R.nn.log_softmax(s0, axis=1)
                t0 = R.strided_slice(t, axes=[0], begin=[0], end=[2])
                p0 = R.multiply(y0, t0)
                loss0 = R.sum(p0, axis=[0, 1])
                e0 = R.exp(y0)
                g0 = R.subtract(e0, t0)
                dx0 = R.matmul(g0, wt)
                xt0 = R.permute_dims(x0, axes=[1, 0])
                dw0 = R.matmul(xt0, g0)
                x1 = R.strided_slice(x, axes=[0], begin=[2], end=[5])
                s1 = R.matmul(x1, w)
                y1 = R.nn.log_softmax(s1, axis=1)
                t1 = R.strided_slice(t, axes=[0], begin=[2], end=[5])
                p1 = R.multiply(y1, t1)
                loss1 = R.sum(p1, axis=[0, 1])
                e1 = R.exp(y1)
                g1 = R.subtract(e1, t1)
                dx1 = R.matmul(g1, wt)
                xt1 = R.permute_dims(x1, axes=[1, 0])
                dw1 = R.matmul(xt1, g1)
                loss = R.add(loss0, loss1)
                dx = R.concat((dx0, dx1), axis=0)
                dw = R.add(dw0, dw1)
                R.output(loss, dx, dw)
            return (loss, dx, dw)

    after, losses = chunk_losses(Before, 2)
    assert_ir_equal(after, Expected)
    assert [(one.chunks, one.nbytes) for one in losses] == [(2, 180)]


LOSSES: dict[str, Loss] = {
    "soft labels": lambda s, t: functional.cross_entropy(s, torch.ones_like(s) / s.shape[1]),
    "smooth": lambda s, t: functional.cross_entropy(s, t, label_smoothing=0.1),
    "smooth, weights": lambda s, t: functional.cross_entropy(
        s, t, weight=torch.arange(1.0, s.shape[1] + 1), label_smoothing=0.1
    ),
    "each row": lambda s, t: functional.cross_entropy(s, t, reduction="none").square().mean(),
    "two losses": lambda s, t: (
        functional.cross_entropy(s, t) + 1e-2 * torch.logsumexp(s, 1).square().mean()
    ),
    "gathered": lambda s, t: -s.log_softmax(1).gather(1, t.clamp(min=0)[:, None]).mean(),
    "mse": lambda s, t: functional.mse_loss(s, torch.ones_like(s)),
    "l1 sum": lambda s, t: functional.l1_loss(s, torch.ones_like(s), reduction="sum"),
    "huber, each": lambda s, t: functional.huber_loss(
        s, torch.ones_like(s), reduction="none"
    ).mean(),
    "in parts": lambda s, t: functional.cross_entropy(s.view(-1, 1, s.shape[1])[:, 0, :], t),
    "temperature": lambda s, t: functional.cross_entropy(torch.tanh(s / 3.0) * 3.0, t),
    "accuracy": lambda s, t: functional.cross_entropy(s, t) + (s.argmax(1) == t).float().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_the_same_in_chunks(name: str) -> None:
    mod, inputs = head(LOSSES[name], rows=11, classes=24)
    after, losses = chunk_losses(mod.ir, 3)
    assert [one.chunks for one in losses] == [3]
    assert peak_elements(after) < 11 * 24
    check_same(mod.ir, after, inputs)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(2, 40),
    classes=st.integers(20, 60),
    chunks=st.integers(2, 9),
    reduction=st.sampled_from(["mean", "sum"]),
    ignore_index=st.sampled_from([-100, 0, 7]),
    has_weight=st.booleans(),
)
def test_any_cross_entropy_is_the_same_in_any_number_of_chunks(
    rows: int, classes: int, chunks: int, reduction: str, ignore_index: int, has_weight: bool
) -> None:
    """Also where every label of a chunk is ignored, and where chunks differ in size."""
    weight = torch.arange(1.0, classes + 1) if has_weight else None

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = torch.where(labels < 0, ignore_index, labels)
        return functional.cross_entropy(
            scores, labels, weight=weight, reduction=reduction, ignore_index=ignore_index
        )

    mod, inputs = head(loss, rows=rows, classes=classes)
    after, losses = chunk_losses(mod.ir, chunks)
    assert [one.chunks for one in losses] == [min(rows, chunks)]
    check_same(mod.ir, after, inputs)


def relax_cases() -> list[Any]:
    return [pytest.param(call, inputs, id=n) for n, (call, inputs, _) in RELAX_CASES.items()]


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_rows(call: Callable[..., relax.Expr], inputs: list[torch.Tensor]) -> None:
    """The op on some rows gives those rows, along every axis that has a rule."""
    whole = module([(tuple(x.shape), dtype_of(x)) for x in inputs], lambda _, *p: call(*p))
    bindings = [one for block in whole["main"].body.blocks for one in block.bindings]
    made = next(one.value for one in bindings if isinstance(one.value, relax.Call))
    tensors = dict(zip(whole["main"].params, inputs, strict=True))
    (expected, *_) = interpret(whole, inputs)
    for axis, extent in enumerate(expected.shape):
        axes = row_axes(made, axis, extent) if extent > 1 else None
        if axes is not None and not any(isinstance(one, relax.Tuple) for one in made.args):
            places = [(k, its) for k, its in enumerate(axes) if made.args[k] in tensors]
            cut = [_rows(tensors[made.args[k]], its, extent) for k, its in places]
            # A reshape may tell fewer rows apart.
            if all(one is not None for one in cut):
                (rows,) = interpret(_of_rows(made, places, cut, axis, extent - 1), cut)
                expected_rows = expected.narrow(axis, 1, extent - 1)
                torch.testing.assert_close(
                    rows, expected_rows, rtol=1e-5, atol=1e-6, equal_nan=True
                )


def _rows(tensor: torch.Tensor, axis: int | None, extent: int) -> torch.Tensor | None:
    """All rows but the first."""
    if axis is None:
        return tensor
    return tensor.narrow(axis, 1, extent - 1) if tensor.shape[axis] == extent else None


def _of_rows(made: relax.Call, places: Any, cut: Any, axis: int, extent: int) -> tvm.IRModule:
    def body(_: Any, *params: relax.Var) -> Any:
        arguments = list(made.args)
        for (place, _axis), param in zip(places, params, strict=True):
            arguments[place] = param
        return rows_of_call(made, arguments, axis, extent)

    return module([(tuple(x.shape), dtype_of(x)) for x in cut], body)


@pytest.mark.parametrize(("call", "inputs"), relax_cases())
def test_relax_ops_of_some_rows_are_rows_of_the_op(
    call: Callable[..., relax.Expr], inputs: list[torch.Tensor]
) -> None:
    check_rows(call, inputs)


@pytest.mark.parametrize("case", [one for one in CASES if one.op in row_rules.RULES], ids=str)
def test_dialect_ops_of_some_rows_are_rows_of_the_op(case: Case) -> None:
    check_rows(lambda *params: call_op(case.op, list(params), **case.options), case.tensors())


REFUSED: dict[str, dict[str, Any]] = {
    "scores are a result": {"returns_scores": True},
    "random numbers are drawn for the scores": {"dropout": 0.5},
    "rows are compared": {"loss_of": lambda s, t: functional.cross_entropy(s, t) + 1e-3 * s.max()},
    "rows are mixed": {"loss_of": lambda s, t: functional.cross_entropy(s.cumsum(0), t)},
    "labels are chosen by the scores": {
        "loss_of": lambda s, t: functional.cross_entropy(s, s.argmax(1))
    },
    "a gradient waits for the loss": {
        "loss_of": lambda s, t: functional.cross_entropy(s, t).square()
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_chunked_is_left_alone(reason: str) -> None:
    options = {"loss_of": functional.cross_entropy, **REFUSED[reason]}
    mod, _ = head(options.pop("loss_of"), rows=12, classes=30, **options)
    after, losses = chunk_losses(mod.ir, 2)
    assert losses == () and after is mod.ir


def test_a_teacher_is_computed_in_the_chunks_of_its_student() -> None:
    """Two products of the scores' size, one of which has no gradient."""
    torch.manual_seed(5)
    student, teacher = nn.Linear(WIDTH, 30), nn.Linear(WIDTH, 30)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        scores = student(x).log_softmax(1)
        loss = functional.kl_div(scores, wanted, reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    mod, args = amp_ir.trace_step(
        step, (torch.randn(10, WIDTH),), model=[student, teacher], optimizer=optimizer
    )
    after, losses = chunk_losses(mod.ir, 5)
    assert [one.chunks for one in losses] == [5]
    assert peak_elements(after) < 10 * 30
    check_same(mod.ir, after, inputs_of(mod, args))


def test_two_heads_are_chunked_one_by_one() -> None:
    torch.manual_seed(5)
    body, heads = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, 30) for _ in range(2))
    model = nn.ModuleList([body, heads])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(body(x))
        loss = sum(functional.cross_entropy(one(hidden), labels) for one in heads)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = (torch.randn(10, WIDTH), torch.randint(0, 30, (10,)))
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    after, losses = chunk_losses(mod.ir, 2)
    assert [(one.location.module, one.chunks) for one in losses] == [("1.0", 2), ("1.1", 2)]
    assert peak_elements(after) < 10 * 30
    check_same(mod.ir, after, inputs_of(mod, args))


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["bert1", "gpt2", "lstm"])
def test_language_models_are_chunked_at_their_head(name: str, amp_dtype: str | None) -> None:
    """Tied weights, shifted labels, and sums of low values, which are made in float32."""
    training = WORKLOADS[name].make(small=True)
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    if amp_dtype is not None:
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    after, losses = chunk_losses(mod.ir, 2)
    modules = {"bert1": "cls.predictions.decoder", "gpt2": "lm_head", "lstm": "scores"}
    assert [(one.location.module, one.chunks) for one in losses] == [(modules[name], 2)]
    check_same(mod.ir, after, inputs_of(mod, args))


def large_head(
    amp_dtype: str | None, scaler: Any = None
) -> tuple[StepModule, Callable[..., Any], nn.Module, tuple[Any, ...]]:
    """A head whose scores are nearly all that the step holds, and the same step in PyTorch."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 256))
    peer = copy.deepcopy(model)

    def step_of(model: nn.Module, scaler: Any) -> tuple[Callable[..., Any], Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

        def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = functional.cross_entropy(model(x), labels)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        return step, optimizer

    step, optimizer = step_of(model, scaler)
    labels = torch.randint(0, 256, (500,))
    labels[::7] = -100
    batch = (torch.randn(500, 8), labels)
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer, scaler=scaler)
    if amp_dtype is not None:
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    return mod, step_of(peer, None)[0], peer, batch


def budget_of(mod: StepModule, share: float) -> int:
    free = lower(mod).plan
    return free.state_bytes + int(share * (free.peak_bytes - free.state_bytes))


@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
def test_training_within_a_budget_follows_pytorch(amp_dtype: str | None, has_scaler: bool) -> None:
    scaler = amp_ir.GradScaler(init_scale=1024.0) if has_scaler else None
    mod, eager, peer, batch = large_head(amp_dtype, scaler)
    budget = budget_of(mod, 0.4)
    train = amp_ir.compile(mod, memory_budget=budget)
    plan = train.report.plan
    assert plan.peak_bytes <= budget
    assert [one.chunks in CHUNK_COUNTS for one in plan.chunked_losses] == [True]
    # A rounding is 2^-24, or 2^-9 for the operands of a bfloat16 matmul; losses are about 6.
    tolerance = 1e-5 if amp_dtype is None else 2e-3
    for _ in range(4):
        assert float(train(*batch)) == pytest.approx(float(eager(*batch)), rel=tolerance)
    ours = [mod.state[one.name] for one in mod.signature.inputs if one.name in mod.state]
    theirs = dict(peer.named_parameters())
    for name, value in theirs.items():
        torch.testing.assert_close(mod.state[name], value.detach(), rtol=tolerance, atol=tolerance)
    assert ours


def test_a_budget_that_running_again_holds_chunks_nothing() -> None:
    mod, *_ = large_head(None)
    free = lower(mod).plan
    assert lower(mod, memory_budget=free.peak_bytes).plan == free
    assert free.chunked_losses == ()


def test_as_many_chunks_as_the_budget_needs_are_taken() -> None:
    mod, *_ = large_head("bfloat16")
    taken = [lower(mod, memory_budget=budget_of(mod, share)).plan for share in (0.8, 0.5, 0.3)]
    chunks = [plan.chunked_losses[0].chunks for plan in taken]
    assert chunks == sorted(chunks) and chunks[0] == 2 and chunks[-1] > 2


@pytest.mark.parametrize(
    ("milliseconds", "taken"), [({2: 9.0, 4: 8.0, 8: 7.7}, 4), ({2: 9.0, 4: 8.6}, 2)]
)
def test_more_chunks_are_taken_where_they_save_time(
    milliseconds: dict[int, float], taken: int
) -> None:
    """Plans that fit, but run calls again: more chunks are tried until that saves nothing."""
    mod, *_ = head(functional.cross_entropy, rows=32, classes=24)
    plan = lower(mod)
    again = attrs.evolve(plan.plan.calls[0], is_rerun=True)
    plan = attrs.evolve(plan, plan=attrs.evolve(plan.plan, calls=(again,)))

    def fits_in_chunks(_: tvm.IRModule, *, in_chunks: bool) -> PlannedStep:
        if not in_chunks:
            raise BudgetError("does not fit", 1)
        return plan

    def milliseconds_of(step: PlannedStep) -> float:
        return milliseconds[step.plan.chunked_losses[0].chunks]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "step_milliseconds", milliseconds_of)
        found = chunking.plan_in_chunks(mod.ir, fits_in_chunks)
    assert found.plan.chunked_losses[0].chunks == taken


def test_chunks_are_gone_before_the_next_ones_come() -> None:
    """At most one chunk's scores and their gradient, which is written over them, are held."""
    mod, *_ = large_head(None)
    plan = lower(mod, memory_budget=budget_of(mod, 0.4)).plan
    chunk = plan.chunked_losses[0].nbytes / plan.chunked_losses[0].chunks
    made = [v for v in plan.values if v.offset_bytes is not None and v.nbytes > 0.9 * chunk]
    held = [value for value in made if value.role is not MemoryRole.WORKSPACE]
    assert held
    for at in range(len(plan.calls)):
        assert sum(v.first_use <= at <= v.last_use for v in held) <= 1


def test_reports_say_that_the_loss_is_in_chunks() -> None:
    mod, *_ = large_head(None)
    budget = budget_of(mod, 0.5)
    report = amp_ir.memory_report(mod, memory_budget=budget)
    (loss,) = report.chunked_losses
    line = (
        f"to hold the memory budget, 2 and its loss are computed in {loss.chunks} chunks of rows "
        "(512000 bytes as a whole): the loss and the gradients of weights there are sums over the "
        "chunks, in another order"
    )
    assert str(loss) == line
    assert line in " ".join(str(report).split())
    assert '"chunks"' in report.to_json()
    assert amp_ir.memory_report(mod).chunked_losses == ()


def test_old_names_of_chunked_losses_warn() -> None:
    loss = ChunkedLoss(Location(), 4, 100)
    plan = MemoryPlan(0, 0, (), 0, 0, 0, chunked_losses=(loss,))
    goes = "now; the old name goes in the next minor version"
    with pytest.warns(DeprecationWarning) as warned:
        assert plan.splits == (loss,)
        assert report_memory(plan).splits == (loss,)
        assert loss.blocks == 4
        assert memory_plan.RowSplit is ChunkedLoss
    assert [str(one.message) for one in warned] == [
        f"MemoryPlan.splits is called MemoryPlan.chunked_losses {goes}",
        f"MemoryReport.splits is called MemoryReport.chunked_losses {goes}",
        f"ChunkedLoss.blocks is called ChunkedLoss.chunks {goes}",
        f"amp_ir.ir.memory_plan.RowSplit is called amp_ir.ir.memory_plan.ChunkedLoss {goes}",
    ]


def test_a_budget_that_no_chunks_hold_says_what_can() -> None:
    mod, *_ = large_head(None)
    with pytest.raises(BudgetError) as caught:
        lower(mod, memory_budget=1)
    least = caught.value.least_bytes
    assert f"Pass memory_budget={least} or more" in str(caught.value)
    plan = lower(mod, memory_budget=least).plan
    assert plan.peak_bytes <= least and plan.chunked_losses


@pytest.mark.skipif(not native.has(ACCUMULATE), reason="this oneDNN adds no products")
@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
def test_gradients_of_weights_are_added_up_in_the_state(amp_dtype: str | None) -> None:
    """The parts of a vocabulary's gradient, as large as the vocabulary, are never held."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = (torch.randn(300, 64), torch.randint(0, 512, (300,)))
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    if amp_dtype is not None:
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    plan = lower(mod, memory_budget=budget_of(mod, 0.55)).plan
    assert plan.chunked_losses
    # Neither the scores nor a chunk of them have as many bytes; without AVX-512 oneDNN asks for a
    # workspace of as many.
    made = [value for value in plan.values if value.role is not MemoryRole.WORKSPACE]
    gradients = [value for value in made if value.nbytes == 512 * 64 * 4]
    assert all(value.offset_bytes is None for value in gradients)
