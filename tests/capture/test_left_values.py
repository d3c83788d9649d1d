# SPDX-License-Identifier: Apache-2.0
"""Plain values that a step leaves in the user's objects: a compiled step leaves them too."""

from __future__ import annotations

import collections
import copy
import functools
import types
from typing import NamedTuple

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError, PaddingError, StateError
from square_steps import square_step


class Sized(nn.Module):
    """Keeps what its first call decides, in an attribute, a list, a dict and a module."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.size, self.sizes, self.table, self.act = None, [], None, None

    def forward(self, x):
        if self.size is None:
            self.size = x.shape[1]
        if not self.sizes:
            self.sizes.append(x.shape[1])
        if self.table is None:
            self.table = {"sizes": [x.shape[1]]}
        if self.act is None:
            self.act = nn.LeakyReLU(x.shape[1] / 10)
        return self.act(self.head(x)) * self.size + self.sizes[0] + self.table["sizes"][0]


class Stores(nn.Module):
    """Stores in each call what it never reads."""

    def __init__(self):
        super().__init__()
        self.head, self.seen = nn.Linear(4, 4), {}

    def forward(self, x):
        self.size = x.shape[1]
        self.seen["last"] = (x.shape[1], "even" if x.shape[1] % 2 == 0 else "odd")
        return self.head(x)


def training(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return square_step(model, optimizer), optimizer


def batch(length):
    return torch.full((2, length, 4), 0.5)


def run(model, *, compiles, seen):
    step, optimizer = training(model)
    if compiles:
        step = amp_ir.jit(step, model=model, optimizer=optimizer)
    losses = []
    for length in (3, 5, 3, 7):
        losses.append(step(batch(length)))
        seen.append({key: repr(value) for key, value in state_of(model).items()})
    return step, torch.stack(losses)


def state_of(model):
    plain = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    return {**plain, "modules": dict(model.named_children())}


# The entry that the first call adds to a dict that it reads fails the guard of its first program.
@pytest.mark.parametrize(("kind", "programs"), [(Sized, 3), (Stores, 4)])
def test_a_step_leaves_in_objects_what_eager_leaves_at_every_shape(kind, programs):
    eager = kind()
    model = copy.deepcopy(eager)
    expected, seen = [], []
    _, losses = run(eager, compiles=False, seen=expected)
    train, found = run(model, compiles=True, seen=seen)
    # Sums of 12 to 28 products in another order: some units in the last place of float32.
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    assert seen == expected
    assert len(train.recompiles) + 1 == programs


def test_capture_alone_and_a_failing_first_step_leave_nothing():
    model = Sized()
    step, optimizer = training(model)
    before = repr(state_of(model))
    mod, args = amp_ir.trace_step(step, (batch(3),), model=model, optimizer=optimizer)
    assert repr(state_of(model)) == before
    compiled = amp_ir.compile(mod)
    with pytest.raises(amp_ir.errors.ArgumentError):
        compiled(batch(4))
    assert repr(state_of(model)) == before
    compiled(*args)
    assert (model.size, model.sizes, model.table) == (3, [3], {"sizes": [3]})
    compiled(*args)


def test_a_value_that_the_user_sets_before_the_first_run_is_not_overwritten():
    model = Sized()
    step, optimizer = training(model)
    mod, args = amp_ir.trace_step(step, (batch(3),), model=model, optimizer=optimizer)
    compiled = amp_ir.compile(mod)
    model.size = 11
    with pytest.raises(StateError, match="attribute 'size' of .* was 3 and is 11"):
        compiled(*args)
    assert model.size == 11 and model.sizes == []


class KeepsLength(nn.Module):
    def __init__(self, *, first):
        super().__init__()
        self.head, self.size, self.first = nn.Linear(4, 4), None, first

    def forward(self, x):
        if not self.first:
            self.size = x.shape[1]
        elif self.size is None:
            self.size = x.shape[1]
        return self.head(x)


@pytest.mark.parametrize("first", [True, False])
def test_a_padded_length_is_not_left_in_an_object(first):
    model = KeepsLength(first=first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x, mask):
        loss = (model(x).square().mean(2) * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    sizes = {1: (8, 16)}
    train = amp_ir.jit(
        step,
        model=model,
        optimizer=optimizer,
        buckets={"x": sizes, "mask": sizes},
        pad={"x": 0, "mask": 0},
    )
    with pytest.raises(PaddingError) as caught:
        train(torch.randn(2, 5, 4), torch.ones(2, 5))
    assert str(caught.value) == (
        "what the step leaves in attribute 'size' of module (the model itself) depends on the "
        "padded length (8, or 3); do not store it in the step, set it before, from the batch"
    )
    assert model.size is None


def test_a_converted_model_keeps_what_its_first_call_decides_and_leaves_the_model_alone():
    model = Sized().eval()
    eager = copy.deepcopy(model)
    converted = amp_ir.convert_model(model, (batch(3),), target_dtype="float32")
    with torch.no_grad():
        for length in (3, 5, 3):
            expected = eager(batch(length))
            torch.testing.assert_close(converted(batch(length)), expected, rtol=1e-5, atol=1e-5)
    assert model.size is None and model.act is None


class StoresOverDefault(nn.Module):
    """Stores what is there already when its first shape is captured."""

    def __init__(self):
        super().__init__()
        self.head, self.size = nn.Linear(4, 4), 3

    def forward(self, x):
        self.size = x.shape[1]
        return self.head(x)


def test_a_value_that_was_there_before_is_left_again_after_another_shape():
    model = StoresOverDefault()
    step, optimizer = training(model)
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for length in (3, 5, 3, 7, 3):
        train(batch(length))
        assert model.size == length


def test_a_container_that_a_step_makes_is_a_new_one_in_each_call():
    class Lists(StoresOverDefault):
        def forward(self, x):
            self.made = {"sizes": [x.shape[1]]}
            self.same = self.own
            return self.head(x)

    model = Lists()
    model.own = own = [1]
    step, optimizer = training(model)
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for _ in range(3):
        train(batch(3))
        assert model.made == {"sizes": [3]}
        assert model.same is own
        model.made["sizes"].append(9)


@pytest.mark.parametrize("is_argument", [True, False])
def test_a_number_that_changes_from_call_to_call_is_left_as_it_is_now(is_argument):
    model = StoresOverDefault()
    step, optimizer = training(model)
    model.weight, model.used = 0.5, 0.0

    def weighted(x, weight):
        model.used = weight if is_argument else model.weight
        loss = model(x).square().mean() * model.used
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(weighted, model=model, optimizer=optimizer)
    for number in (0.5, 0.75, 1.25, 1.5):
        model.weight = number
        train(batch(3), number if is_argument else 1.0)
        assert model.used == number


class Seen:
    """An object of the user's, with an attribute of a name that modules have."""


def test_a_value_that_goes_back_and_forth_is_left_by_programs_that_exist():
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), Seen()
    step, optimizer = training(model)

    def noting(x):
        seen.training = model.training
        return step(x)

    train = amp_ir.jit(noting, model=model, optimizer=optimizer)
    for k, length in enumerate((3, 5, 3, 7, 3, 5, 3, 7)):
        model.train(k % 2 == 0)
        train(batch(length))
        assert seen.training is model.training
    # Three shapes, and one that is captured again: with the attribute there, and without it.
    assert len(train.recompiles) + 1 == 4


def shortens(kept, count):
    kept[:] = [count] * (len(kept) - 1)


def clears(kept, _count):
    kept.clear()


@pytest.mark.parametrize("change", [shortens, clears])
def test_a_list_that_gets_shorter_is_refused_and_put_back(change):
    model, kept = nn.Linear(4, 4), [0, 0, 0]
    step, optimizer = training(model)

    def changing(x):
        change(kept, len(x))
        return step(x)

    train = amp_ir.jit(changing, model=model, optimizer=optimizer)
    with pytest.raises(CaptureError, match="closure variable 'kept'"):
        train(batch(3))
    assert kept == [0, 0, 0]


class Half(NamedTuple):
    """Half of a rate."""

    rate: float


def test_a_learning_rate_in_a_text_compiles_again():
    """The text was that of the first call, in an attribute and in a result."""
    model = StoresOverDefault()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        rate = optimizer.param_groups[0]["lr"]
        model.said = f"{rate:.3f}"
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), str(rate)

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for rate in (0.1, 0.05, 0.1, 0.2):
        optimizer.param_groups[0]["lr"] = rate
        assert train(batch(3))[1] == str(rate) and model.said == f"{rate:.3f}"
    assert len(train.recompiles) == 2


@pytest.mark.parametrize("make", [torch.tensor, lambda rate: torch.linspace(0, rate, 3)])
def test_what_pytorch_computes_with_a_learning_rate_is_refused(make):
    """The tensor was that of the first call."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.step()
        return model(x).sum() * make(optimizer.param_groups[0]["lr"]).sum()

    name = "tensor" if make is torch.tensor else "linspace"
    line = step.__code__.co_firstlineno + 2 if name == "tensor" else make.__code__.co_firstlineno
    with pytest.raises(CaptureError) as refused:
        amp_ir.jit(step, model=model, optimizer=optimizer)(torch.ones(3, 4))
    assert str(refused.value) == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward), {__file__}:{line}: gives a hyper-parameter of an optimizer to "
        f"{name}, which computes with the number that it is now. Make a tensor by "
        "torch.full((), number) and compute with that, or pass the number to the step as an "
        "argument"
    )


def test_a_learning_rate_is_a_key():
    """It was another key than the number: its double is one that occurs nowhere else."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    factors = {0.1: 2.0, 0.2: 3.0}
    train = amp_ir.jit(
        lambda x: model(x).sum() * factors[optimizer.param_groups[0]["lr"]],
        model=model,
        optimizer=optimizer,
    )
    x = torch.ones(3, 4)
    for rate in (0.1, 0.2, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        torch.testing.assert_close(train(x), model(x).sum().detach() * factors[rate])


@pytest.mark.parametrize("batch_sizes", [(3, 3, 3), (3, 5, 3)])
def test_a_learning_rate_is_left_as_in_pytorch(batch_sizes):
    """What only the first call sets stays; what each call sets is that of the call."""
    kept = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = StoresOverDefault()
        step, optimizer = training(model)
        model.first = None

        def rated(x, model=model, optimizer=optimizer):
            rate = optimizer.param_groups[0]["lr"]
            if model.first is None:
                model.first = rate
            model.rate, model.both = rate, [rate, {"half": Half(rate / 2)}]
            loss = model(x).square().mean() * model.first
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        train = amp_ir.jit(rated, model=model, optimizer=optimizer) if is_compiled else rated
        left = []
        for k, size in enumerate(batch_sizes):
            optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
            loss = float(train(batch(size)))
            left.append((round(loss, 5), model.first, model.rate, model.both))
        kept.append(left)
    assert kept[0] == kept[1]
    assert [one[1:] for one in kept[1]][2] == (
        0.1, 0.1 / 3, [0.1 / 3, {"half": Half(0.1 / 3 / 2)}],
    )  # fmt: skip


def loss_of(model, loss, optimizer):
    model.kept = loss.item()


def losses(model, loss, optimizer):
    model.kept = {"size": 3, "losses": [loss.item()]}


def object_with_a_rate(model, loss, optimizer):
    model.kept = Settings()
    model.kept.rate = optimizer.param_groups[0]["lr"]


def deep_object_with_a_rate(model, loss, optimizer):
    model.kept = collections.UserDict(rates=[{"first": optimizer.param_groups[0]["lr"]}])


def function_of_a_rate(model, loss, optimizer):
    model.kept = in_a_function(optimizer.param_groups[0]["lr"])


def part_of_a_function(model, loss, optimizer):
    model.kept = functools.partial(max, optimizer.param_groups[0]["lr"])


class Settings:
    """Anything with attributes."""

    def get(self):
        return self.rate


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def step_that_keeps_numbers(keep):
    torch.manual_seed(0)
    model = StoresOverDefault()
    _, optimizer = training(model)

    def keeping(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        keep(model, loss, optimizer)
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, keeping


def plain(value):
    """Return the numbers of a value, rounded as two float32 losses agree."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, (Settings, collections.UserDict)):
        return type(value), plain(vars(value))
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("keep", [loss_of, losses, object_with_a_rate, deep_object_with_a_rate])
def test_a_number_that_the_step_computes_is_kept(keep):
    kept = []
    for is_compiled in (False, True):
        model, optimizer, step = step_that_keeps_numbers(keep)
        train = (
            amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype=None)
            if is_compiled
            else step
        )
        seen = []
        for k in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
            train(batch(3))
            seen.append(plain(model.kept))
        kept.append(seen)
    assert kept[0] == kept[1] and kept[0][0] != kept[0][1]
    assert not train.recompiles


@pytest.mark.parametrize("keep", [function_of_a_rate, part_of_a_function])
def test_a_number_in_a_function_is_refused(keep):
    model, optimizer, keeping = step_that_keeps_numbers(keep)
    train = amp_ir.jit(keeping, model=model, optimizer=optimizer)
    with pytest.raises(CaptureError) as refused:
        train(batch(3))
    at = keep.__code__.co_firstlineno + 1
    assert str(refused.value) == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward), {__file__}:{at}: keeps a number that it computes in attribute "
        "'kept' of module (the model itself), where a compiled step puts none. Return it from the "
        "step, and keep it after the call"
    )
    assert not hasattr(model, "kept")


def in_a_function(value):
    return lambda: value


def as_a_default(value):
    def kept(found=value):
        return found

    return kept


def in_itself(value):
    def kept():
        return kept.value

    kept.value = value
    return kept


def as_an_attribute(value):
    settings = Settings()
    settings.rate = value
    return settings.get


def in_a_dict(value):
    return types.MappingProxyType({"value": value})


KEEPS = [
    in_a_function, as_a_default, in_itself, as_an_attribute,
    functools.partial(functools.partial, max), in_a_dict,
]  # fmt: skip


def keeping_step(model, keep, of):
    """Return a step that keeps what `keep` makes of the loss, the model, or a constant."""
    _, optimizer = training(model)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.kept = keep({"loss": loss.detach(), "model": model.head, "size": 3}[of])
        return loss.detach()

    return amp_ir.jit(step, model=model, optimizer=optimizer)


@pytest.mark.parametrize("keep", KEEPS, ids=lambda keep: repr(keep)[:20])
def test_a_tensor_is_not_kept_through_a_function(keep):
    model = StoresOverDefault()
    train = keeping_step(model, keep, "loss")
    with pytest.raises(CaptureError, match=r"keeps a tensor of shape \(\) in .*'kept'"):
        train(batch(3))
    assert "kept" not in vars(model)


@pytest.mark.parametrize("of", ["model", "size"])
@pytest.mark.parametrize(
    ("keep", "read"),
    [
        (in_a_function, lambda kept: kept()),
        (as_a_default, lambda kept: kept()),
        (in_itself, lambda kept: kept()),
        (as_an_attribute, lambda kept: kept()),
        (Slotted, lambda kept: kept.value),
        (in_a_dict, lambda kept: kept["value"]),
    ],
)
def test_what_is_the_users_is_kept_through_a_function_or_a_slot(keep, read, of):
    model = StoresOverDefault()
    train = keeping_step(model, keep, of)
    train(batch(3))
    assert read(model.kept) is {"model": model.head, "size": 3}[of]


def as_a_generator(value):
    return (one for one in [value])


def test_an_iterator_is_not_kept():
    train = keeping_step(StoresOverDefault(), as_a_generator, "loss")
    with pytest.raises(CaptureError) as refused:
        train(batch(3))
    at = keeping_step.__code__.co_firstlineno + 9
    assert str(refused.value) == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward), {__file__}:{at}: keeps a generator in attribute 'kept' of "
        f"closure variable 'model' of step (test_left_values.py:{at - 5}), which a compiled step "
        "does not make again. Keep a list or a tuple of what it gives, or make it after the call"
    )
