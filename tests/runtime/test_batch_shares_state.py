# SPDX-License-Identifier: Apache-2.0
"""A batch may not share memory with state that the step writes: what it reads would be stale."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import ArgumentError
from step_comparison import normal


class Queue(nn.Module):
    """A linear layer that adds to a buffer in its forward pass, and has a table that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        self.queue.add_(hidden.detach().mean(0))
        return hidden * self.table


def made() -> tuple[Queue, Callable[..., torch.Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Queue()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - other.sum()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step, optimizer


SHARED: dict[str, tuple[Callable[[Queue], torch.Tensor], str]] = {
    "the_buffer": (lambda model: model.queue, "buffer queue"),
    "a_slice": (lambda model: model.queue[1:3], "buffer queue"),
    "through_numpy": (lambda model: torch.from_numpy(model.queue.numpy()), "buffer queue"),
    "a_detached_parameter": (
        lambda model: model.linear.bias.detach(), "parameter linear.bias",
    ),
    "a_column": (lambda model: model.linear.weight.detach()[:, 2], "parameter linear.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_written_state_in_the_batch_is_refused(name: str) -> None:
    share, owner = SHARED[name]
    model, step, optimizer = made()
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ArgumentError) as caught:
        train(normal(0, 5, 6), share(model))
    text = str(caught.value)
    assert text.startswith(f"tensor 1 of the batch (counted from 0) shares memory with {owner},")
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    # As the message says: a copy is what it was before the step.
    eager_model, eager, _ = made()
    x = normal(0, 5, 6)
    torch.testing.assert_close(train(x, share(model).clone()), eager(x, share(eager_model).clone()))


def test_a_later_call_and_moved_state_are_checked() -> None:
    model, step, optimizer = made()
    mod, args = amp_ir.trace_step(
        step, (normal(0, 5, 6), torch.zeros(4)), model=model, optimizer=optimizer
    )
    train = amp_ir.compile(mod)
    x = normal(0, 5, 6)
    train(x, torch.zeros(4))
    with pytest.raises(ArgumentError, match="shares memory with buffer queue"):
        train(x, model.queue)
    old = model.queue.data
    model.queue.data = old.clone()
    train(x, old)
    with pytest.raises(ArgumentError, match="shares memory with buffer queue"):
        train(x, model.queue)


def test_state_that_is_only_read_may_be_in_the_batch() -> None:
    model, step, optimizer = made()
    eager_model, eager, _ = made()
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for k in range(3):
        x = normal(k, 5, 6)
        torch.testing.assert_close(train(x, model.table), eager(x, eager_model.table))


def test_other_bytes_of_the_same_memory_are_no_part_of_the_state() -> None:
    model, step, optimizer = made()
    memory = torch.zeros(64)
    model.queue.data = memory[:4]
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    assert bool(train(normal(0, 5, 6), memory[32:36]).isfinite())
    with pytest.raises(ArgumentError, match="shares memory with buffer queue"):
        train(normal(0, 5, 6), memory[3:7])
