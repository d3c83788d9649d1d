# SPDX-License-Identifier: Apache-2.0
"""Tensors that a step keeps in the user's objects, beside the same step in PyTorch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError, PaddingError

FEATURES: dict[str, Any] = {}
LAST: Any = None


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    width: int


Pair = collections.namedtuple("Pair", "first second")


class Net(nn.Module):
    """A layer whose activations `keep` keeps somewhere, and one that reads what it returns."""

    def __init__(self, keep: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.logarithm = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(4))
        self.hidden: Any = None
        self.factor, self.center = torch.ones(1), torch.zeros(4)
        self.table: dict[str, Any] = {}
        self.slots = [torch.zeros(4), torch.zeros(4)]
        self.features: list[torch.Tensor] = []
        self.count = 0
        self.keep = keep

    def add(self, h: torch.Tensor) -> None:
        self.features.append(h)

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.relu(self.first(x))
        changed = self.keep(self, x, h)
        return self.second(h if changed is None else changed)


def trained(keep: Any, *, compiled: bool, batches: tuple[int, ...], **options: Any) -> Any:
    """Return a model, its step, and what the step and the model's objects held after each call."""
    global LAST
    LAST = None
    FEATURES.clear()
    torch.manual_seed(0)
    model = Net(keep)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    options = {"amp_dtype": None, **options}
    train = amp_ir.jit(step, model=model, optimizer=optimizer, **options) if compiled else step
    seen = []
    for k, size in enumerate(batches):
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(k))
        loss = train(x)
        seen.append((loss, held_by(model), x))
    return model, train, seen


def held_by(model: Net) -> dict[str, Any]:
    own = {k: v for k, v in vars(model).items() if not k.startswith("_") and k != "keep"}
    held = {**own, "FEATURES": dict(FEATURES), "LAST": LAST}
    return {key: copied(value) for key, value in held.items()}


def copied(value: Any) -> Any:
    """Return a value whose tensors later steps do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, Pair):
        return Pair(*map(copied, value))
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value)(map(copied, value))
    return Output(copied(value.hidden), value.width) if isinstance(value, Output) else value


def assert_alike(one: Any, other: Any) -> None:
    """Float32 steps agree to a few roundings."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_alike(one[key], other[key])
    elif isinstance(one, (list, tuple, collections.deque)):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            assert_alike(each, its)
    elif isinstance(one, Output):
        assert_alike((one.hidden, one.width), (other.hidden, other.width))
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)
    else:
        assert one == other


def in_attributes(net: Any, x: Any, h: Any) -> Any:
    net.kept = net.again = h.softmax(-1)
    net.kept_mean = h.mean().item()


def in_containers(net: Any, x: Any, h: Any) -> Any:
    net.kept = (h, {"inner": [h.sum(), None, "text"], "rows": x.shape[0]})
    net.pair, net.queue = Pair(h, 1), collections.deque([h], maxlen=3)


def in_an_object(net: Any, x: Any, h: Any) -> Any:
    net.kept = Output(h, 4)


def in_a_global(net: Any, x: Any, h: Any) -> Any:
    global LAST
    LAST = h


def in_a_dictionary(net: Any, x: Any, h: Any) -> Any:
    FEATURES["hidden"] = h
    FEATURES["layers"] = 2


def in_a_list_made_anew(net: Any, x: Any, h: Any) -> Any:
    net.features = []
    net.add(h)
    net.add(2 * h)
    return net.features[-1]


def where_a_branch_may_read(net: Any, x: Any, h: Any) -> Any:
    if not net.training:
        return net.hidden
    net.hidden = h
    return None


def and_changes_in_place(net: Any, x: Any, h: Any) -> Any:
    net.kept = h.detach().clone()
    net.kept += 1
    net.kept.mul_(2)


def and_replaces(net: Any, x: Any, h: Any) -> Any:
    net.kept = h.sum()
    net.kept = net.kept + 1


def of_the_state(net: Any, x: Any, h: Any) -> Any:
    net.mean.mul_(0.5).add_(h.detach().mean(0))
    net.kept = [net.first.weight, net.mean]


def parts_of_the_batch(net: Any, x: Any, h: Any) -> Any:
    net.kept, net.part = x, x[:2]


def under_a_computed_name(net: Any, x: Any, h: Any) -> Any:
    setattr(net, f"kept{net.second.in_features}", h)


def for_the_rest_of_the_step(net: Any, x: Any, h: Any) -> Any:
    net.kept, net.dropped = h, h
    h = h + net.kept + net.dropped
    net.kept = None
    del net.dropped
    return h


KEEPS = [
    in_attributes,
    in_containers,
    in_an_object,
    in_a_global,
    in_a_dictionary,
    in_a_list_made_anew,
    where_a_branch_may_read,
    and_changes_in_place,
    and_replaces,
    of_the_state,
    parts_of_the_batch,
    under_a_computed_name,
    for_the_rest_of_the_step,
]


@pytest.mark.parametrize("keep", KEEPS, ids=lambda keep: keep.__name__)
def test_what_a_step_keeps_is_that_of_each_call(keep: Any) -> None:
    batches = (4, 4, 6, 4, 6, 4)
    model, _, seen = trained(keep, compiled=False, batches=batches)
    ours, train, others = trained(keep, compiled=True, batches=batches)
    for (loss, held, _), (other, theirs, _) in zip(seen, others, strict=True):
        torch.testing.assert_close(other, loss.detach(), rtol=1e-5, atol=1e-6)
        assert_alike(held, {key: theirs[key] for key in held})
    assert_alike(dict(model.named_parameters()), dict(ours.named_parameters()))
    assert len(train._variants.in_order) == 2, train.recompiles


def test_tensors_of_batch_and_state_are_kept_themselves() -> None:
    def keep(net: Any, x: Any, h: Any) -> Any:
        net.kept, net.shared, net.same = x, [net.first.weight], h
        net.again = net.same

    model, _, seen = trained(keep, compiled=True, batches=(4, 4))
    assert model.kept is seen[-1][2]
    assert model.shared[0] is model.first.weight
    assert model.again is model.same and model.same.grad_fn is None


def recurrent(net: Any, x: Any, h: Any) -> Any:
    hidden = net.hidden if net.hidden is None or net.hidden.shape[1] == len(x) else None
    out, last = net.rnn(h[:, None], hidden)
    net.hidden = last.detach()
    return out[:, 0]


def temperature(net: Any, x: Any, h: Any) -> Any:
    """SAC's: the next call reads it where no gradient is recorded."""
    with torch.no_grad():
        target = h * net.factor
    net.factor = net.logarithm.exp()
    return (h - target) * net.logarithm + h


def average(net: Any, x: Any, h: Any) -> Any:
    centered = h - net.center
    net.center = net.center * 0.9 + h.detach().mean(0) * 0.1
    return centered


def in_an_entry(net: Any, x: Any, h: Any) -> Any:
    before = net.table.get("mean")
    net.table["mean"] = h.detach().mean(0)
    return h if before is None else h + before


def in_an_item(net: Any, x: Any, h: Any) -> Any:
    h = h + net.slots[0]
    net.slots[0] = h.detach().mean(0)
    return h


def previous_batch(net: Any, x: Any, h: Any) -> Any:
    before, net.hidden = net.hidden, x
    return h if before is None else h + before.mean(0)


def constants_in_place_of_a_total(net: Any, x: Any, h: Any) -> Any:
    """What begins anew was left as it is, for a table of constants."""
    net.center = net.center + h.detach().mean(0)
    h = h + net.center + net.slots[0]
    net.slots[0] = torch.zeros(4)
    if len(x) == 6:
        net.factor, net.center = net.center / 2, torch.zeros(4)
    return h


def constants_in_place_of_a_tensor(net: Any, x: Any, h: Any) -> Any:
    h = h + net.factor
    net.factor = torch.zeros(1)
    return h


def numbers_in_a_dictionary(net: Any, x: Any, h: Any) -> Any:
    net.table["mean"] = h.mean().item()
    net.table["hidden"], net.table["size"] = h, x.shape[0]


def detached_where_it_is_read(net: Any, x: Any, h: Any) -> Any:
    before = None if net.hidden is None else net.hidden.detach()
    is_alike = before is not None and before.shape[1] == len(x)
    out, net.hidden = net.rnn(h[:, None], before if is_alike else None)
    return out[:, 0]


def held_twice(net: Any, x: Any, h: Any) -> Any:
    h = h + net.center + net.slots[0]
    net.center = net.slots[0] = h.detach().mean(0)
    return h


def where_a_shape_decides(net: Any, x: Any, h: Any) -> Any:
    is_large = net.hidden is not None and len(net.hidden) > 5
    net.hidden = h.detach()
    return 2 * h if is_large else h


def where_the_loss_decides(net: Any, x: Any, h: Any) -> Any:
    is_large = net.count > 0.6
    net.count = h.mean().item()
    return 2 * h if is_large else h


CARRIED: dict[Any, int] = {
    recurrent: 4,  # at first, and from a call of either shape
    temperature: 2,
    average: 2,
    in_an_entry: 3,
    in_an_item: 2,
    previous_batch: 4,
    constants_in_place_of_a_total: 2,
    constants_in_place_of_a_tensor: 2,
    held_twice: 2,
    numbers_in_a_dictionary: 2,
    detached_where_it_is_read: 5,
    where_a_shape_decides: 6,
}


@pytest.mark.parametrize("keep", CARRIED, ids=lambda keep: keep.__name__)
def test_a_call_reads_what_the_one_before_has_kept(keep: Any) -> None:
    batches = (4, 4, 4, 6, 6, 4, 4, 6)
    model, _, seen = trained(keep, compiled=False, batches=batches)
    ours, train, others = trained(keep, compiled=True, batches=batches)
    for (loss, held, _), (other, theirs, _) in zip(seen, others, strict=True):
        torch.testing.assert_close(other, loss.detach(), rtol=1e-5, atol=1e-6)
        assert_alike(held, theirs)
    assert_alike(dict(model.named_parameters()), dict(ours.named_parameters()))
    assert len(train._variants.in_order) <= CARRIED[keep] + 1, train.recompiles


class Memory:
    """An object of the user's beside the model."""

    last: torch.Tensor


def test_an_attribute_of_an_object_is_read_at_each_call() -> None:
    """Its object counted as another place that holds the tensor, and was refused."""
    memories = [Memory(), Memory()]

    def keep_in(memory: Memory) -> Any:
        memory.last = torch.zeros(4)

        def keep(net: Any, x: Any, h: Any) -> Any:
            h = h + memory.last
            memory.last = h.detach().mean(0)
            return h

        return keep

    for memory, compiled in zip(memories, (False, True), strict=True):
        trained(keep_in(memory), compiled=compiled, batches=(4, 4, 4))
    assert_alike(memories[0].last, memories[1].last)


def noted(h: torch.Tensor) -> torch.Tensor:
    noted.last = h.detach()  # type: ignore[attr-defined]
    return h


def test_attributes_of_functions_and_of_modules_of_pytorch_are_kept() -> None:
    """A function had a fake tensor, and a module whose attribute's name is computed none."""
    model = nn.ModuleDict({"layer": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        h = noted(model["layer"](x))
        for key in model:
            setattr(model, f"last_{key}", h.detach())
        h.square().mean().backward()
        optimizer.step()
        return h.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype=None)
    for k in range(3):
        h = train(torch.full((2, 4), float(k)))
        assert type(noted.last) is torch.Tensor  # type: ignore[attr-defined]
        torch.testing.assert_close(noted.last, h)  # type: ignore[attr-defined]
        torch.testing.assert_close(model.last_layer, h)


def test_the_user_may_set_what_is_carried() -> None:
    results = []
    for compiled in (False, True):
        model, train, _ = trained(average, compiled=compiled, batches=(4, 4))
        for k in range(4):
            model.center = torch.full((4,), float(k)) if k % 2 else model.center
            train(torch.full((4, 4), 0.5))
        results.append(dict(model.named_parameters()))
    assert_alike(*results)


def graph_of_the_call_before(net: Any, x: Any, h: Any) -> Any:
    out, net.hidden = net.rnn(h[:, None], net.hidden)
    return out[:, 0]


def number(net: Any, x: Any, h: Any) -> Any:
    h = h * (1 + net.count)
    net.count = h.mean().item()
    return h


def value_decides(net: Any, x: Any, h: Any) -> Any:
    if float(net.center.sum()) > 0:
        h = 2 * h
    net.center = h.detach().mean(0)
    return h


def view_of_the_state(net: Any, x: Any, h: Any) -> Any:
    net.kept = net.first.weight.t()


def in_a_list_that_grows(net: Any, x: Any, h: Any) -> Any:
    net.features.append(h)


AT = "this step cannot be captured, 1 place:\n  1. step (forward), {line}: keeps "
READ = ", which the next call reads. "
UPDATE = (
    "Make it a tensor before the first call, such as a buffer, and update it in place: "
    "kept.copy_(value)"
)
REFUSED = {
    graph_of_the_call_before: (
        1,
        "a tensor of shape (1, 4, 4) in attribute 'hidden' of module (the model itself)"
        f"{READ}Keep it detached (h.detach()): its graph is that of the call before",
    ),
    number: (
        2,
        f"a number in attribute 'count' of module (the model itself){READ}{UPDATE}",
    ),
    where_the_loss_decides: (
        2,
        f"a number in attribute 'count' of module (the model itself){READ}{UPDATE}",
    ),
    value_decides: (
        3,
        f"a tensor of shape (4,) in attribute 'center' of module (the model itself){READ}{UPDATE}",
    ),
    view_of_the_state: (
        1,
        "a view of first.weight in attribute 'kept' of module (the model itself). Keep a copy of "
        "it (.clone()), or read it there after the call",
    ),
    in_a_list_that_grows: (
        1,
        "a tensor of shape (4, 4) in attribute 'features' of module (the model itself) (a list), "
        "where a compiled step puts none. Return the tensor from the step, and keep it after the "
        "call; what only the step reads, such as what a forward hook keeps, it may drop before it "
        "ends (kept.clear())",
    ),
}


@pytest.mark.parametrize("keep", REFUSED, ids=lambda keep: keep.__name__)
def test_what_cannot_be_kept_is_refused(keep: Any) -> None:
    line, text = REFUSED[keep]
    with pytest.raises(CaptureError) as refused:
        trained(keep, compiled=True, batches=(4, 4))
    at = f"{__file__}:{keep.__code__.co_firstlineno + line}"
    assert str(refused.value) == AT.format(line=at) + text


def test_a_tensor_that_another_place_holds_is_not_carried() -> None:
    def keep(net: Any, x: Any, h: Any) -> Any:
        h = h + net.center * net.slots[0]
        net.center = h.detach().mean(0)
        return h

    model, train, _ = trained(keep, compiled=True, batches=())
    model.center = model.slots[0]
    with pytest.raises(CaptureError, match="which the next call reads") as refused:
        train(torch.ones(4, 4))
    assert str(refused.value).endswith(UPDATE) and model.center is model.slots[0]


def test_one_tensor_in_two_places_may_become_two() -> None:
    results = []
    for compiled in (False, True):
        model, train, _ = trained(held_twice, compiled=compiled, batches=())
        model.center = model.slots[0]
        for k in range(5):
            if k == 3:
                model.center = torch.full((4,), 2.0)
            train(torch.full((4, 4), 0.5))
        results.append(dict(model.named_parameters()))
    assert_alike(*results)


def test_a_failed_call_keeps_nothing() -> None:
    def keep(net: Any, x: Any, h: Any) -> Any:
        net.kept = h
        return h * F.binary_cross_entropy(h.sigmoid(), x)

    model, train, _ = trained(keep, compiled=True, batches=())
    train(torch.full((4, 4), 0.5))
    before = model.kept
    with pytest.raises(amp_ir.errors.CheckFailedError):
        train(torch.full((4, 4), 1.5))
    assert model.kept is before


def test_a_skipped_step_keeps_what_it_computes() -> None:
    model = Net(in_attributes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = amp_ir.GradScaler(init_scale=2.0**120)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model.loss = model(x).square().mean()
        scaler.scale(1e6 * model.loss).backward()
        scaler.step(optimizer)
        scaler.update()

    train = amp_ir.jit(step, model=model, optimizer=optimizer, scaler=scaler, amp_dtype="float16")
    x = torch.ones(4, 4)
    train(x)
    assert train.compiled is not None and train.compiled.skipped
    torch.testing.assert_close(model.loss, model(x).square().mean().detach(), rtol=1e-2, atol=1e-3)


def test_a_length_that_is_padded_is_not_kept() -> None:
    def keep(net: Any, x: Any, h: Any) -> Any:
        net.kept = h

    with pytest.raises(PaddingError, match="what the step leaves in attribute 'kept'"):
        trained(keep, compiled=True, batches=(5,), buckets={"x": {0: (8,)}}, pad={"x": 0.0})


def test_a_converted_model_keeps_nothing() -> None:
    with pytest.raises(CaptureError) as refused:
        amp_ir.convert_model(Net(in_attributes), torch.ones(4, 4))
    assert str(refused.value) == (
        "the model keeps a tensor in attribute 'again' of module (the model itself), attribute "
        "'kept' of module (the model itself), attribute 'kept_mean' of module (the model itself), "
        "where a converted one puts none. Return it from forward, or clear the attribute at its end"
    )


class Pix2Pix(nn.Module):
    """The published model's way: every part of the step leaves its result in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = nn.Linear(4, 4), nn.Linear(8, 1)
        self.of_generator = torch.optim.Adam(self.generator.parameters(), 1e-2)
        self.of_judge = torch.optim.Adam(self.judge.parameters(), 1e-2)

    def criterion(self, prediction: torch.Tensor, *, is_real: bool) -> torch.Tensor:
        target = torch.ones_like(prediction) if is_real else torch.zeros_like(prediction)
        return F.binary_cross_entropy_with_logits(prediction, target)

    def forward(self) -> Any:
        self.fake_b = self.generator(self.real_a)

    def backward_of_judge(self) -> None:
        fake = torch.cat((self.real_a, self.fake_b), 1)
        self.loss_fake = self.criterion(self.judge(fake.detach()), is_real=False)
        real = torch.cat((self.real_a, self.real_b), 1)
        self.loss_real = self.criterion(self.judge(real), is_real=True)
        self.loss_judge = (self.loss_fake + self.loss_real) * 0.5
        self.loss_judge.backward()

    def backward_of_generator(self) -> None:
        fake = torch.cat((self.real_a, self.fake_b), 1)
        self.loss_gan = self.criterion(self.judge(fake), is_real=True)
        self.loss_l1 = F.l1_loss(self.fake_b, self.real_b) * 10
        self.loss_generator = self.loss_gan + self.loss_l1
        self.loss_generator.backward()

    def optimize_parameters(self, batch: dict[str, torch.Tensor]) -> None:
        self.real_a, self.real_b = batch["A"].to("cpu"), batch["B"].to("cpu")
        self.forward()
        self.judge.requires_grad_(True)
        self.of_judge.zero_grad()
        self.backward_of_judge()
        self.of_judge.step()
        self.judge.requires_grad_(False)
        self.of_generator.zero_grad()
        self.backward_of_generator()
        self.of_generator.step()


def test_pix2pix_as_it_is_published() -> None:
    logs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Pix2Pix()
        train: Any = model.optimize_parameters
        if compiled:
            optimizers = [model.of_generator, model.of_judge]
            train = amp_ir.jit(
                train, model=[model.generator, model.judge], optimizer=optimizers, amp_dtype=None
            )
        log = []
        for k in range(5):
            if k == 3:
                model.of_generator.param_groups[0]["lr"] = 5e-3
            generator = torch.Generator().manual_seed(k)
            batch = {key: torch.randn(8, 4, generator=generator) for key in "AB"}
            train(batch)
            named = {name: getattr(model, f"loss_{name}") for name in ("gan", "l1", "fake")}
            losses = {name: float(loss.detach()) for name, loss in named.items()}
            log.append({**losses, "image": model.fake_b.detach().clone()})
            assert model.real_b is batch["B"]
        logs.append((log, dict(model.named_parameters())))
        assert not compiled or not train.recompiles
    assert_alike(*logs)
