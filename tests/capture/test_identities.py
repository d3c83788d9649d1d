# SPDX-License-Identifier: Apache-2.0
"""What a step asks of its tensors' identity is what PyTorch answers: `is`, `in`, `id`, look-ups."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError

# In float64: the gradient of the bias before a batch norm is 0 but for its rounding.
MODEL = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
BATCH = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)


class Holder:
    """A plain object with a parameter as an attribute."""

    def __init__(self, special: torch.Tensor) -> None:
        self.special = special


def in_set(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Look up in a set."""
    chosen = {special}
    return lambda p: p in chosen


def in_frozenset(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Look up in a frozen set."""
    chosen = frozenset([special])
    return lambda p: p in chosen


def in_list(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Look up in a list of one, which needs no comparison of others."""
    chosen = [special]
    return lambda p: any(p is one for one in chosen)


def in_tuple(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Compare with what a tuple holds."""
    chosen = (special, None)
    return lambda p: p is chosen[0]


def by_closure(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Compare with a variable of a closure."""
    return lambda p: p is special


def by_attribute(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Compare with an attribute of an object that is no module."""
    holder = Holder(special)
    return lambda p: holder.special is p


def by_pairs(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Compare with pairs of a list that was made before the step."""
    pairs = list(model.named_parameters())
    return lambda p: next(name for name, one in pairs if one is p) == "2.weight"


def by_id(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Look up an id."""
    ids = {id(special)}
    return lambda p: id(p) in ids


def by_ids_of_all(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Look up a name by an id, as optimizers that are told names do."""
    names = {id(one): name for name, one in model.named_parameters()}
    return lambda p: names[list(map(id, [p]))[0]] == "2.weight"


def by_hash(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Compare hashes."""
    return lambda p: hash(p) == hash(special)


def by_entry(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Look up in a dictionary."""
    scales = {one: 0.0 for one in model.parameters()}
    scales[special] = 1.0
    return lambda p: scales[p] > 0.5


def by_default(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Look up in a dictionary that has one entry."""
    scales = {special: 1.0}
    return lambda p: scales.get(p, 0.0) > 0.5


def by_index(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Ask a list for the position of its first item."""
    return lambda p: p.shape == special.shape and [special].index(p) == 0


class Special(nn.Parameter):
    """A parameter that is marked by its class."""


def by_kind(model: nn.Module, special: nn.Parameter) -> Callable[[Any], bool]:
    """Ask for the user's own kind of parameter."""
    model[2].weight = Special(special.detach())
    return lambda p: isinstance(p, Special)


ASKED = [
    in_set, in_frozenset, in_list, in_tuple, by_closure, by_attribute, by_pairs, by_id,
    by_ids_of_all, by_hash, by_entry, by_default, by_index, by_kind,
]  # fmt: skip


def trained(
    asked: Callable[[nn.Module, nn.Parameter], Callable[[Any], bool]], *, compiled: bool
) -> list[torch.Tensor]:
    """Return the losses and the state after three steps that penalize one weight only."""
    model = copy.deepcopy(MODEL)
    is_special = asked(model, model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        for parameter in model.parameters():
            if is_special(parameter):
                loss = loss + parameter.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer) if compiled else step
    losses = [train(BATCH) for _ in range(3)]
    return [*losses, *model.state_dict().values()]


@pytest.mark.parametrize("asked", ASKED, ids=lambda one: one.__name__)
def test_a_step_finds_its_parameters_again(asked: Any) -> None:
    """The fakes of a capture are the user's tensors to every question about identity."""
    found, expected = trained(asked, compiled=True), trained(asked, compiled=False)
    # Sums of at most 24 terms in another order.
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_parameters_of_groups_are_those_of_a_list() -> None:
    """What the optimizer holds and what a list of the user's holds are one."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = list(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        held = optimizer.param_groups[0]["params"]
        same = all(a is b for a, b in zip(mine, held, strict=True))
        same = same and list(map(id, mine)) == list(map(id, held)) and set(mine) == set(held)
        return loss * (2.0 if same else 3.0)

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    torch.testing.assert_close(train(BATCH), step(BATCH), rtol=1e-10, atol=0)
    assert all(a is b for a, b in zip(mine, model.parameters(), strict=True))


def test_written_equality_is_by_element() -> None:
    """`==` of a parameter and the user's own reference to it compares elements, NaN included."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    held = {"weight": model.weight}

    def step(x: torch.Tensor) -> torch.Tensor:
        return (model.weight == held["weight"]).sum() + 0 * x.sum()

    train = amp_ir.jit(step, model=model)
    assert int(train(torch.ones(2))) == int(step(torch.ones(2))) == 3


def test_none_is_no_tensor() -> None:
    """Neither a parameter nor a tensor of the step is equal to None in a look-up."""
    model = nn.Linear(2, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        found = [one for one in (x, y, model.weight) if one in (None,) or (None,).count(one)]
        return y.sum() + len(found)

    x = torch.ones(2)
    torch.testing.assert_close(amp_ir.jit(step, model=model)(x), step(x))


def test_a_new_optimizers_state_is_found_by_the_users_parameters() -> None:
    """The state that an optimizer keeps is one entry, by a fake and by the user's own tensor."""
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)

    def made(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        weight = model.weight

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            moments = sum(one["momentum_buffer"].abs().sum() for one in optimizer.state.values())
            mine = optimizer.state[weight]["momentum_buffer"].abs().sum()
            return loss.detach() + moments / mine + len(optimizer.state)

        return step

    step = made(twin, other)
    train = amp_ir.jit(made(model, optimizer), model=model, optimizer=optimizer)
    for _ in range(3):
        torch.testing.assert_close(train(BATCH), step(BATCH), rtol=1e-10, atol=1e-12)


def test_python_and_pytorch_are_as_before_a_capture() -> None:
    """Neither `id` of the user's module nor anything of PyTorch's classes stays replaced."""
    from torch._subclasses.fake_tensor import FakeTensor

    trained(by_id, compiled=True)
    assert "id" not in globals()
    assert FakeTensor.__hash__ is torch.Tensor.__hash__
    assert "__hash__" not in vars(FakeTensor) and "__eq__" not in vars(torch.Tensor)
    check = type(nn.Parameter).__instancecheck__
    assert check.__module__ == nn.Parameter.__module__


class Halved(torch.autograd.Function):
    """Halves the gradient of what it is told to, in a backward pass of its own."""

    told: set[Any] = set()

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (0.5 if ctx.weight in Halved.told else 1.0)


def with_hooks(*, compiled: bool) -> list[torch.Tensor]:
    """Train with look-ups in hooks of the backward pass, where no mode of a capture is on."""
    model = copy.deepcopy(MODEL)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    masks = {p: torch.ones_like(p).cumsum(-1) for p in model.parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    frozen = {model[0].bias}
    Halved.told = {model[2].weight}
    for p in model.parameters():
        p.register_hook(lambda grad, p=p: grad * masks[p] * (0.0 if p in frozen else 1.0))

    def update(p: torch.Tensor) -> None:
        assert names[id(p)]
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden = model[1](model[0](x))
        loss = (hidden @ Halved.apply(model[2].weight).T + model[2].bias).square().mean()
        loss.backward()
        return loss.detach()

    listed = list(optimizers.values())
    train = amp_ir.jit(step, model=model, optimizer=listed) if compiled else step
    return [*(train(BATCH) for _ in range(3)), *model.state_dict().values()]


def test_hooks_of_the_backward_pass_look_their_parameters_up() -> None:
    """Dictionaries, sets and ids answer there as in the step."""
    found, expected = with_hooks(compiled=True), with_hooks(compiled=False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class Memory:
    """A plain object that keeps the parameter that it saw last."""

    def __init__(self, first: torch.Tensor) -> None:
        self.last: Any = first


def test_a_parameter_that_moves_to_another_place_is_reported() -> None:
    """Where a step stores another parameter than was there, it changes what the next one reads."""
    model = copy.deepcopy(MODEL)
    memory = Memory(model[0].weight)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() + memory.last.sum()
        memory.last = model[2].weight
        return loss

    train = amp_ir.jit(step, model=model)
    with pytest.raises(CaptureError, match=r"keeps a tensor of shape \(2, 4\) in attribute"):
        train(BATCH)
    assert memory.last is model[0].weight


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """Return parameters once, as code does that leaves out shared ones by their ids."""
    seen: set[int] = set()
    for one in model.parameters():
        if id(one) not in seen:
            seen.add(id(one))
            yield one


def test_a_parameter_kept_for_the_next_step_is_the_users() -> None:
    """A place that holds a parameter holds the user's own again after the capture."""
    model = copy.deepcopy(MODEL)
    held = [list(parameters_of(model)), dict(model.named_parameters()), Holder(model[0].bias)]
    before = [id(one) for one in (*held[0], *held[1].values(), held[2].special)]

    def step(x: torch.Tensor) -> torch.Tensor:
        norm = sum(one.square().sum() for one in held[0])
        return model(x).square().mean() + norm + held[1]["0.weight"].sum() + held[2].special.sum()

    train = amp_ir.jit(step, model=model)
    torch.testing.assert_close(train(BATCH), step(BATCH), rtol=1e-10, atol=1e-12)
    assert [id(one) for one in (*held[0], *held[1].values(), held[2].special)] == before
