# SPDX-License-Identifier: Apache-2.0
"""Tensors that the user puts in place for each call: inputs from the second program on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir

BATCH: Any = None
TENSORS: dict[str, Any] = {}


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: torch.Tensor
    name: str = "train"


class Trainer:
    """A step without arguments that `read` gives its batch."""

    def __init__(self, read: Callable[[Any], torch.Tensor]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.weights = torch.tensor([1.0, 2.0, 3.0])
        self.read = read
        self.x: Any = None
        self.inputs: list[Any] = [None, None]
        self.holder: dict[str, Any] = {}

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = (self.model(self.read(self)) * self.weights).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def compiled(self) -> Any:
        return amp_ir.jit(self.step, model=self.model, optimizer=self.optimizer, amp_dtype=None)


def of_attribute(trainer: Any) -> Any:
    return trainer.x


def of_global(trainer: Any) -> Any:
    return BATCH


def of_entry(trainer: Any) -> Any:
    return TENSORS["x"]


def of_item(trainer: Any) -> Any:
    return trainer.inputs[0] + trainer.inputs[1]


def of_dictionary(trainer: Any) -> Any:
    return trainer.holder["x"] * trainer.holder["scale"]


def of_object(trainer: Any) -> Any:
    return trainer.x.x * trainer.x.scale


def of_tuple(trainer: Any) -> Any:
    first, (second, _) = trainer.x
    return first * second


def put(trainer: Trainer, k: int, rows: int) -> None:
    """Put the tensors of a call where the step reads them."""
    global BATCH
    generator = torch.Generator().manual_seed(k)
    x, scale = (torch.randn(rows, 4, generator=generator) for _ in range(2))
    BATCH = TENSORS["x"] = x
    trainer.inputs[:] = [x, scale]
    trainer.holder = {"x": x, "scale": scale}
    trainer.x = {of_object: Batch(x, scale), of_tuple: (x, (scale, "text"))}.get(trainer.read, x)


READS: dict[Any, int] = {
    of_attribute: 1, of_global: 1, of_entry: 1, of_item: 1, of_dictionary: 1, of_object: 1,
    of_tuple: 1,
}  # fmt: skip
"""What reads, and how many programs there are more than one for each shape."""


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_another_tensor_for_each_call_is_compiled_once_more(read: Any) -> None:
    ours, eager = Trainer(read), Trainer(read)
    train = ours.compiled()
    for k, rows in enumerate((6, 6, 6, 5, 5, 6, 5, 6)):
        put(eager, k, rows)
        expected = eager.step()
        put(ours, k, rows)
        # Rounding of float32 sums in another order.
        torch.testing.assert_close(train(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.model.state_dict(), eager.model.state_dict())
    assert len(train._variants.in_order) == 2 + READS[read], train.recompiles


def of_two(trainer: Any) -> Any:
    return trainer.x * trainer.holder["x"]


def test_two_places_that_hold_one_tensor_may_hold_two() -> None:
    ours, eager = Trainer(of_two), Trainer(of_two)
    train = ours.compiled()
    for k in range(7):
        for trainer in (eager, ours):
            put(trainer, k, 6)
            if k >= 3:
                trainer.holder = {"x": torch.full((6, 4), float(k))}
        torch.testing.assert_close(train(), eager.step(), rtol=1e-5, atol=1e-7)
    assert len(train.recompiles) <= 3


def of_fixed_twin(trainer: Any) -> Any:
    return trainer.x * trainer.inputs[0]


def test_a_tensor_that_stays_elsewhere_stays_there() -> None:
    """Both hold one tensor at first; one of them stays, which a program must not read as two."""
    ours, eager = Trainer(of_fixed_twin), Trainer(of_fixed_twin)
    train = ours.compiled()
    first = torch.ones(6, 4)
    for trainer in (eager, ours):
        trainer.inputs[0] = trainer.x = first
    for k in range(5):
        for trainer in (eager, ours):
            trainer.x = first if k in (0, 3) else torch.full((6, 4), float(k))
        torch.testing.assert_close(train(), eager.step(), rtol=1e-5, atol=1e-7)


def of_value(trainer: Any) -> Any:
    return trainer.x * (2 if trainer.x.sum().item() > 0 else 1)


def test_a_tensor_whose_value_decides_stays_a_guard() -> None:
    ours, eager = Trainer(of_value), Trainer(of_value)
    train = ours.compiled()
    for k in range(5):
        for trainer in (eager, ours):
            trainer.x = torch.full((6, 4), float(k - 2))
        torch.testing.assert_close(train(), eager.step(), rtol=1e-5, atol=1e-7)


def test_a_parameter_in_the_place_of_a_tensor_is_seen() -> None:
    ours, eager = Trainer(of_attribute), Trainer(of_attribute)
    train = ours.compiled()
    for k in range(5):
        for trainer in (eager, ours):
            trainer.x = torch.ones(3, 4) if k < 3 else trainer.model.weight
        torch.testing.assert_close(train(), eager.step(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.model.state_dict(), eager.model.state_dict())


def test_a_transposed_tensor_is_seen() -> None:
    ours, eager = Trainer(of_attribute), Trainer(of_attribute)
    train = ours.compiled()
    values = torch.arange(24.0) / 24
    batches = [values.view(6, 4), values.view(6, 4) + 1, values.view(4, 6).t(), values.view(6, 4)]
    for x in batches * 2:
        ours.x = eager.x = x
        torch.testing.assert_close(train(), eager.step(), rtol=1e-5, atol=1e-7)


def test_one_step_reads_what_another_has_kept() -> None:
    results = []
    for is_compiled in (False, True):
        ours = Trainer(of_attribute)
        other = nn.Linear(4, 4)
        of_other = torch.optim.SGD(other.parameters(), lr=0.1)

        def generate(
            x: torch.Tensor, ours: Any = ours, other: Any = other, o: Any = of_other
        ) -> Any:
            ours.x = other(x)
            ours.x.square().mean().backward()
            o.step()
            o.zero_grad()
            ours.x = ours.x.detach()

        first: Any = generate
        second: Any = ours.step
        if is_compiled:
            first = amp_ir.jit(generate, model=other, optimizer=of_other, amp_dtype=None)
            second = ours.compiled()
        for k in range(5):
            first(torch.full((6, 4), float(k)))
            second()
        assert not is_compiled or len(second.recompiles) == 1
        results.append({**ours.model.state_dict(), "x": ours.x})
    torch.testing.assert_close(*results)


BOX: dict[str, Any] = {}


def test_a_view_of_a_parameter_in_the_place_is_seen() -> None:
    """PyTorch reads it after the update, where a compiled step has read it before."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    BOX["mean"] = torch.ones(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        total: torch.Tensor = loss.detach() + BOX["mean"].sum()
        BOX["mean"] = x.mean(0)
        return total

    train = amp_ir.jit(step, model=net, optimizer=optimizer, amp_dtype=None)
    for _ in range(3):
        train(torch.ones(4, 4))
    BOX["mean"] = net.bias.detach()
    with pytest.raises(amp_ir.errors.CaptureError, match="which the next call reads"):
        train(torch.ones(4, 4))
