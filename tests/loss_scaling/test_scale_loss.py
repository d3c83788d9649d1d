# SPDX-License-Identifier: Apache-2.0
"""`with scale_loss(...)`, and the other loops of the seed systems, captured as written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError, OptionError
from amp_ir.loss_scaling.scale_loss import scalers_of

INF = float("inf")


@attrs.define(eq=False)
class Setting:
    """A model with two heads, its optimizer, scalers, and a step over both losses."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scalers: list[amp_ir.GradScaler]

    @classmethod
    def make(cls, count: int = 1) -> Setting:
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"body": nn.Linear(5, 8), "one": nn.Linear(8, 2), "two": nn.Linear(8, 2)}
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scalers = [
            amp_ir.GradScaler("cpu", init_scale=2.0 ** (8 + k), growth_interval=3)
            for k in range(count)
        ]
        return cls(model, optimizer, scalers)

    def losses(self, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        body = torch.tanh(self.model["body"](x))
        first = self.model["one"](body).square().mean()
        return [first, (self.model["two"](body).square() * weight).mean()]

    def plain_step(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        torch.stack(self.losses(x, weight)).sum().backward()
        self.optimizer.step()

    def one_scaler(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        for loss in self.losses(x, weight):
            with amp_ir.scale_loss(loss, self.optimizer, scaler=self.scalers[0]) as scaled:
                scaled.backward(retain_graph=True)
        self.optimizer.step()

    def a_scaler_per_loss(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        for k, loss in enumerate(self.losses(x, weight)):
            with amp_ir.scale_loss(
                loss, self.optimizer, loss_id=k, scaler=self.scalers[k]
            ) as scaled:
                scaled.backward(retain_graph=True)
        self.optimizer.step()

    def delayed(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        first, second = self.losses(x, weight)
        scaler = self.scalers[0]
        with amp_ir.scale_loss(first, self.optimizer, scaler=scaler, delay_unscale=True) as scaled:
            scaled.backward(retain_graph=True)
        with amp_ir.scale_loss(second, self.optimizer, scaler=scaler) as scaled:
            scaled.backward()
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]

    def compiled(self, step: Callable[..., Any]) -> Any:
        return amp_ir.jit(step, model=self.model, optimizer=self.optimizer, scaler=self.scalers)


def batches(count: int, bad: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(4, 5), torch.tensor(INF if k in bad else 1.0 + k)) for k in range(count)]


STEPS = {"one_scaler": 1, "a_scaler_per_loss": 2, "delayed": 1}


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", STEPS)
def test_the_loop_trains_as_without_scaling_and_skips_overflows(name: str, is_compiled: bool):
    setting, plain = Setting.make(STEPS[name]), Setting.make()
    step = getattr(setting, name)
    train = setting.compiled(step) if is_compiled else step
    for number, (x, weight) in enumerate(batches(6, bad=(2,))):
        before = setting.weights()
        train(x, weight)
        if number == 2:
            assert all(map(torch.equal, before, setting.weights()))
        else:
            plain.plain_step(x, weight)
            for got, expected in zip(setting.weights(), plain.weights(), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    # The second loss overflows in the third step, and three clean steps make a scale grow.
    scales = [one.get_scale() for one in setting.scalers]
    assert scales == ([1024.0, 512.0] if name == "a_scaler_per_loss" else [256.0])
    assert "step" not in vars(setting.optimizer)


def test_in_plain_pytorch_an_optimizer_has_a_scaler_of_its_own():
    setting = Setting.make()

    def step(x: torch.Tensor, weight: torch.Tensor) -> None:
        setting.optimizer.zero_grad()
        loss = torch.stack(setting.losses(x, weight)).sum()
        with amp_ir.scale_loss(loss, setting.optimizer) as scaled:
            scaled.backward()
        setting.optimizer.step()

    (good, bad, again) = batches(3, bad=(1,))
    step(*good)
    step(*bad)
    train = amp_ir.jit(step, model=setting.model, optimizer=setting.optimizer)
    train(*again)
    log = train.compiled.logs[0]
    assert (log.steps, log.skips) == (3, 1)
    assert train.compiled.last.scale == 2.0**15


def test_a_captured_step_needs_a_scaler_for_each_loss_id():
    setting = Setting.make()

    def step(x: torch.Tensor, weight: torch.Tensor) -> None:
        for k, loss in enumerate(setting.losses(x, weight)):
            with amp_ir.scale_loss(loss, setting.optimizer, loss_id=k) as scaled:
                scaled.backward(retain_graph=True)

    with pytest.raises(OptionError) as caught:
        setting.compiled(step)(*batches(1, bad=())[0])
    assert str(caught.value) == (
        "scale_loss with loss_id=1 is in a captured step, to which 1 were passed; pass "
        "scaler=amp_ir.GradScaler(), or a list of one scaler for each loss_id"
    )


def test_a_step_without_optimizer_step_is_refused():
    setting = Setting.make()

    def step(x: torch.Tensor, weight: torch.Tensor) -> None:
        with amp_ir.scale_loss(setting.losses(x, weight)[0], setting.optimizer) as scaled:
            scaled.backward()

    with pytest.raises(CaptureError, match="ends before scaler.step and scaler.update"):
        setting.compiled(step)(*batches(1, bad=())[0])


def test_a_gradient_penalty_as_in_pytorchs_note():
    """Scaled outputs of autograd.grad, unscaled by get_scale, in a loss that is scaled itself."""

    def penalised(setting: Setting, scaler: torch.amp.GradScaler) -> Callable[..., torch.Tensor]:
        def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            setting.optimizer.zero_grad()
            loss = torch.stack(setting.losses(x, weight)).sum()
            parameters = list(setting.model.parameters())
            scaled = torch.autograd.grad(
                outputs=scaler.scale(loss), inputs=parameters, create_graph=True
            )
            inverse = 1.0 / scaler.get_scale()
            gradients = [one * inverse for one in scaled]
            norm = sum(one.pow(2).sum() for one in gradients).sqrt()
            loss = loss + 0.1 * norm
            scaler.scale(loss).backward()
            scaler.step(setting.optimizer)
            scaler.update()
            return loss.detach()

        return step

    ours, theirs = Setting.make(), Setting.make()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    train = ours.compiled(penalised(ours, ours.scalers[0]))
    reference = penalised(theirs, scaler)
    for x, weight in batches(8, bad=(1, 5)):
        got, expected = train(x, weight), reference(x, weight)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert ours.scalers[0].get_scale() == scaler.get_scale()
        for one, other in zip(ours.weights(), theirs.weights(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("losses", [1, 2])
def test_a_compiled_step_makes_the_scalers_that_no_one_named(losses: int):
    """As eager PyTorch does: one for each loss of each optimizer, the same before and after."""
    ours, theirs = Setting.make(), Setting.make()

    def step_of(setting: Setting) -> Callable[..., None]:
        def step(x: torch.Tensor, weight: torch.Tensor) -> None:
            setting.optimizer.zero_grad()
            for k, loss in enumerate(setting.losses(x, weight)):
                number = k if losses == 2 else 0
                with amp_ir.scale_loss(loss, setting.optimizer, loss_id=number) as scaled:
                    scaled.backward(retain_graph=True)
            setting.optimizer.step()

        return step

    step = step_of(ours)
    train = amp_ir.jit(step, model=ours.model, optimizer=ours.optimizer)
    reference = step_of(theirs)
    for x, weight in batches(4, bad=(0, 2)):
        train(x, weight)
        reference(x, weight)
        for one, other in zip(ours.weights(), theirs.weights(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert "step" not in vars(ours.optimizer)
    scales = [one.get_scale() for one in scalers_of([ours.optimizer])]
    assert scales == [one.get_scale() for one in scalers_of([theirs.optimizer])]
    # The second loss overflows twice.
    assert scales == ([2.0**14] if losses == 1 else [2.0**16, 2.0**14])
    step(*batches(1, bad=())[0])  # eager goes on with the same scalers


def test_each_of_two_optimizers_gets_a_scaler_of_its_own():
    model = nn.ModuleDict({"one": nn.Linear(3, 2), "two": nn.Linear(3, 2)})
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in model.items()}

    def step(x: torch.Tensor, weight: torch.Tensor) -> None:
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            loss = model[name](x).square().mean() * (weight if name == "two" else 1.0)
            with amp_ir.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()

    train = amp_ir.jit(step, model=model, optimizer=list(optimizers.values()))
    before = [one.detach().clone() for one in model.parameters()]
    train(torch.randn(4, 3), torch.tensor(INF))
    same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert same == [False, False, True, True]
    scales = [one.get_scale() for one in scalers_of(list(optimizers.values()))]
    assert scales == [2.0**16, 2.0**15]
