# SPDX-License-Identifier: Apache-2.0
"""The rules in effect around a call: a jitted step follows them, a compiled one keeps its own."""

from __future__ import annotations

import copy
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
