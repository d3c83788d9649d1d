# SPDX-License-Identifier: Apache-2.0
"""What a step reads in Python of small tensors of its state is a guard on what it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError, StateError

Forward = Callable[["Layer", torch.Tensor], torch.Tensor]
TIGHT: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}  # float32 sums of few terms, over seven steps


class Layer(nn.Module):
    """A layer with the buffers that published ones branch on, and a test's forward."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.shift = nn.Parameter(torch.zeros(4))
        self.register_buffer("inited", torch.tensor(False))
        self.register_buffer("number", torch.tensor(0, dtype=torch.uint8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.tensor([[0.5, 2.0], [3.0, 4.0]]))
        self.inside = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(self, self.linear(x))


def act_norm(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    if layer.number.item() == 0:
        with torch.no_grad():
            layer.shift.data.copy_(-x.mean(0))
        layer.number.fill_(1)
    return x + layer.shift


def vq_vae(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    if not layer.inited:
        layer.table.data.copy_(x.detach()[:2, :2])
        layer.inited.data.copy_(torch.tensor(True))
    return x + layer.table.sum()


def flag_by_int(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    if int(layer.number) == 0:
        layer.number.fill_(1)
        return 2 * x
    return x


def every_third(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer.steps += 1
    return 2 * x if layer.steps % 3 == 0 else x


def every_third_by_view(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    view = layer.steps.view(1)
    view += 1
    return 2 * x if layer.steps.item() % 3 == 0 else x


def late(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer.steps += 1
    return 2 * x if layer.steps.item() // 2 > 1 else x


def warm_up(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer.steps.add_(1)
    return x * min(1.0, layer.steps.item() / 4)


def replaced(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer.steps = layer.steps + 1
    return 2 * x if layer.steps > 3 else x


def of_batch_norm(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer.norm(x)
    return 2 * y if layer.norm.num_batches_tracked < 3 else y


def listed(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    low, high = layer.table[0].tolist()
    return low * x + high * float(layer.table[1].numpy().sum())


def large_weights(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    if layer.linear.weight.norm() > 1:
        with torch.no_grad():
            layer.linear.weight.mul_(0.5)
    return x


# The forward, and how often it may compile again in seven steps.
FOLLOWED: dict[Forward, int] = {
    act_norm: 1, vq_vae: 1, flag_by_int: 1, every_third: 1, every_third_by_view: 1, late: 1,
    warm_up: 1, replaced: 1, of_batch_norm: 1, listed: 0, large_weights: 1,
}  # fmt: skip


def made(forward: Forward) -> tuple[Any, Layer, torch.optim.Optimizer]:
    torch.manual_seed(1)
    layer = Layer(forward)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (layer(x) - x.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, layer, optimizer


def jitted(forward: Forward) -> tuple[Any, Layer]:
    step, layer, optimizer = made(forward)
    return amp_ir.jit(step, model=layer, optimizer=optimizer), layer


def batch(k: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(k))


@pytest.mark.parametrize("forward", FOLLOWED, ids=lambda one: one.__name__)
def test_a_branch_on_the_state_goes_as_in_pytorch(forward: Forward) -> None:
    eager, twin, _ = made(forward)
    train, layer = jitted(forward)
    for k in range(7):
        torch.testing.assert_close(train(batch(k)), eager(batch(k)), **TIGHT)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], value, **TIGHT)
    assert len(train.recompiles) <= FOLLOWED[forward]


def test_what_is_written_to_the_state_between_two_calls_is_seen() -> None:
    eager, twin, _ = made(every_third)
    train, layer = jitted(every_third)
    for k in range(6):
        for one in (layer, twin):
            one.steps.fill_([0, 1, 1, 5, 2, 7][k])
        torch.testing.assert_close(train(batch(k)), eager(batch(k)), **TIGHT)
    for one in (layer, twin):
        one.load_state_dict({**one.state_dict(), "steps": torch.tensor(11)})
        one.steps = torch.tensor(5)
    torch.testing.assert_close(train(batch(6)), eager(batch(6)), **TIGHT)


def test_a_recompile_says_what_the_step_reads() -> None:
    train, _ = jitted(act_norm)
    train(batch(0))
    train(batch(1))
    line = act_norm.__code__.co_firstlineno + 1
    assert [one.reason for one in train.recompiles] == [
        f"what the step reads of number (step (forward), {__file__}:{line}) was True and is False"
    ]


def test_compile_alone_refuses_a_call_that_goes_the_other_way() -> None:
    step, layer, optimizer = made(act_norm)
    module, _ = amp_ir.trace_step(step, (batch(0),), model=layer, optimizer=optimizer)
    train = amp_ir.compile(module)
    train(batch(0))
    with pytest.raises(StateError, match="what the step reads of number .* was True and is False"):
        train(batch(1))


def test_two_models_are_read_each_for_itself() -> None:
    results = []
    for is_compiled in (False, True):
        torch.manual_seed(2)
        layers = [Layer(every_third), Layer(late)]
        parameters = [one for layer in layers for one in layer.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        layers[0].steps.fill_(1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = layers[1](layers[0](x)).square().mean()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            return loss.detach()

        train = amp_ir.jit(step, model=layers, optimizer=optimizer) if is_compiled else step
        results.append(torch.stack([train(batch(k)) for k in range(7)]))
    torch.testing.assert_close(results[1], results[0], **TIGHT)


def test_a_step_that_the_scaler_rolls_back_does_not_count() -> None:
    step, layer, optimizer = made(every_third)
    scaler = amp_ir.GradScaler(init_scale=4.0)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        loss = (layer(x) - x.sin()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(scaled, model=layer, optimizer=optimizer, scaler=scaler)
    first = train(batch(0))
    train(batch(1) / 0)
    steps = int(layer.steps)
    layer.linear.weight.data.copy_(made(every_third)[1].linear.weight)
    layer.linear.bias.data.copy_(made(every_third)[1].linear.bias)
    again = train(batch(0))
    assert (again / first > 1.2) == ((steps + 1) % 3 == 0)


def test_the_state_of_an_optimizer_may_be_read() -> None:
    results = []
    for is_compiled in (False, True):
        _, layer, _ = made(late)
        optimizer = torch.optim.Adam(layer.linear.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> Any:
            loss = layer.linear(x).square().mean()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            count = optimizer.state[layer.linear.weight]["step"].item()  # noqa: B023
            return (2 * loss if count > 2 else loss).detach(), count

        train = amp_ir.jit(step, model=layer, optimizer=optimizer) if is_compiled else step
        results.append([train(batch(k)) for k in range(5)])
    torch.testing.assert_close(results[1], results[0], **TIGHT)


def by_float(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer.steps.add_(1)
    return x * float(layer.steps.float())


def cyclic(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Write what was read, as MoCo writes the place in its queue."""
    at = int(layer.steps)
    layer.steps[...] = (at + 2) % 6
    return x * (1 + at)


def of_data(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer.table[0] = x.detach()[0, :2]
    return 2 * x if layer.table.sum() > 0 else x


def of_statistics(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer.norm(x)
    return 2 * y if layer.norm.running_mean.sum() > 0 else y


def of_chance(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return 2 * x if layer.table.uniform_().sum() > 2 else x


_CHANGES = (
    "  1. step (forward), {place}: reads the number in steps in Python, which the step changes. "
    "{more}Compute with x.item() itself, which may stay a number of the step, or branch on a "
    "comparison of it: a program is compiled for either outcome. Or count outside of the step, and "
    "pass the number as an argument"
)
_PLACE = (
    "A place may stay a tensor: x[k] for x[int(k)], and x[(k + torch.arange(n)) % len(x)] for n "
    "places from k on. "
)


@pytest.mark.parametrize(
    ("forward", "line", "more"), [(by_float, 2, ""), (cyclic, 2, _PLACE)], ids=["float", "place"]
)
def test_a_number_of_each_call_is_refused(forward: Forward, line: int, more: str) -> None:
    train, _ = jitted(forward)
    place = f"{__file__}:{forward.__code__.co_firstlineno + line}"
    with pytest.raises(CaptureError) as refused:
        train(batch(0))
    assert str(refused.value) == "this step cannot be captured, 1 place:\n" + _CHANGES.format(
        place=place, more=more
    )


@pytest.mark.parametrize("forward", [of_data, of_statistics, of_chance])
def test_what_the_state_alone_does_not_decide_is_refused(forward: Forward) -> None:
    train, layer = jitted(forward)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(CaptureError, match="a tensor's value is read in Python"):
        train(batch(0))
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())


def test_a_hyper_parameter_is_no_state() -> None:
    step, layer, optimizer = made(every_third)

    def decayed(x: torch.Tensor) -> torch.Tensor:
        layer.table.mul_(optimizer.param_groups[0]["lr"])
        return step(x) if layer.table.sum() > 1 else x

    with pytest.raises(CaptureError, match="a tensor's value is read in Python"):
        amp_ir.jit(decayed, model=layer, optimizer=optimizer)(batch(0))


@pytest.mark.parametrize("read", [lambda view: view.sum() > 5, lambda view: view.tolist()[0] > 1])
def test_a_view_that_was_made_before_the_step_is_not_read(read: Callable[[Any], bool]) -> None:
    """It was: the step wrote to the state, and the view's value was that of before."""
    step, layer, optimizer = made(late)
    view = layer.table[:]

    def viewed(x: torch.Tensor) -> torch.Tensor:
        layer.table.add_(1)
        return step(2 * x if read(view) else x)

    with pytest.raises(CaptureError, match="is read in Python|made before the step"):
        amp_ir.jit(viewed, model=layer, optimizer=optimizer)(batch(0))
