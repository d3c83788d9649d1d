# SPDX-License-Identifier: Apache-2.0
"""Errors that few programs meet: their full text, and that what they tell to do works."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_ir
from amp_ir.amp import RuleResult, type_hint
from amp_ir.cli import main
from amp_ir.errors import AmpIrError

X, Y = torch.linspace(-1, 1, 32).reshape(4, 8), torch.tensor([0, 2, 1, 0])
Compute = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Training:
    """A model, its optimizer, and a step that computes its loss by a function."""

    def __init__(self, compute: Compute | None = None) -> None:
        torch.manual_seed(5)
        self.model = nn.Linear(8, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._compute = compute or (lambda model, x: model(x).square().mean())

    @property
    def owners(self) -> dict[str, Any]:
        """The options of `trace_step` and `jit`."""
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self._compute(self.model, x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def jitted(self, **options: Any) -> Any:
        return amp_ir.jit(self.step, **self.owners, **options)

    def traced(self) -> amp_ir.StepModule:
        return amp_ir.trace_step(self.step, (X,), **self.owners)[0]


def refused(message: str, call: Callable[[], Any]) -> None:
    """Expect an error of this text; {line} in it is any place."""
    with pytest.raises(AmpIrError) as caught:
        call()
    text = str(caught.value)
    first, _, last = message.partition("{line}")
    assert text.startswith(first) and text.endswith(last), text


def test_an_override_selects_something() -> None:
    refused(
        "Override(to='float32') would select every call; give op, module, parameter or phase, or "
        "choose a policy",
        lambda: amp_ir.Override(to="float32"),
    )
    mod = Training().traced()
    selections: list[Any] = [{"op": "*"}, {"module": "*"}, {"phase": "forward"}]
    for override in selections:
        amp_ir.autocast(mod, overrides=[amp_ir.Override(to="float32", **override)])


def test_a_rule_for_an_op_that_has_one_is_a_hint_of_the_user() -> None:
    def second(_call: Any, _args: Any, _dtype: str) -> RuleResult:
        """Keep it."""
        raise NotImplementedError

    with pytest.raises(AmpIrError) as caught:
        type_hint("relax.matmul")(second)
    assert str(caught.value).startswith("relax.matmul has a rule already: ")
    assert str(caught.value).endswith(" is the second. Use amp_ir.CustomTypeHint to replace one")

    def undocumented(_call: Any, _args: Any, _dtype: str) -> RuleResult:
        raise NotImplementedError

    refused(
        f"rule {undocumented.__qualname__} has no docstring; its first sentence is the reason",
        lambda: type_hint("relax.of_nobody")(undocumented),
    )


def test_a_scaler_in_the_middle_of_an_iteration_is_updated_first() -> None:
    training, scaler = Training(), amp_ir.GradScaler(device="cpu")
    scaler.scale(training.model(X).square().mean()).backward()
    scaler.unscale_(training.optimizer)
    refused(
        "scaler= is in the middle of an iteration: unscale_ or step was called on it, and update "
        "was not; call scaler.update() first",
        lambda: amp_ir.jit(training.step, **training.owners, scaler=scaler),
    )
    scaler.step(training.optimizer)
    scaler.update()
    training.optimizer.zero_grad()
    amp_ir.jit(training.step, **training.owners, scaler=scaler)(X)


def test_a_step_ends_its_scalers_iteration() -> None:
    training, scaler = Training(), amp_ir.GradScaler(device="cpu")

    def half(x: torch.Tensor) -> torch.Tensor:
        loss = training.model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(training.optimizer)
        return loss.detach()

    def whole(x: torch.Tensor) -> torch.Tensor:
        loss = half(x)
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        return loss

    refused(
        "this step cannot be captured, 1 place:\n  1. {line}: the step calls scaler.unscale_ but "
        "ends before scaler.step and scaler.update(). A captured step ends with scaler.update() "
        "after the scaler.step of every optimizer; call both inside of it",
        lambda: amp_ir.jit(half, **training.owners, scaler=scaler)(X),
    )
    amp_ir.jit(whole, **training.owners, scaler=scaler)(X)


def test_options_of_jit_that_need_others() -> None:
    training = Training()
    refused(
        "watch=100 is not an amp_ir.Watch(every=..., ops=...)",
        lambda: training.jitted(watch=100),
    )
    refused(
        "pad= is given without buckets=, which says what is padded to which sizes",
        lambda: training.jitted(pad={"x": 0.0}),
    )
    refused(
        'pad_check= is \'both\', expected "proof" or "values"',
        lambda: training.jitted(buckets={"x": {0: [4, 8]}}, pad={"x": 0.0}, pad_check="both"),
    )
    refused(
        "buckets= has the key 1.5, expected an argument's position or name",
        lambda: training.jitted(buckets={1.5: {0: [4, 8]}}, pad={1.5: 0.0}),
    )
    asking = training.jitted(buckets={"x": {0: [4, 8]}}, pad={"x": 0.0})
    refused(
        "buckets= pads 'x', which requires a gradient; pass it detached",
        lambda: asking(X.clone().requires_grad_()),
    )
    training.jitted(watch=amp_ir.Watch(every=100))(X)

    def summed(x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()

    padded = amp_ir.jit(
        summed, model=training.model, optimizer=None, buckets={"x": {0: [4, 8]}}, pad={"x": 0}
    )
    torch.testing.assert_close(padded(X[:3].clone()), X[:3].square().sum())


def test_a_method_names_attributes_that_are_set() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.network = nn.Linear(8, 3)

        @amp_ir.jit(model="model", optimizer=None)
        def predict(self, x: torch.Tensor) -> torch.Tensor:
            return self.network(x).detach()

    trainer = Trainer()
    refused(
        "model='model' names no attribute of this Trainer; set self.model before the first call "
        "of the step, or give another name",
        lambda: trainer.predict(X),
    )
    trainer.model = trainer.network  # type: ignore[attr-defined]
    torch.testing.assert_close(trainer.predict(X), trainer.network(X).detach())


def attention(model: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    rows = F.pad(model(x), (0, 5)).reshape(1, 1, 4, 8)
    return F.scaled_dot_product_attention(rows, **{"key": rows, "value": rows, **options}).sum()


FAILED = "the step failed while it was traced, at {line}: RuntimeError: "
SHAPES = (
    ". Shapes are known while a step is captured: print(x.shape) before this line shows them. They "
    "have to be what PyTorch takes"
)
ATTENTIONS = [
    (
        {"key": torch.zeros(1, 1, 4, 8, dtype=torch.float64)},
        "scaled_dot_product_attention has a query of dtype torch.float32, a key of dtype "
        "torch.float64 and a value of dtype torch.float32; expected one dtype. PyTorch refuses it "
        "too. Leave the batch and the model in float32, for amp_dtype= inserts the casts; or cast "
        "one of them in the step, with x.to(...)",
        {"key": torch.zeros(1, 1, 4, 8)},
    ),
    (
        {"key": torch.zeros(1, 1, 4, 6)},
        "scaled_dot_product_attention has a query of shape (1, 1, 4, 8), a key of shape (1, 1, 4, "
        "6) and a value of shape (1, 1, 4, 8); expected as many features in query and key, and as "
        f"many places in key and value{SHAPES}",
        {"key": torch.zeros(1, 1, 4, 8)},
    ),
    (
        {"attn_mask": torch.zeros(3, 4)},
        "attn_mask of scaled_dot_product_attention has shape (1, 1, 3, 4), expected one that "
        f"broadcasts to (1, 1, 4, 4){SHAPES}",
        {"attn_mask": torch.zeros(4, 4)},
    ),
]


@pytest.mark.parametrize(("wrong", "message", "right"), ATTENTIONS, ids=["dtype", "shape", "mask"])
def test_attention_that_pytorch_refuses_too(wrong: Any, message: str, right: Any) -> None:
    with pytest.raises(RuntimeError):
        Training(lambda model, x: attention(model, x, **wrong)).step(X)
    refused(
        f"{FAILED}{message}",
        lambda: Training(lambda model, x: attention(model, x, **wrong)).jitted()(X),
    )
    ours, eager = (Training(lambda model, x: attention(model, x, **right)) for _ in range(2))
    torch.testing.assert_close(ours.jitted()(X), eager.step(X))


def test_a_gradient_that_a_step_reads_is_there() -> None:
    training = Training()

    def use(x: torch.Tensor) -> torch.Tensor:
        assert training.model.weight.grad is not None
        return training.model(x).detach().sum() + training.model.weight.grad.sum()

    training.model(X).square().mean().backward()
    train = amp_ir.jit(use, model=training.model, optimizer=None)
    train(X)
    training.model.weight.grad = None
    with pytest.raises(AmpIrError) as caught:
        train(X)
    assert "weight.grad" in str(caught.value) or "assert" in str(caught.value)
    training.model(X).square().mean().backward()
    torch.testing.assert_close(train(X), use(X))


def test_what_tools_are_given_did_not_go_through_autocast(tmp_path: Path) -> None:
    mod = Training().traced()
    cast = amp_ir.autocast(mod)
    for tool, call in (
        ("advise", lambda one: amp_ir.advise(one, (X,))),
        ("search_precision", lambda one: amp_ir.search_precision(one, (X,), max_error=0.1)),
    ):
        refused(
            f"the step went through autocast; give {tool} the one before",
            functools.partial(call, cast),
        )
        call(mod)
    refused(
        "max_error=1e-12, but in float32 the gradient error of this step is {line} already; give a "
        "larger budget",
        lambda: amp_ir.search_precision(mod, (X,), max_error=1e-12),
    )


def test_errors_relative_to_something() -> None:
    zeros = Training(lambda model, x: (model(x) * 0).sum())
    refused(
        "in float64 all gradients or results of the step are 0 on this batch, so that no error is "
        "relative to anything; give error_report a batch that trains something",
        lambda: amp_ir.error_report(zeros.step, (X,), **zeros.owners),
    )
    infinite = Training(lambda model, x: model(x).sum() / x.mul(0).sum())
    with pytest.raises(AmpIrError) as caught:
        amp_ir.error_report(infinite.step, (X,), **infinite.owners)
    text = str(caught.value)
    assert text.startswith(
        "in float64 2 of the 2 gradients or results of the step are not finite ("
    )
    assert text.endswith(
        "), so that there is nothing to compare with: a parameter or the batch holds a NaN or an "
        "infinity, or an op makes one in any precision; train.find_overflow(*batch) says which, "
        "after train(*batch)"
    )
    train = infinite.jitted()
    train(X)
    assert "divide" in str(train.find_overflow(X))


def test_a_file_of_ones_own_has_its_own_shapes(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "train.py"
    file.write_text("")
    assert main(["verify", str(file), "--small"]) == 2
    assert "--small is for workloads; a file of yours has its own shapes" in capsys.readouterr().err
