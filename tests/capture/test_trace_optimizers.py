# SPDX-License-Identifier: Apache-2.0
"""Captured optimizer steps follow PyTorch's, also when hyper-parameters change between calls."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch.optim import ASGD, SGD, Adafactor, Adam, AdamW, RAdam

import amp_ir
from amp_ir.ir.step_module import Role
from captured_runner import CapturedRunner
from optimizer_cases import CASES, batch, change_hyper_parameters, name, training
from step_comparison import Training, assert_trains_alike


@pytest.mark.parametrize(("kind", "options"), CASES, ids=name)
def test_steps_equal_eager_steps_while_hyper_parameters_change(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    captures = assert_trains_alike(
        lambda: training(kind, options), batch, steps=4, between=change_hyper_parameters
    )
    assert captures == 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [(RAdam, {"lr": 0.1}), (ASGD, {"lr": 0.1, "t0": 3}), (Adafactor, {"lr": 0.1})],
    ids=name,
)
def test_a_loop_that_turns_after_some_steps_is_captured_once(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """RAdam rectifies from the sixth step on, ASGD averages from the fourth on."""
    assert assert_trains_alike(lambda: training(kind, options), batch, steps=12) == 1


def test_muon_is_captured_once() -> None:
    def build() -> Training:
        # Muon takes matrices only.
        model = torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.Linear(8, 3, False))
        optimizer = torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return Training(model, optimizer, step)

    torch.manual_seed(0)
    ours = build()
    eager = build()
    eager.model.load_state_dict(ours.model.state_dict())
    captured = ours.capture(batch(0))
    runner = CapturedRunner(captured)
    for index in range(4):
        runner(*batch(index))
        eager.step(*batch(index))
        assert not captured.hooks.recompile_reason()
        change_hyper_parameters(ours)
        change_hyper_parameters(eager)
    for one, other in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
        # Five iterations in bfloat16 make each update, of size lr: a rounding that falls the other
        # way is 2^-8 of it, and they enlarge it by up to 3.4 each where singular values are small.
        torch.testing.assert_close(one, other, rtol=0, atol=4 * 0.02 * 2**-5)


def test_the_first_step_with_dampened_momentum_is_captured_apart() -> None:
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}
    assert assert_trains_alike(lambda: training(SGD, options), batch) == 2


def test_a_learning_rate_of_zero_is_an_input_too() -> None:
    def warm_up(trained: Training) -> None:
        trained.optimizer.param_groups[0]["lr"] += 0.05

    assert assert_trains_alike(lambda: training(AdamW, {"lr": 0.0}), batch, between=warm_up) == 1


def test_a_weight_decay_that_becomes_zero_is_captured_again() -> None:
    def stop_decay(trained: Training) -> None:
        trained.optimizer.param_groups[0]["weight_decay"] = 0.0

    build = lambda: training(SGD, {"lr": 0.1, "weight_decay": 0.5})  # noqa: E731
    assert assert_trains_alike(build, batch, between=stop_decay) == 2


def test_a_flag_that_changes_is_captured_again() -> None:
    def turn(trained: Training) -> None:
        group = trained.optimizer.param_groups[0]
        group["maximize"] = not group["maximize"]

    assert assert_trains_alike(lambda: training(Adam, {}), batch, between=turn) == 3


def test_a_scheduler_that_steps_between_steps_is_followed_without_a_warning() -> None:
    schedulers: dict[int, torch.optim.lr_scheduler.LRScheduler] = {}

    def build() -> Training:
        trained = training(SGD, {"lr": 0.1, "momentum": 0.9})
        scheduler = torch.optim.lr_scheduler.OneCycleLR(trained.optimizer, 0.5, total_steps=5)
        schedulers[id(trained)] = scheduler
        return trained

    captures = assert_trains_alike(build, batch, between=lambda t: schedulers[id(t)].step())
    assert captures == 1


def test_a_state_that_exists_is_continued_and_a_loaded_one_captured_again() -> None:
    def build() -> Training:
        trained = training(Adam, {"lr": 0.01})
        trained.step(*batch(7))
        return trained

    def reload(trained: Training) -> None:
        trained.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))

    assert assert_trains_alike(build, batch) == 1
    assert assert_trains_alike(build, batch, between=reload) == 3


def test_hyper_parameters_are_float64_inputs_read_at_every_call() -> None:
    trained = training(AdamW, {"lr": 0.01})
    captured = trained.capture(batch(0))
    readers = {
        entry.name: entry.tensor_or_reader
        for entry in captured.inputs
        if entry.role is Role.HYPER_PARAMETER
    }
    assert list(readers) == [
        "optimizer0.group0.lr",
        "optimizer0.group0.betas.0",
        "optimizer0.group0.betas.1",
        "optimizer0.group0.eps",
        "optimizer0.group0.weight_decay",
    ]
    trained.optimizer.param_groups[0]["lr"] = 0.25
    value = readers["optimizer0.group0.lr"]()
    assert value.dtype is torch.float64 and value.shape == () and value.item() == 0.25


def test_bias_correction_is_computed_in_float64() -> None:
    graph = training(Adam, {}).capture(batch(0)).graph.graph
    powers = [node for node in graph.nodes if "aten.pow" in str(node.target)]
    assert powers and all(node.meta["val"].dtype is torch.float64 for node in powers)


def test_new_state_is_installed_only_when_asked_for() -> None:
    trained = training(Adam, {})
    captured = trained.capture(batch(0))
    assert not trained.optimizer.state
    captured.hooks.install_state()
    captured.hooks.install_state()
    assert not captured.hooks.recompile_reason()
    weight = trained.model[0].weight
    assert list(trained.optimizer.state[weight]) == ["step", "exp_avg", "exp_avg_sq"]
    CapturedRunner(captured)(*batch(0))
    assert trained.optimizer.state[weight]["step"].item() == 1.0


def test_groups_have_their_own_hyper_parameters() -> None:
    def build() -> Training:
        trained = training(SGD, {"lr": 0.1})
        trained.optimizer.param_groups.clear()
        trained.optimizer.add_param_group({"params": trained.model[0].parameters(), "lr": 0.3})
        last = {"params": trained.model[2].parameters(), "momentum": 0.5, "weight_decay": 0.1}
        trained.optimizer.add_param_group(last)
        return trained

    assert assert_trains_alike(build, batch, between=change_hyper_parameters) == 1


@pytest.mark.parametrize("passed", ["none", "another"])
def test_an_optimizer_that_was_not_passed_is_refused_and_stays_as_it_was(passed):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1) if passed == "another" else None

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x, before = torch.randn(3, 4), model.weight.detach().clone()
    with pytest.raises(amp_ir.errors.CaptureError) as caught:
        amp_ir.jit(step, model=model, optimizer=other)(x)
    line = inspect.getsourcelines(step)[1] + 3
    assert str(caught.value) == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward), {__file__}:{line}: AdamW.step of an optimizer that was not passed "
        "is called. Pass it in optimizer=, or a list of all that the step calls. One that the step "
        "makes has no state to pass: write its update, p - lr * g, with torch.autograd.grad and "
        "torch.func.functional_call"
    )
    assert not optimizer.state and torch.equal(model.weight, before)
    assert "hooked" in vars(torch.optim.AdamW.step)
    assert amp_ir.jit(step, model=model, optimizer=optimizer)(x).isfinite()


def test_the_updates_of_an_optimizer_that_the_step_makes_are_written_out():
    """Reptile: the refusal's advice, beside PyTorch with the optimizer that is refused."""

    def loss_of(model: torch.nn.Module, p: dict[str, torch.Tensor], x: torch.Tensor):
        return torch.func.functional_call(model, p, (x,)).square().mean()

    def step_of(model: torch.nn.Module, *, with_optimizer: bool):
        def step(x: torch.Tensor) -> None:
            if with_optimizer:
                inner = copy.deepcopy(model)
                optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
                for _ in range(2):
                    optimizer.zero_grad()
                    inner(x).square().mean().backward()
                    optimizer.step()
                p = dict(inner.named_parameters())
            else:
                p = {k: v.detach().requires_grad_() for k, v in model.named_parameters()}
                for _ in range(2):
                    gradients = torch.autograd.grad(loss_of(model, p, x), list(p.values()))
                    updated = [v - 0.1 * g for v, g in zip(p.values(), gradients, strict=True)]
                    p = {k: v.detach().requires_grad_() for k, v in zip(p, updated, strict=True)}
            with torch.no_grad():
                for k, v in model.named_parameters():
                    v.add_(0.5 * (p[k] - v))

        return step

    ours = torch.nn.Linear(4, 2)
    eager = copy.deepcopy(ours)
    train = amp_ir.jit(step_of(ours, with_optimizer=False), model=ours)
    for _ in range(3):
        x = torch.randn(3, 4)
        train(x)
        step_of(eager, with_optimizer=True)(x)
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())
