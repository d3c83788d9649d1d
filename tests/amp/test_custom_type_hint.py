# SPDX-License-Identifier: Apache-2.0
"""The rules in effect around a call: a jitted step follows them, a compiled one keeps its own."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.amp import PrimType, custom_type_hint, hints
from amp_ir.errors import StateError


def never_low(args: Any, ret_type: Any, amp_dtype: str) -> Any:
    """Stay in float32: this test asks for it."""
    return [PrimType("float32")] * len(args)


def jitted(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return amp_ir.jit(step, model=model, optimizer=optimizer, **options)


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
MATMULS = {"relax.matmul": never_low}


def rules_of_products(plan: Any) -> set[str]:
    return {one.rule for one in plan.ops if one.name == "relax.matmul"}


def test_a_jitted_step_follows_the_block_around_each_call() -> None:
    train = jitted(amp_dtype="bfloat16")
    for _ in range(2):
        train(X)
        assert rules_of_products(train.compiled.module.plan) == {"matmul"}
        with amp_ir.CustomTypeHint(MATMULS):
            train(X)
        assert rules_of_products(train.compiled.module.plan) == {"never_low"}
    (again,) = train.recompiles
    line = never_low.__code__.co_firstlineno
    assert again.reason == (
        "the rule of relax.matmul was the policy's and is "
        f"never_low ({never_low.__code__.co_filename}:{line})"
    )


def test_a_rule_that_is_defined_again_at_each_step_is_the_same_rule() -> None:
    train = jitted(amp_dtype="bfloat16")
    for _ in range(3):
        with amp_ir.CustomTypeHint({"relax.matmul": lambda a, r, d: [PrimType("float32")] * 2}):
            train(X)
    assert train.recompiles == []


@pytest.mark.parametrize("captured", ["in a closure", "as a default"])
def test_a_rule_that_holds_another_value_is_another_rule(captured: str) -> None:
    def rule(dtype: str | None) -> Any:
        if captured == "in a closure":
            return lambda args, ret_type, amp_dtype: [PrimType(dtype)] * 2
        return lambda args, ret_type, amp_dtype, to=dtype: [PrimType(to)] * 2

    train = jitted(amp_dtype="bfloat16")
    for dtype in ("float32", "bfloat16"):
        with amp_ir.CustomTypeHint({"relax.matmul": rule(dtype)}):
            train(X)
        reads = {one.reads for one in train.compiled.module.plan.ops if one.name == "relax.matmul"}
        assert reads == {(dtype, dtype)}
    assert len(train.recompiles) == 1


KEPT = "float32"


def reads_a_global(args: Any, ret_type: Any, amp_dtype: str) -> Any:
    """Keep the dtype that a variable of the file says."""
    return [PrimType(KEPT)] * len(args)


@pytest.mark.parametrize("read", ["of a closure", "of the file"])
def test_a_rule_reads_a_variable_again_when_it_changes(
    read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step went on with the casts of the first value."""
    kept = "float32"

    def of_closure(args: Any, ret_type: Any, amp_dtype: str) -> Any:
        """Keep the dtype that a variable around says."""
        return [PrimType(kept)] * len(args)

    rule, name = (of_closure, "kept") if read == "of a closure" else (reads_a_global, "KEPT")
    train = jitted(amp_dtype="bfloat16")
    with amp_ir.CustomTypeHint({"relax.matmul": rule}):
        for dtype in ("float32", "float32", "bfloat16", "float32"):
            kept = dtype
            monkeypatch.setattr(f"{__name__}.KEPT", dtype)
            train(X)
            plan = train.compiled.module.plan
            reads = {one.reads for one in plan.ops if one.name == "relax.matmul"}
            assert reads == {(dtype, dtype)}
    (again,) = train.recompiles  # both programs are kept
    assert again.reason == (
        f"the rule of relax.matmul reads {name}, which was 'float32' and is 'bfloat16'"
    )


class Settings:
    def __init__(self, kept: list[str]) -> None:
        self.kept = kept

    def __call__(self, args: Any, ret_type: Any, amp_dtype: str) -> Any:
        """Keep what the settings say."""
        return [PrimType(self.kept[-1])] * len(args)

    def decide(self, args: Any, ret_type: Any, amp_dtype: str) -> Any:
        return self(args, ret_type, amp_dtype)


LIST = ["float32"]
SETTINGS = Settings(LIST)


def from_a_list(args: Any, ret_type: Any, amp_dtype: str) -> Any:
    return [PrimType(LIST[-1])] * len(args)


def from_an_object(args: Any, ret_type: Any, amp_dtype: str) -> Any:
    return [PrimType(SETTINGS.kept[-1])] * len(args)


def kept_dtype() -> str:
    return [one for one in LIST][-1]


def through_a_function(args: Any, ret_type: Any, amp_dtype: str) -> Any:
    return [PrimType(kept_dtype()) for _ in args]


def of_part(kept: list[str], args: Any, ret_type: Any, amp_dtype: str) -> Any:
    """Keep what a list says. It is bound."""
    return [PrimType(kept[-1])] * len(args)


def by_default(args: Any, ret_type: Any, amp_dtype: str, kept: list[str] = LIST) -> Any:
    return [PrimType(kept[-1])] * len(args)


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (from_a_list, "LIST"),
        (from_an_object, "SETTINGS"),
        (through_a_function, "kept_dtype.LIST"),
        (functools.partial(of_part, LIST), "its own parts"),
        (SETTINGS, "its own parts"),
        (SETTINGS.decide, "its own parts"),
        (by_default, "kept"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_rule_reads_again_what_is_inside_of_an_object(rule: Any, name: str) -> None:
    """The step went on with the casts of what it held at first; the last turn restores LIST."""
    train = jitted(amp_dtype="bfloat16")
    with amp_ir.CustomTypeHint({"relax.matmul": rule}):
        for dtype in ("float32", "float32", "bfloat16", "float32"):
            LIST[-1] = dtype
            train(X)
            plan = train.compiled.module.plan
            reads = {one.reads for one in plan.ops if one.name == "relax.matmul"}
            assert reads == {(dtype, dtype)}
    (again,) = train.recompiles  # both programs are kept
    assert again.reason.startswith(
        f"the rule of relax.matmul reads {name}, which holds other values now: "
    )


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (functools.partial(of_part, LIST), "of_part: Keep what a list says"),
        (SETTINGS, "Settings: Keep what the settings say"),
    ],
)
def test_a_plan_says_the_reason_of_a_rule_that_is_no_function(rule: Any, said: str) -> None:
    """It was an AttributeError."""
    train = jitted(amp_dtype="bfloat16")
    with amp_ir.CustomTypeHint({"relax.matmul": rule}):
        train(X)
    plan = train.compiled.module.plan
    found = {f"{one.rule}: {one.reason}" for one in plan.ops if one.name == "relax.matmul"}
    assert found == {said}


def test_a_registered_rule_reads_again_what_is_inside_of_an_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(hints.RULES, "relax.matmul")
    kept = ["float32"]

    @amp_ir.amp.type_hint("relax.matmul")
    def rule(args: Any, ret_type: Any, amp_dtype: str) -> Any:
        """Keep what a list says."""
        return [PrimType(kept[-1])] * len(args)

    train = jitted(amp_dtype="bfloat16")
    for dtype in ("float32", "bfloat16"):
        kept[-1] = dtype
        train(X)
        plan = train.compiled.module.plan
        assert {one.reads for one in plan.ops if one.name == "relax.matmul"} == {(dtype, dtype)}


def test_what_a_rule_writes_is_no_change() -> None:
    seen = []

    def rule(args: Any, ret_type: Any, amp_dtype: str) -> Any:
        """Count the matmuls."""
        seen.append(str(ret_type))
        return [PrimType("float32")] * len(args)

    train = jitted(amp_dtype="bfloat16")
    for _ in range(3):
        with amp_ir.CustomTypeHint({"relax.matmul": rule}):
            train(X)
    assert seen and train.recompiles == []


def test_a_step_without_casts_has_no_rules_to_follow() -> None:
    train = jitted()
    train(X)
    with amp_ir.CustomTypeHint(MATMULS):
        train(X)
    assert train.recompiles == []


def test_a_rule_that_is_registered_later_is_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("amp_ir.amp.custom_type_hint.RULES", dict(hints.RULES))
    rules = custom_type_hint.RulesInEffect()
    assert rules.change() == ""
    custom_type_hint.RULES["mylib.op"] = never_low
    code = never_low.__code__
    assert rules.change() == (
        f"mylib.op had no rule and has never_low ({code.co_filename}:{code.co_firstlineno})"
    )


def test_a_compiled_step_keeps_the_rules_of_its_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    mod, args = amp_ir.trace_step(step, (X,), model=model, optimizer=optimizer)
    with amp_ir.CustomTypeHint(MATMULS):
        low = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    expected = step_on_a_copy(model)
    torch.testing.assert_close(amp_ir.compile(low)(X), expected, rtol=1e-5, atol=1e-6)


def step_on_a_copy(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(model)(X).square().mean()


def test_a_converted_model_keeps_the_rules_of_its_conversion_for_every_shape() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    with amp_ir.CustomTypeHint(MATMULS):
        converted = amp_ir.convert_model(model, (X,), target_dtype="bfloat16")
    converted(X[:3])
    assert rules_of_products(converted.plan) == {"never_low"}

    converted = amp_ir.convert_model(model, (X,), target_dtype="bfloat16")
    with amp_ir.CustomTypeHint(MATMULS):
        converted(X[:3])
    assert "never_low" not in rules_of_products(converted.plan)


def test_a_region_around_the_call_is_compared_too() -> None:
    train = jitted(amp_dtype="bfloat16")
    train(X)
    outside = train.compiled
    with amp_ir.autocast_off():
        train(X)
    (again,) = train.recompiles
    assert again.reason == (
        "the precision that autocast_off or an annotation sets around the call was rules and is off"
    )
    assert {one.reads for one in train.compiled.module.plan.ops if one.name == "relax.matmul"} == {
        ("float32", "float32")
    }
    with amp_ir.autocast_off(), pytest.raises(StateError, match="autocast_off"):
        outside(X)
