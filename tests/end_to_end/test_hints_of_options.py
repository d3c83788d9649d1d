# SPDX-License-Identifier: Apache-2.0
"""What errors about options, plans and state tell to do works; test_hints.py has those of steps."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_ir
from amp_ir.amp import PrimType
from amp_ir.errors import AmpIrError

X, Y = torch.randn(4, 8), torch.randint(0, 3, (4,))


class Training:
    """A model, its optimizer, and a step of them."""

    def __init__(self, *layers: nn.Module) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(8, 3), *layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @property
    def owners(self) -> dict[str, Any]:
        """The options of `trace_step` and `jit`."""
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def traced(self) -> amp_ir.StepModule:
        return amp_ir.trace_step(self.step, (X, Y), **self.owners)[0]


@pytest.fixture(scope="module")
def mod() -> amp_ir.StepModule:
    return Training().traced()


def refused(message: str, call: Any) -> None:
    with pytest.raises(AmpIrError, match=re.escape(message)):
        call()


def test_a_rule_of_other_hints_is_told_those_that_there_are(mod):
    def cast(hint: Any) -> Any:
        def rule(args, ret_type, amp_dtype):
            """Give one hint to all."""
            return [hint for _ in args]

        with amp_ir.CustomTypeHint({"relax.matmul": rule}):
            return amp_ir.autocast(mod, amp_dtype="bfloat16").plan

    with pytest.raises(AmpIrError) as told:
        cast(PrimType("int8"))
    assert re.sub(r":\d+", ":N", str(told.value)) == (
        f"rule rule ({__file__}:N) returns {PrimType('int8')!r} for relax.matmul; the hints are "
        'PrimType("float32"), PrimType("bfloat16"), PrimType(None), TupleType([...]) and FREE'
    )
    for hint in (PrimType("float32"), PrimType("bfloat16"), PrimType(None)):
        assert {one.rule for one in cast(hint).ops if one.name == "relax.matmul"} == {"rule"}
    assert cast(amp_ir.amp.FREE).ops


def test_an_op_without_a_rule_gets_one_or_stays_float32(monkeypatch, mod):
    from amp_ir.amp.hints import RULES

    monkeypatch.delitem(RULES, "relax.nn.log_softmax")

    def cast(**options: Any) -> Any:
        return amp_ir.autocast(mod, amp_dtype="bfloat16", **options)

    with pytest.raises(AmpIrError) as told:
        cast()
    line = Training.step.__code__.co_firstlineno + 1
    assert re.fullmatch(
        r"no type hint for relax.nn.log_softmax \(1 call, first: `\w+` in step \(forward\), "
        rf"{re.escape(__file__)}:{line}\)[.] Add a rule with "
        r'@amp_ir.amp.type_hint\("relax.nn.log_softmax"\), whose PrimType\("float32"\) keeps an '
        r'argument in float32, or pass on_unknown="float32"',
        str(told.value),
    )
    kept = cast(on_unknown="float32").plan
    assert {op.results for op in kept.ops if op.name == "relax.nn.log_softmax"} == {("float32",)}

    @amp_ir.amp.type_hint("relax.nn.log_softmax")
    def as_told(args, ret_type, amp_dtype):
        """Stay in float32: the error said so."""
        return [PrimType("float32")]

    assert "the error said so" in cast().plan.explain("relax.nn.log_softmax")


def test_overrides_beside_a_plan_are_given_without_it_or_saved_in_one(mod, tmp_path):
    plan = amp_ir.autocast(mod, amp_dtype="bfloat16").plan
    override = amp_ir.Override(module="0", to="float32")
    both = {"amp_dtype": "bfloat16", "plan": plan, "overrides": [override]}
    refused("give the overrides without a plan, or save", lambda: amp_ir.autocast(mod, **both))
    made = amp_ir.autocast(mod, amp_dtype="bfloat16", overrides=[override]).plan
    made.save(tmp_path / "plan.json")
    again = amp_ir.CastPlan.load(tmp_path / "plan.json")
    assert amp_ir.autocast(mod, amp_dtype="bfloat16", plan=again).plan == made


def test_a_plan_of_another_step_is_made_anew(mod):
    plan = amp_ir.autocast(mod, amp_dtype="bfloat16").plan
    other = Training(nn.ReLU()).traced()
    refused("; make a new plan", lambda: amp_ir.autocast(other, amp_dtype="bfloat16", plan=plan))
    like = amp_ir.autocast(Training(nn.Tanh()).traced(), amp_dtype="bfloat16").plan
    refused(
        "op 3 of the plan is relax.tanh, of the step relax.nn.relu in 1 (forward), "
        f"{__file__}:{Training.step.__code__.co_firstlineno + 1}; make a new plan",
        lambda: amp_ir.autocast(other, amp_dtype="bfloat16", plan=like),
    )
    new = amp_ir.autocast(other, amp_dtype="bfloat16").plan
    assert amp_ir.autocast(other, amp_dtype="bfloat16", plan=new).plan == new


def test_another_dtype_is_applied_to_the_module_before(mod):
    low = amp_ir.autocast(mod, amp_dtype="bfloat16")
    refused("to the module before that", lambda: amp_ir.autocast(low, amp_dtype="float16"))
    assert amp_ir.autocast(mod, amp_dtype="float16").plan.amp_dtype == "float16"
    refused("to the module before", lambda: amp_ir.autocast(
        low, amp_dtype="bfloat16", out_dtype="bfloat16"))  # fmt: skip
    assert amp_ir.autocast(mod, amp_dtype="bfloat16", out_dtype="bfloat16").plan is not None


def test_a_step_without_a_plan_goes_through_autocast_first(mod):
    told = "the step has no plan; pass it through amp_ir.autocast first"
    refused(told, lambda: amp_ir.explain_plan(mod))
    assert amp_ir.explain_plan(amp_ir.autocast(mod, amp_dtype="bfloat16")).moved


@pytest.mark.parametrize(
    ("spoiled", "told"),
    [
        (lambda w: w.t().contiguous().t(),
         "for one in [*model.parameters(), *model.buffers()]: "
         "one.data = one.data.contiguous()"),
        (lambda w: torch.cat([w.new_zeros(1), w.flatten()])[1:].reshape(w.shape),
         "tensor.data = tensor.data.clone()"),
    ],
)  # fmt: skip
def test_a_parameter_of_unusable_memory_gets_memory_of_its_own(spoiled, told):
    one, eager = Training(), Training()
    weight = one.model[0].weight
    weight.data = spoiled(weight.data)

    def trained() -> torch.Tensor:
        train = amp_ir.jit(one.step, **one.owners)
        return torch.stack([train(X, Y) for _ in range(2)])

    try:
        losses = trained()
    except AmpIrError as error:
        assert told in str(error)
        exec(told, {"model": one.model, "tensor": weight})
        losses = trained()
    # float32, sums of eight products.
    expected = torch.stack([eager.step(X, Y) for _ in range(2)])
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_a_compiled_step_that_no_longer_fits_is_captured_again():
    one = Training()
    compiled = amp_ir.compile(one.traced())
    one.model[0].bias.requires_grad_(False)
    refused("Call amp_ir.trace_step and amp_ir.compile again", lambda: compiled(X, Y))
    before = one.model[0].bias.clone()
    amp_ir.compile(one.traced())(X, Y)
    amp_ir.jit(one.step, **one.owners)(X, Y)
    assert torch.equal(one.model[0].bias, before)


def test_what_asks_for_a_program_works_after_the_first_call():
    one = Training()
    train = amp_ir.jit(one.step, amp_dtype="bfloat16", **one.owners)
    refused("call it first", lambda: train.ir("amp"))
    train(X, Y)
    refused("call the step on the batch first", lambda: train.find_overflow(X[:2], Y[:2]))
    assert train.find_overflow(X, Y).cause == "none"
    with pytest.raises(AmpIrError, match="there is no such stage; give one of (.*?)[.] ") as told:
        train.ir("parse")
    listed = re.search(r"give one of (.*?)\. For", str(told.value))
    assert listed is not None
    assert all(train.ir(name).strip() for name in listed[1].split(", "))
    refused("capture it with scaler=amp_ir.GradScaler()", lambda: train.last)


def test_a_value_beyond_float16_is_converted_to_bfloat16_or_excluded():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    model[1].weight.data[0, 0] = 1e6
    refused(
        'Convert to "bfloat16", or exclude its module with excluded_names',
        lambda: amp_ir.convert_model(model, X),
    )
    for options in ({"target_dtype": "bfloat16"}, {"excluded_names": ["1"]}):
        got = amp_ir.convert_model(model, X, **options)(X)
        # bfloat16 and float16 have 8 and 11 significant bits.
        assert (got - model(X)).abs().max() <= 2.0**-6 * model(X).abs().max()


def test_more_announced_batches_than_programs_are_kept_want_a_larger_limit():
    one = Training()
    batches = [(X[:n], Y[:n]) for n in (1, 2, 3)]
    with pytest.raises(AmpIrError, match=r"pass max_shapes= of at least (\d+)") as told:
        amp_ir.jit(one.step, max_shapes=2, precompile=batches, **one.owners)
    least = int(re.search(r"at least (\d+)", str(told.value))[1])  # type: ignore[index]
    amp_ir.jit(one.step, max_shapes=least, precompile=batches, **one.owners)
