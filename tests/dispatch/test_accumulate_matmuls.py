# SPDX-License-Identifier: Apache-2.0
"""Products that a library adds where the other terms lie: the rewrite, the numbers, the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

import amp_ir
from amp_ir.api import lower
from amp_ir.dispatch.accumulate_matmuls import ACCUMULATE, accumulate_matmuls
from amp_ir.dispatch.dispatch import dispatch
from amp_ir.host import native
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.step_module import OutputSpec, Role
from compiled_steps import assert_compiled_alike
from library_calls import lines_of
from planned_steps import check_plan, results_of
from small_programs import program
from step_comparison import Training

pytestmark = pytest.mark.skipif(not native.has(ACCUMULATE), reason="oneDNN is not in this build")


def output(updates: int | None, *shape: int) -> OutputSpec:
    role = Role.RESULT if updates is None else Role.PARAMETER
    return OutputSpec("new", role, shape or (4, 4), "float32", updates)


def test_an_update_becomes_part_of_the_product():
    @I.ir_module
    class Before:
        @R.function
        def main(
            p: R.Tensor((4, 4), "float32"),
            lr: R.Tensor((), "float32"),
            d: R.Tensor((2, 4), "bfloat16"),
            x: R.Tensor((2, 4), "bfloat16"),
        ):
            with R.dataflow():
                t = R.permute_dims(d, axes=[1, 0])
                g = R.matmul(t, x, out_dtype="float32")
                n = R.negative(lr)
                s = R.multiply(g, n)
                p1 = R.add(p, s)
                out = (p1,)
                R.output(out)
            return out

    assert lines_of(accumulate_matmuls(dispatch(Before), [output(0)])) == [
        "n = R.negative(lr)",
        'p1 = R.call_dps_packed("amp_ir.onednn.matmul_accumulate", (d, x, p, R.null_value(), n, '
        "R.null_value(), R.shape([4, 2]), R.shape([1, 4]), R.shape([2, 4]), R.shape([4, 1]), "
        'R.shape([4, 4]), R.shape([4, 1]), R.str("none")), '
        'out_ty=R.Tensor((4, 4), dtype="float32"))',
        "out = (p1,)",
    ]


def test_a_momentum_is_a_factor_and_the_rest_of_the_sum_is_added_afterwards():
    @I.ir_module
    class Before:
        @R.function
        def main(
            m: R.Tensor((4, 4), "float32"),
            h: R.Tensor((4, 4), "float32"),
            d: R.Tensor((4, 2), "float32"),
            x: R.Tensor((2, 4), "float32"),
        ):
            with R.dataflow():
                g = R.matmul(d, x)
                both = R.subtract(g, h)
                old = R.multiply(m, R.const(0.5, "float32"))
                m1 = R.add(old, both)
                out = (m1,)
                R.output(out)
            return out

    log = DispatchLog()
    assert lines_of(accumulate_matmuls(dispatch(Before), [output(0)], log=log)) == [
        'accumulated0 = R.call_dps_packed("amp_ir.onednn.matmul_accumulate", (d, x, m, '
        'R.null_value(), R.null_value(), R.const(0.5, "float32"), R.shape([4, 2]), '
        "R.shape([2, 1]), R.shape([2, 4]), R.shape([4, 1]), R.shape([4, 4]), R.shape([4, 1]), "
        'R.str("none")), out_ty=R.Tensor((4, 4), dtype="float32"))',
        'accumulated1 = R.multiply(h, R.const(-1.0, "float32"))',
        "m1 = R.add(accumulated0, accumulated1)",
        "out = (m1,)",
    ]
    assert [str(note) for note in log.notes] == [
        "accumulate: 1 call -> onednn, because only a sum reads the matmul"
    ]


SQUARE = (4, 4)
# Sums of the state a, a second tensor b, the products c @ d and e @ f, and a number s; with how
# many products are accumulated where the sum is the new value of a, and where it is returned.
SUMS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "a product and the state": (lambda e, a, b, p, q, s: op.add(a, p()), 1, 0),
    "less a product": (lambda e, a, b, p, q, s: op.subtract(a, e(op.multiply(p(), s))), 1, 0),
    "a product less the state": (lambda e, a, b, p, q, s: op.subtract(p(), a), 1, 0),
    "the negative of a sum": (
        lambda e, a, b, p, q, s: op.add(e(op.negative(e(op.add(p(), b)))), a), 1, 0,
    ),
    "two products": (lambda e, a, b, p, q, s: op.add(p(), q()), 1, 1),
    "two products and the state": (
        lambda e, a, b, p, q, s: op.add(e(op.add(p(), a)), e(op.multiply(q(), s))), 2, 1,
    ),
    "a factor of two products": (
        lambda e, a, b, p, q, s: op.add(b, e(op.multiply(e(op.add(p(), q())), s))), 1, 1,
    ),
    "the state twice": (
        lambda e, a, b, p, q, s: op.add(a, e(op.add(e(op.multiply(a, s)), p()))), 0, 0,
    ),
    "another tensor": (lambda e, a, b, p, q, s: op.add(b, p()), 0, 0),
    "a product of elements": (lambda e, a, b, p, q, s: op.add(a, e(op.multiply(p(), b))), 0, 0),
}  # fmt: skip


def sums(which: str, *, reads_product: bool = False, reads_state_later: bool = False) -> Any:
    def build(emit: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, s: Any) -> list[Any]:
        products: list[Any] = []

        def product(x: Any, y: Any) -> Any:
            products.append(emit(op.matmul(x, y)))
            return products[-1]

        one = SUMS[which][0](emit, a, b, lambda: product(c, d), lambda: product(e, f), s)
        total = emit(one)
        others = [emit(op.tanh(one)) for one in products] if reads_product else []
        return [total, *others, *([emit(op.matmul(a, total))] if reads_state_later else [])]

    return program(build, *[SQUARE] * 6, ())


def count(ir: tvm.IRModule) -> int:
    return ir.script().count(ACCUMULATE)


@pytest.mark.parametrize("which", SUMS)
@pytest.mark.parametrize("is_state", [True, False])
def test_what_is_accumulated(which: str, is_state: bool) -> None:
    ir = dispatch(sums(which))
    after = accumulate_matmuls(ir, [output(0 if is_state else None)])
    assert count(after) == SUMS[which][1 if is_state else 2]
    if not count(after):
        assert after is ir


@given(st.sampled_from(list(SUMS)), st.booleans())
@settings(deadline=None, max_examples=20)
def test_what_something_else_reads_is_left_alone(which: str, is_state: bool) -> None:
    ir = dispatch(sums(which, reads_product=True))
    others = ir["main"].ret_ty.fields[1:]
    outputs = [output(0 if is_state else None), *(output(None) for _ in others)]
    assert accumulate_matmuls(ir, outputs) is ir


def test_a_state_that_is_read_later_is_not_written_over():
    ir = dispatch(sums("a product and the state", reads_state_later=True))
    assert accumulate_matmuls(ir, [output(0), output(None)]) is ir


def test_other_libraries_are_left_alone():
    ir = dispatch(sums("two products"), libraries=("torch",))
    assert accumulate_matmuls(ir, [output(None)]) is ir


class Tied(nn.Module):
    """A table that the scores read too, and a linear layer on three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.inner = nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(self.table(ids))) @ self.table.weight.t()


OPTIMIZERS: dict[str, tuple[dict[str, Any], int]] = {
    # Options of SGD, and how many of the two weights' gradients are accumulated.
    "plain": ({}, 2),
    "momentum": ({"momentum": 0.9}, 2),
    "dampening": ({"momentum": 0.9, "dampening": 0.5}, 2),
    "momentum and decay": ({"momentum": 0.9, "weight_decay": 0.01}, 2),
    "decay": ({"weight_decay": 0.01}, 0),
    "nesterov": ({"momentum": 0.9, "nesterov": True}, 0),
    "maximize": ({"maximize": True}, 2),
}


def training(options: dict[str, Any], *, micro_batches: int = 1, clips: bool = False) -> Training:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for k in range(micro_batches):
            scores = model(ids[k]).flatten(0, 1)
            loss = nn.functional.cross_entropy(scores, labels[k].flatten())
            loss.backward()
            total = total + loss.detach()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Training(model, optimizer, step)


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return tuple(torch.randint(0, 40, (2, 3, 5), generator=generator) for _ in range(2))


def planned(made: Training, amp_dtype: str | None = None) -> PlannedStep:
    mod, args = amp_ir.trace_step(made.step, batch(0), model=made.model, optimizer=made.optimizer)
    if amp_dtype is not None:
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    return lower(mod)


def accumulating(step: PlannedStep) -> list[Any]:
    return [call for call in step.plan.calls if call.name == "onednn.matmul_accumulate"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sgd_trains_as_in_pytorch_while_its_settings_change(name: str) -> None:
    options, expected = OPTIMIZERS[name]
    made = training(options)
    made.step(*batch(0))  # the first step with a dampening has no momentum yet
    assert len(accumulating(planned(made))) == expected

    def between(made: Training) -> None:
        made.optimizer.param_groups[0]["lr"] *= 0.7
        if made.optimizer.param_groups[0]["momentum"]:
            made.optimizer.param_groups[0]["momentum"] -= 0.1

    assert_compiled_alike(lambda: training(options), batch, steps=5, between=between)


def test_micro_batches_are_added_up_by_the_products() -> None:
    # Of each weight both products; the second one's rows of the table as well.
    made = training({"momentum": 0.9}, micro_batches=2)
    assert len(accumulating(planned(made))) >= 2
    assert_compiled_alike(lambda: training({"momentum": 0.9}, micro_batches=2), batch, steps=3)


def test_clipping_reads_the_gradients_so_they_stay() -> None:
    assert not accumulating(planned(training({"momentum": 0.9}, clips=True)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_product_is_added_to_a_state_that_is_read_again_too(dtype: str, is_read: bool) -> None:
    def build(emit: Any, m: Any, d: Any, x: Any) -> list[Any]:
        total = emit(op.add(m, emit(op.matmul(d, x, out_dtype="float32"))))
        return [total, emit(op.tanh(total))] if is_read else [total]

    ir = dispatch(program(build, *[SQUARE] * 3, dtypes=["float32", dtype, dtype]))
    after = accumulate_matmuls(ir, [output(0), output(None)][: 1 + is_read])
    assert count(after) == 1


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
def test_no_gradient_of_a_weight_is_held_or_copied(options, amp_dtype) -> None:
    plan = planned(training(options), amp_dtype).plan
    sizes = {40 * 16 * 4, 16 * 16 * 4}
    held = [v for v in plan.values if v.offset_bytes is not None and v.dtype == "float32"]
    assert not [v.name for v in held if v.nbytes in sizes and v.role.value == "gradient"]
    assert not [call for call in plan.calls if call.ops == ("copy",)]


def test_a_gradient_that_is_kept_is_accumulated_where_it_is_kept() -> None:
    def build() -> Training:
        made = training({})
        optimizer = made.optimizer

        def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            scores = made.model(ids[0]).flatten(0, 1)
            loss = nn.functional.cross_entropy(scores, labels[0].flatten())
            loss.backward()
            optimizer.step()
            return loss.detach()

        for parameter in made.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return Training(made.model, optimizer, step)

    assert len(accumulating(planned(build()))) == 2
    assert_compiled_alike(build, batch, steps=3)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
def test_a_budget_runs_no_sum_in_the_state_again_and_changes_no_bit(options) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    mod, args = amp_ir.trace_step(step, (torch.randn(512, 32),), model=model, optimizer=optimizer)
    free = lower(mod)
    assert len(accumulating(free)) == 4
    expected = results_of(mod, free, args)
    budget = free.plan.state_bytes + int(0.75 * (free.plan.peak_bytes - free.plan.state_bytes))
    planned = lower(mod, memory_budget=budget)
    assert planned.plan.peak_bytes <= budget
    assert any(call.is_rerun for call in planned.plan.calls)
    assert not any(call.is_rerun for call in accumulating(planned))
    check_plan(planned.plan)
    found = results_of(mod, planned, args)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
