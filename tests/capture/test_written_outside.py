# SPDX-License-Identifier: Apache-2.0
"""Tensors outside of the models that a step updates in place are state of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError, CheckFailedError

TIGHT: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}  # float32 sums of few terms, over five steps
Kept = dict[str, torch.Tensor]


def by_add(kept: Kept, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        kept[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)


def by_copy(kept: Kept, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        kept[name].copy_(0.9 * kept[name] + 0.1 * parameter.data)


def by_data(kept: Kept, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        kept[name].data.lerp_(parameter.data, 0.1)


def by_operator(kept: Kept, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        kept[name] -= 0.1 * (kept[name] - parameter.data)


def by_view(kept: Kept, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        kept[name].view(-1)[1:].lerp_(parameter.view(-1)[1:], 0.1)


def by_lists(kept: Kept, model: nn.Module) -> None:
    torch._foreach_mul_(list(kept.values()), 0.9)
    torch._foreach_add_(list(kept.values()), list(model.parameters()), alpha=0.1)


UPDATES = [by_add, by_copy, by_data, by_operator, by_view, by_lists]


def batch(k: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(k))


class Run:
    """A model that trains, and tensors of a dict that its step updates."""

    def __init__(self, update: Callable[[Kept, nn.Module], Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.kept = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.update = update

    def step(self, x: torch.Tensor) -> Any:
        loss = (self.model(x) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            found = self.update(self.kept, self.model)
        return loss.detach() if found is None else found

    def jitted(self) -> Any:
        return amp_ir.jit(self.step, model=self.model, optimizer=self.optimizer)


@pytest.mark.parametrize("update", UPDATES, ids=lambda one: one.__name__)
def test_averages_in_a_dict_are_updated(update: Callable[[Kept, nn.Module], None]) -> None:
    ours, eager = Run(update), Run(update)
    held = dict(ours.kept)
    train = ours.jitted()
    for k in range(5):
        torch.testing.assert_close(train(batch(k)), eager.step(batch(k)), **TIGHT)
        torch.testing.assert_close(ours.kept, eager.kept, **TIGHT)
    assert all(ours.kept[name] is one for name, one in held.items())
    assert not train.recompiles
    assert any("2 tensors outside of the model are updated at every call" in n for n in train.notes)


def test_another_tensor_in_the_dict_is_updated_instead() -> None:
    ours, eager = Run(by_add), Run(by_add)
    train = ours.jitted()
    for k in range(4):
        if k == 2:
            first = ours.kept["weight"]
            for run in (ours, eager):
                run.kept["weight"] = torch.zeros(3, 4)
            as_left = first.clone()
        train(batch(k, rows=6 + k % 2))
        eager.step(batch(k, rows=6 + k % 2))
        torch.testing.assert_close(ours.kept, eager.kept, **TIGHT)
    assert torch.equal(first, as_left)


class Averaging(nn.Module):
    """A module whose average is a plain attribute, which `+=` stores again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average = nn.Linear(4, 3), torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.layer(x)
        self.average += h.detach().mean(0)
        return h + self.average


def test_another_tensor_in_an_attribute_is_updated_instead() -> None:
    averages = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Averaging()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        train = amp_ir.jit(step, model=model, optimizer=optimizer) if is_compiled else step
        for k in range(4):
            if k == 2:
                model.average = torch.full((3,), 5.0)
            train(batch(k))
        averages.append(model.average)
    torch.testing.assert_close(*averages, **TIGHT)


def test_what_was_written_is_read_in_the_step() -> None:
    def counted(kept: Kept, model: nn.Module) -> Any:
        kept["count"] += 1
        kept["total"].add_(model.bias.detach().sum())
        mean = kept["total"] / kept["count"]
        return 2 * mean if kept["count"] % 2 == 0 else mean, kept["count"].item()

    runs = [Run(counted), Run(counted)]
    for run in runs:
        run.kept.update(count=torch.zeros((), dtype=torch.long), total=torch.zeros(()))
    train = runs[0].jitted()
    for k in range(5):
        torch.testing.assert_close(train(batch(k)), runs[1].step(batch(k)), **TIGHT)
    assert len(train.recompiles) == 1


def test_statistics_of_a_teacher_that_was_not_passed_are_updated() -> None:
    results = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).requires_grad_(
            requires_grad=False
        )
        run = Run(lambda _kept, _model: None)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (run.model(x) - teacher(x)).square().mean()  # noqa: B023
            loss.backward()
            run.optimizer.step()  # noqa: B023
            run.optimizer.zero_grad()  # noqa: B023
            return loss.detach()

        train = amp_ir.jit(step, model=run.model, optimizer=run.optimizer) if is_compiled else step
        results.append([[train(batch(k)) for k in range(4)], teacher.state_dict()])
    torch.testing.assert_close(results[1], results[0], **TIGHT)


def test_a_call_that_is_rolled_back_leaves_them() -> None:
    run = Run(by_add)

    def checked(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = run.step(x)
        if not torch.isfinite(loss):
            raise ValueError("not finite")
        return loss

    train = amp_ir.jit(checked, model=run.model, optimizer=run.optimizer)
    train(batch(0))
    before = {name: one.clone() for name, one in run.kept.items()}
    with pytest.raises(CheckFailedError):
        train(batch(1) / 0)
    assert all(torch.equal(run.kept[name], one) for name, one in before.items())


def test_two_steps_update_the_same_tensors() -> None:
    ours, eager = Run(by_add), Run(by_add)
    trains = [ours.jitted(), ours.jitted()]
    for k in range(4):
        trains[k % 2](batch(k))
        eager.step(batch(k))
    torch.testing.assert_close(ours.kept, eager.kept, **TIGHT)


def test_a_check_of_the_numbers_leaves_them() -> None:
    run = Run(by_add)
    train = run.jitted()
    train(batch(0))
    before = {name: one.clone() for name, one in run.kept.items()}
    amp_ir.verify(run.step, (batch(1),), model=run.model, optimizer=run.optimizer)
    train.find_overflow(batch(1))
    assert all(torch.equal(run.kept[name], one) for name, one in before.items())


REFUSED = (
    "aten.add_.Tensor writes to a tensor outside of the model and the optimizer. Pass its module "
    "in model=[...], register it as a buffer of the model, pass its optimizer in optimizer=, or "
    "update it after the step. A tensor of a dict, a list or a closure is followed where it needs "
    "no gradient, is contiguous and no part of another one"
)


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize(
    "one",
    [torch.zeros(3, 2).t(), torch.zeros(1, 2).expand(3, 2), torch.zeros(9)[1:]],
    ids=["transposed", "expanded", "unaligned"],
)
def test_what_is_laid_out_otherwise_is_refused(one: torch.Tensor, is_view: bool) -> None:  # noqa: FBT001
    """A write to a view of it was lost."""

    def written(kept: Kept, _model: nn.Module) -> None:
        (kept["one"][:] if is_view else kept["one"]).add_(1)

    run = Run(written)
    run.kept["one"] = one
    with pytest.raises(CaptureError) as refused:
        run.jitted()(batch(0))
    assert str(refused.value).endswith(REFUSED)
    assert not one.any()


def test_parts_of_one_memory_are_refused() -> None:
    """A write to one was not seen in the other."""
    run = Run(lambda kept, _model: kept["whole"].add_(1).sum() + kept["part"].sum())
    run.kept["whole"] = torch.zeros(6)
    run.kept["part"] = run.kept["whole"][4:]
    with pytest.raises(CaptureError, match=r"uses a view of shape \(2,\) of entry 'whole' of "):
        run.jitted()(batch(0))
    run = Run(lambda kept, _model: kept["whole"].add_(1).sum() + kept["part"].mul_(2).sum())
    run.kept["whole"] = torch.zeros(6)
    run.kept["part"] = run.kept["whole"][4:]
    with pytest.raises(CaptureError, match="is followed where it needs no gradient"):
        run.jitted()(batch(0))
    run = Run(lambda kept, model: kept["part"].mul_(2).sum() + model.weight.sum())
    run.kept["part"] = run.model.weight.detach()[:1]
    with pytest.raises(CaptureError, match="is followed where it needs no gradient"):
        run.jitted()(batch(0))
