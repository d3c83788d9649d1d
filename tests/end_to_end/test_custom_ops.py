# SPDX-License-Identifier: Apache-2.0
"""Custom ops of torch.library in a compiled step: C++, Python, under a loss scale, refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
import cpp_ops
import custom_ops
from amp_ir.dialect.external_call import ResultSpec, check_results
from amp_ir.errors import BrokenPromiseError, CaptureError, RuleError, StepFailedError
from amp_ir.ir.interpreter import interpret
from amp_ir.pipeline import lower
from external_ops import training


class Middle(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.function(self.first(x))).square().mean()


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))


def assert_trains_as_in_eager(
    function: Callable[[torch.Tensor], torch.Tensor], amp_dtype: str = "float32", rtol: float = 1e-5
) -> Any:
    ours = Middle(function)
    theirs = copy.deepcopy(ours)
    optimizer, step = training(ours)
    compiled = amp_ir.jit(step, model=ours, optimizer=optimizer, amp_dtype=amp_dtype)
    _, eager = training(theirs)
    for _ in range(3):
        torch.testing.assert_close(compiled(X), eager(X), rtol=rtol, atol=rtol)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)
    return compiled


def traced(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Middle]:
    model = Middle(function)
    optimizer, step = training(model)
    return amp_ir.trace_step(step, (X,), model=model, optimizer=optimizer)[0], model


def wave(h: torch.Tensor) -> torch.Tensor:
    return custom_ops.wave(h, 1.5)


@pytest.mark.parametrize("amp_dtype", ["float32", "bfloat16", "float16"])
def test_an_op_in_python_with_its_autograd(amp_dtype: str):
    # One rounding of each of the layers' arguments: 2^-8.
    assert_trains_as_in_eager(wave, amp_dtype, 1e-5 if amp_dtype == "float32" else 2**-7)


def test_an_op_in_cpp(tmp_path_factory: pytest.TempPathFactory):
    cube = cpp_ops.cube(Path(tmp_path_factory.getbasetemp()))
    assert_trains_as_in_eager(cube)


def test_the_interpreter_calls_the_op_itself():
    mod, model = traced(wave)
    inputs = [mod.state[one.name] if one.is_state else X for one in mod.signature.inputs]
    inputs = [one if isinstance(one, torch.Tensor) else one() for one in inputs]
    torch.testing.assert_close(interpret(mod, inputs)[0], model(X).detach())


def test_an_op_that_writes_to_an_argument():
    def function(h: torch.Tensor) -> torch.Tensor:
        kept = h.detach().clone()
        total = custom_ops.scale_(kept, 2.0)
        return h * kept + total

    assert_trains_as_in_eager(function)


def test_an_op_in_the_middle_of_a_model_with_a_loss_scale():
    ours = Middle(wave)
    theirs = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    scaler = amp_ir.GradScaler(init_scale=2.0**10)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = ours(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    mod, _ = amp_ir.trace_step(step, (X,), model=ours, optimizer=optimizer, scaler=scaler)
    (note,) = [one for one in mod.notes if "linear" in one]
    assert note.startswith(
        "amp_ir_test::wave_backward, called in the backward pass, is taken for linear in the "
        "gradients that it reads, as a vector-Jacobian product is (first in step (backward), "
    ) or note.startswith("amp_ir_test::wave_backward, called in the backward pass")
    compiled = amp_ir.compile(mod)
    eager = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(3):
        got = compiled(X)
        expected = theirs(X)
        expected.backward()
        eager.step()
        eager.zero_grad()
        torch.testing.assert_close(got, expected.detach())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_scaled_value_that_meets_an_op_of_the_forward_pass_cannot_be_told():
    model = Middle(lambda h: h)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp_ir.GradScaler()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = custom_ops.wave(scaler.scale(model(x)), 1.0)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    mod, _ = amp_ir.trace_step(step, (X,), model=model, optimizer=optimizer, scaler=scaler)
    assert any(
        "Cannot tell how the loss scale enters" in one
        and "amp_ir_test::wave of a value that is multiplied by the loss scale" in one
        for one in mod.notes
    )


def test_a_registered_autocast_decides_and_an_unannotated_op_is_left():
    mod, _ = traced(lambda h: custom_ops.doubled(wave(h)))
    plan = amp_ir.autocast(mod, amp_dtype="bfloat16").plan
    calls = [one for one in plan.ops if one.name.startswith("amp_ir_test::")]
    by_rule = {(one.rule, tuple(one.reads)) for one in calls}
    assert ("register_autocast", ("bfloat16",)) in by_rule
    assert ("external_call", ("float32",)) in by_rule
    assert_trains_as_in_eager(lambda h: custom_ops.doubled(h), "bfloat16", 2**-6)


def test_an_autocast_to_another_low_dtype_is_refused():
    mod, _ = traced(lambda h: custom_ops.doubled(h))
    with pytest.raises(RuleError) as caught:
        amp_ir.autocast(mod, amp_dtype="float16")
    assert str(caught.value) == (
        "torch.library.register_autocast casts amp_ir_test::doubled to bfloat16, and the low dtype "
        'of the step is float16: register it for that, or pass amp_dtype="bfloat16"'
    )


def test_an_override_selects_an_op_by_its_own_name():
    mod, _ = traced(wave)
    low = amp_ir.Override(op="amp_ir_test::wave", to="low")
    plan = amp_ir.autocast(mod, amp_dtype="bfloat16", overrides=[low]).plan
    (call,) = [one for one in plan.ops if one.rule == "override"]
    assert tuple(call.reads) == ("bfloat16",)


BREAKING: list[tuple[Any, str, type[Exception]]] = [
    (custom_ops.failing, "no such thing", LookupError),
    (
        custom_ops.lying,
        "result 0 of amp_ir_test::lying.default is float32[2, 16], and its fake implementation "
        "promised float32[6, 16]; make the two agree (torch.library.opcheck compares them)",
        BrokenPromiseError,
    ),
    (
        custom_ops.writing,
        "amp_ir_test::writing.default wrote to an argument that its schema does not mark as "
        "written; list it in mutates_args",
        BrokenPromiseError,
    ),
]


@pytest.mark.parametrize(("op", "what", "kind"), BREAKING)
def test_an_op_that_fails_or_lies_is_named_with_its_place(op: Any, what: str, kind: type):
    def function(h: torch.Tensor) -> torch.Tensor:
        return h * op(h.detach() * 1.0)

    model = Middle(function)
    before = copy.deepcopy(model.state_dict())
    optimizer, step = training(model)
    compiled = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype="float32")
    with pytest.raises(StepFailedError) as caught:
        compiled(X)
    name = op._opoverload.name()
    message = str(caught.value)
    line = function.__code__.co_firstlineno + 1
    assert re.fullmatch(
        rf"call \d+ of \d+ of the step, {name} \({name}\) in step \(forward\), "
        rf"{re.escape(f'{__file__}:{line}, failed: {what}')}\. Nothing has changed: model, "
        r"optimizer, scaler and random state are as before the step, which may be called again",
        message,
    ), message
    assert isinstance(caught.value.__cause__, kind)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_an_op_that_returns_fewer_tensors_than_promised_is_named() -> None:
    with pytest.raises(BrokenPromiseError) as caught:
        check_results("of::pairs", [ResultSpec.of(X)] * 2, [X, None])
    assert str(caught.value) == (
        "of::pairs returned 1 tensors, and its fake implementation 2; make the two agree "
        "(torch.library.opcheck compares them)"
    )


REFUSED: list[tuple[Any, str]] = [
    (
        lambda h: h * custom_ops.unknown(h.detach()),
        "There was no fake impl registered for <CustomOpDef(amp_ir_test::unknown)>",
    ),
    (
        lambda h: h * custom_ops.unknown(h.detach()),
        "A compiled step needs the shapes of its results before it runs: register a function that "
        "returns empty tensors of them with torch.library.register_fake",
    ),
    (
        lambda h: h * custom_ops.measured(h.detach()),
        "amp_ir_test.measured.default returns a number (float), which must be known before the "
        "step runs. Let it return a tensor of shape ()",
    ),
    (
        lambda h: (custom_ops.logged(h.detach()), h)[1],
        "amp_ir_test.logged.default has no result: a compiled step runs ops for their results "
        "only. Call it outside of the step, or let it return a tensor that the step uses",
    ),
    (
        lambda h: (custom_ops.doubled_each([h.detach()]), h)[1],
        "amp_ir_test.doubled_each.default writes to tensors, of type List[Tensor]: a compiled step "
        "follows writes to tensors only, not to lists of them or to tensors that may be None. Let "
        "it return the new values, or take each tensor as an argument of its own",
    ),
    (
        lambda h: (custom_ops.doubled_maybe(h.detach()), h)[1],
        "amp_ir_test.doubled_maybe.default writes to x, of type Optional[Tensor]",
    ),
]


@pytest.mark.parametrize(("function", "what"), REFUSED)
def test_what_cannot_be_part_of_a_step_says_why(function: Any, what: str):
    with pytest.raises(CaptureError) as caught:
        traced(function)
    assert what in str(caught.value)


def test_a_budget_does_not_run_an_op_of_the_user_twice():
    mod, _ = traced(wave)
    plan = lower(mod).plan
    for budget in range(plan.peak_bytes - 1, plan.peak_bytes - 2000, -256):
        try:
            planned = lower(mod, memory_budget=budget)
        except amp_ir.errors.BudgetError:
            break
        names = [call.name for call in planned.plan.calls]
        assert names.count("amp_ir_test::wave") == 1
