# SPDX-License-Identifier: Apache-2.0
"""Captured steps under a loss scale: PyTorch's sequence of scales, and steps as transactions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.errors import CaptureError, StateError
from amp_ir.ir.interpreter import interpret

INF, NAN = float("inf"), float("nan")


def scaler_like_pytorch(kind: type, **options: Any) -> torch.amp.GradScaler:
    """A scaler without limits, so that the sequence of scales is PyTorch's."""
    options = {"init_scale": 2.0**10, "growth_interval": 4, **options}
    if kind is amp_ir.GradScaler:
        options |= {"min_scale": None, "max_scale": None}
    return kind("cpu", **options)


@attrs.define(eq=False)
class Loop:
    """A model, its optimizer and its scaler; `step` is as a user writes it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    max_norm: float | None = None

    @classmethod
    def make(
        cls,
        build: Callable[[], nn.Module],
        optimizer: Callable[..., torch.optim.Optimizer],
        kind: type = amp_ir.GradScaler,
        max_norm: float | None = None,
        **options: Any,
    ) -> Loop:
        torch.manual_seed(0)
        model = build()
        return cls(
            model, optimizer(model.parameters()), scaler_like_pytorch(kind, **options), max_norm
        )

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.model(x), y)
        self.scaler.scale(loss).backward()
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def compiled(self, **options: Any) -> Any:
        return amp_ir.jit(
            self.step, model=self.model, optimizer=self.optimizer, scaler=self.scaler, **options
        )

    def state(self) -> dict[str, torch.Tensor]:
        """All that a skipped step must not change, copied."""
        tensors = dict(self.model.state_dict())
        for k, values in enumerate(self.optimizer.state.values()):
            tensors |= {f"{k}.{name}": value for name, value in values.items()}
        return {name: value.detach().clone() for name, value in tensors.items()}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
    )


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def batches(count: int, bad: set[int] = frozenset(), value: float = INF) -> Iterator[Any]:
    torch.manual_seed(1)
    for number in range(count):
        x, y = torch.randn(8, 6), torch.randn(8, 3)
        if number in bad:
            x[number % 8, number % 6] = value
        yield x, y


def same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return before.keys() == after.keys() and all(
        torch.equal(value, after[name]) for name, value in before.items()
    )


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["plain", "clipped"])
@pytest.mark.parametrize("kind", [amp_ir.GradScaler, torch.amp.GradScaler])
def test_hundreds_of_steps_with_overflows_are_those_of_pytorch(kind: type, max_norm: float | None):
    """float32: updates differ by roundings of sums, and training keeps them near for 300 steps."""
    generator = torch.Generator().manual_seed(5)
    bad = {k for k in range(300) if torch.rand((), generator=generator) < 0.15}
    ours = Loop.make(mlp, sgd, kind, max_norm)
    theirs = Loop.make(mlp, sgd, torch.amp.GradScaler, max_norm)
    train = ours.compiled()
    for number, (x, y) in enumerate(batches(300, bad, INF)):
        before = theirs.state()
        train(x, y)
        theirs.step(x, y)
        assert ours.scaler.get_scale() == theirs.scaler.get_scale(), number
        assert ours.scaler._get_growth_tracker() == theirs.scaler._get_growth_tracker(), number
        skipped = same(before, theirs.state())
        assert train.compiled.skipped == train.compiled.last.skipped == skipped == (number in bad)
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, theirs.model.state_dict()[name], rtol=1e-4, atol=1e-5)
    history = train.compiled.logs[0].history()
    assert [record.step for record in history if record.skipped] == sorted(bad)
    assert train.compiled.logs[0].skips == len(bad)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("build", [mlp, normed, dropped])
def test_a_skipped_step_never_happened(build: Any, optimizer: Any, value: float):
    saw, did_not = Loop.make(build, optimizer), Loop.make(build, optimizer)
    train, control = saw.compiled(), did_not.compiled()
    for number, (x, y) in enumerate(batches(6, {2, 4}, value)):
        before = saw.state()
        train(x, y)
        if number in (2, 4):
            assert same(before, saw.state()), number
        else:
            # The scale of the other run is that of this one: powers of two change no bit.
            control(x, y)
            assert same(saw.state(), did_not.state()), number
    assert train.compiled.logs[0].steps == 6


def test_the_record_of_a_step():
    loop = Loop.make(mlp, sgd)
    train = loop.compiled()
    (good, bad) = batches(2, {1})
    train(*good)
    reference = Loop.make(mlp, sgd, torch.amp.GradScaler)
    functional.mse_loss(reference.model(good[0]), good[1]).backward()
    norm = torch.linalg.vector_norm(
        torch.stack([p.grad.norm() for p in reference.model.parameters()])
    )
    record = train.compiled.last
    assert (record.step, record.skipped, record.scale) == (0, False, 1024.0)
    assert record.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    train(*bad)
    train(*bad)
    record = train.compiled.last
    assert (record.step, record.skipped, record.scale) == (2, True, 512.0)
    assert record.consecutive_skips == 2
    assert not torch.isfinite(torch.tensor(record.gradient_norm))


def test_the_ring_holds_1024_steps():
    weight = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    scaler = amp_ir.GradScaler("cpu", growth_interval=100, init_scale=1.0)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(weight(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    train = amp_ir.jit(step, model=weight, optimizer=optimizer, scaler=scaler)
    for _ in range(1030):
        train(torch.ones(1, 1))
    history = train.compiled.logs[0].history()
    assert [record.step for record in history] == list(range(6, 1030))
    assert history[-1] == train.compiled.last
    assert history[-1].scale == 2.0**10


def test_averaged_copies_and_random_numbers_keep_their_value():
    loop = Loop.make(dropped, adamw)
    average = copy.deepcopy(loop.model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loop.step(x, y)
        with torch.no_grad():
            for mean, value in zip(average.parameters(), loop.model.parameters(), strict=True):
                mean.lerp_(value, 0.1)
        return loss

    train = amp_ir.jit(
        step, model=[loop.model, average], optimizer=loop.optimizer, scaler=loop.scaler
    )
    for number, (x, y) in enumerate(batches(4, {1, 2})):
        before = {k: v.clone() for k, v in average.state_dict().items()}
        train(x, y)
        random_state = train.compiled.module.state["random_state"]
        assert same(before, dict(average.state_dict())) == (number in (1, 2))
        assert random_state.tolist()[1] == (1 if number < 3 else 2)


class Momentum(torch.optim.Optimizer):
    """SGD with momentum; `write` is how it changes its tensors."""

    def __init__(self, parameters: Any, write: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.write = write
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["m"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            m = self.state[p]["m"]
            if self.write == "data":
                m.data.mul_(0.9).add_(p.grad.data)
                p.data.add_(m.data, alpha=-0.1)
            elif self.write == "parts":
                for row in range(len(p)):
                    m[row] = 0.9 * m[row] + p.grad[row]
                    p[row] -= 0.1 * m[row]
            else:
                m.mul_(0.9)
                self.state[p]["m"] = m + p.grad
                p.data = p - 0.1 * self.state[p]["m"]


@pytest.mark.parametrize("write", ["data", "parts", "replaced"])
def test_a_skipped_step_writes_nothing_through_views_either(write: str):
    """`p.data`, rows, queues written by place, and optimizers that replace their state."""
    loop = Loop.make(mlp, lambda parameters: Momentum(parameters, write))
    loop.model.register_buffer("queue", torch.zeros(4, 6))
    loop.model.register_buffer("place", torch.zeros(1, dtype=torch.int64))
    average = torch.optim.swa_utils.AveragedModel(
        loop.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loop.step(x, y)
        loop.model.queue[loop.model.place] = x[:1]
        loop.model.place.view(-1)[0] += 1
        loop.model.place.detach().remainder_(4)
        average.update_parameters(loop.model)
        return loss

    train = amp_ir.jit(
        step, model=[loop.model, average], optimizer=loop.optimizer, scaler=loop.scaler
    )
    for number, (x, y) in enumerate(batches(6, {1, 3})):
        before = {k: v.clone() for k, v in average.state_dict().items()} | loop.state()
        train(x, y)
        after = dict(average.state_dict()) | loop.state()
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        assert train.skipped == (number in (1, 3))
        assert moved == ([] if train.skipped else list(before))


def test_gradients_cleared_through_views_stay_cleared():
    loop = Loop.make(mlp, sgd)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loop.scaler.scale(functional.mse_loss(loop.model(x), y)).backward()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        for parameter in loop.model.parameters():
            parameter.grad.data.zero_()

    for parameter in loop.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    train = amp_ir.jit(step, model=loop.model, optimizer=loop.optimizer, scaler=loop.scaler)
    for x, y in batches(4, {1, 2}):
        train(x, y)
        assert not any(parameter.grad.any() for parameter in loop.model.parameters())
    assert train.compiled.logs[0].skips == 2


def test_accumulation_keeps_the_scale_and_skips_the_effective_batch_once():
    """Three micro-batches an update, in two captured steps, against the same loop in PyTorch."""

    def loop_of(kind: type) -> tuple[Loop, Any, Any]:
        loop = Loop.make(mlp, sgd, kind, growth_interval=2)

        def accumulate(x: torch.Tensor, y: torch.Tensor) -> None:
            loop.scaler.scale(functional.mse_loss(loop.model(x), y) / 3).backward()

        def last(x: torch.Tensor, y: torch.Tensor) -> None:
            accumulate(x, y)
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
            loop.optimizer.zero_grad(set_to_none=False)

        for parameter in loop.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return loop, accumulate, last

    ours, our_accumulate, our_last = loop_of(amp_ir.GradScaler)
    theirs, accumulate, last = loop_of(torch.amp.GradScaler)
    options = {"model": ours.model, "optimizer": ours.optimizer, "scaler": ours.scaler}
    compiled = {False: amp_ir.jit(our_accumulate, **options), True: amp_ir.jit(our_last, **options)}
    for number, (x, y) in enumerate(batches(18, {4, 11})):
        is_last = number % 3 == 2
        compiled[is_last](x, y)
        (last if is_last else accumulate)(x, y)
        assert ours.scaler.get_scale() == theirs.scaler.get_scale(), number
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, theirs.model.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert all(torch.count_nonzero(p.grad) == 0 for p in ours.model.parameters())
    assert ours.scaler.log.skips == 2


def test_accumulated_gradients_survive_a_skipped_step_that_does_not_clear_them():
    loop = Loop.make(mlp, sgd)
    for parameter in loop.model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loop.scaler.scale(functional.mse_loss(loop.model(x), y)).backward()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()

    train = amp_ir.jit(step, model=loop.model, optimizer=loop.optimizer, scaler=loop.scaler)
    train(*next(batches(1, {0})))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in loop.model.parameters())


def test_two_optimizers_are_skipped_each_by_itself():
    """As in PyTorch: one scale for both, and only the one that overflowed is skipped."""

    def build(kind: type) -> tuple[Any, ...]:
        torch.manual_seed(0)
        first, second = mlp(), mlp()
        optimizers = sgd(first.parameters()), adamw(second.parameters())
        scaler = scaler_like_pytorch(kind)

        def step(x: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(functional.mse_loss(first(x), y)).backward()
            scaler.scale(functional.l1_loss(second(z), y)).backward()
            scaler.unscale_(optimizers[0])
            nn.utils.clip_grad_norm_(first.parameters(), 0.3)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

        return nn.ModuleList([first, second]), optimizers, scaler, step

    models, optimizers, scaler, step = build(amp_ir.GradScaler)
    reference, _, their_scaler, their_step = build(torch.amp.GradScaler)
    train = amp_ir.jit(step, model=list(models), optimizer=list(optimizers), scaler=scaler)
    torch.manual_seed(3)
    for bad_first, bad_second in itertools.product((False, True), repeat=2):
        x, z, y = torch.randn(8, 6), torch.randn(8, 6), torch.randn(8, 3)
        x[0, 0] = INF if bad_first else x[0, 0]
        z[1, 1] = NAN if bad_second else z[1, 1]
        train(x, z, y)
        their_step(x, z, y)
        assert scaler.get_scale() == their_scaler.get_scale()
        for name, value in models.state_dict().items():
            torch.testing.assert_close(
                value, reference.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name
            )


def test_several_updates_in_one_step():
    """Each is its own transaction, as in the loop that it is."""
    ours = Loop.make(normed, sgd)
    theirs = Loop.make(normed, sgd, torch.amp.GradScaler)

    def both(loop: Loop) -> Callable[..., None]:
        def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
            loop.step(x, y)
            loop.step(z, y)

        return step

    train = amp_ir.jit(both(ours), model=ours.model, optimizer=ours.optimizer, scaler=ours.scaler)
    stream = batches(6, {1, 2, 4, 5})
    for (x, y), (z, _) in zip(stream, stream, strict=True):
        train(x, y, z)
        both(theirs)(x, y, z)
        assert ours.scaler.get_scale() == theirs.scaler.get_scale()
    for (name, value), other in zip(
        ours.model.named_parameters(), theirs.model.parameters(), strict=True
    ):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6, msg=name)
    assert ours.model[1].num_batches_tracked.item() == 2
    assert torch.isfinite(ours.model[1].running_var).all()


@pytest.mark.parametrize("is_after", [False, True])
def test_a_replaced_buffer_is_kept_by_the_update_that_was_skipped(is_after: bool):
    """Of two updates in one step each rolls back its own, where a buffer is assigned anew too."""
    model = nn.Linear(4, 2)
    model.register_buffer("count", torch.zeros(1))
    optimizer = sgd(model.parameters())
    scaler = scaler_like_pytorch(amp_ir.GradScaler)

    def step(x: torch.Tensor, factors: torch.Tensor) -> None:
        for k in range(2):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean() * factors[k]).backward()
            if not is_after:
                model.count = model.count + 1 + k
            scaler.step(optimizer)
            scaler.update()
        if is_after:
            model.count = model.count + 1

    train = amp_ir.jit(step, model=model, optimizer=optimizer, scaler=scaler)
    cases = [(INF, 1.0), (1.0, INF), (1.0, 1.0), (INF, INF)]
    # What follows the last update belongs to it.
    added = [1, 0, 1, 0] if is_after else [2, 1, 3, 0]
    total = 0
    for factors, count in zip(cases, added, strict=True):
        train(torch.ones(2, 4), torch.tensor(factors))
        total += count
        assert model.count.item() == total, factors


def test_a_disabled_scaler_leaves_no_trace():
    without, disabled = Loop.make(mlp, sgd, enabled=False), Loop.make(mlp, sgd, enabled=False)

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        without.optimizer.zero_grad()
        loss = functional.mse_loss(without.model(x), y)
        loss.backward()
        without.optimizer.step()
        return loss.detach()

    batch = next(batches(1))
    expected, _ = amp_ir.trace_step(plain, batch, model=without.model, optimizer=without.optimizer)
    got, _ = amp_ir.trace_step(
        disabled.step, batch, model=disabled.model, optimizer=disabled.optimizer,
        scaler=disabled.scaler,
    )  # fmt: skip
    assert got.script() == expected.script()


def test_changed_options_of_a_scaler_capture_again():
    loop = Loop.make(mlp, sgd)
    stream = batches(4)
    train = loop.compiled()
    train(*next(stream))
    loop.scaler.set_growth_interval(2)
    train(*next(stream))
    assert loop.scaler.get_scale() == 2048.0
    mod, _ = amp_ir.trace_step(
        loop.step, next(stream), model=loop.model, optimizer=loop.optimizer, scaler=loop.scaler
    )
    fixed = amp_ir.compile(mod)
    loop.scaler.set_growth_factor(4.0)
    before = loop.state()
    with pytest.raises(StateError) as caught:
        fixed(*next(stream))
    assert str(caught.value) == (
        "the step is no longer as it was captured: growth_factor of scaler 0 was 2 and is 4. Call "
        "amp_ir.trace_step and amp_ir.compile again, or use amp_ir.jit, which does"
    )
    assert same(before, loop.state())


def test_without_a_scaler_there_is_no_record():
    model = mlp()
    optimizer = sgd(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = next(batches(1))
    mod, _ = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    train = amp_ir.compile(mod)
    assert not train.skipped
    with pytest.raises(StateError) as caught:
        _ = train.last
    assert str(caught.value) == (
        "the step has no loss scaler, so no step was checked or skipped; capture it with "
        "scaler=amp_ir.GradScaler() and call scale, step and update in it"
    )


def _refused(step: Callable[[Loop], Any], **options: Any) -> str:
    loop = Loop.make(mlp, sgd)
    before, scale = loop.state(), loop.scaler.get_scale()
    given: dict[str, Any] = {"scaler": loop.scaler, **options}
    with pytest.raises(CaptureError) as caught:
        amp_ir.trace_step(
            lambda x, y: step(loop, functional.mse_loss(loop.model(x), y)),
            next(batches(1)), model=loop.model, optimizer=loop.optimizer, **given,
        )  # fmt: skip
    assert same(before, loop.state())
    assert loop.scaler.get_scale() == scale
    assert not loop.scaler._per_optimizer_states
    return str(caught.value)


def _unscale_twice(loop: Loop, loss: torch.Tensor) -> None:
    loop.scaler.scale(loss).backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.unscale_(loop.optimizer)


def _step_twice(loop: Loop, loss: torch.Tensor) -> None:
    loop.scaler.scale(loss).backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.step(loop.optimizer)


def _update_without_step(loop: Loop, loss: torch.Tensor) -> None:
    loop.scaler.scale(loss).backward()
    loop.scaler.update()


def _no_update(loop: Loop, loss: torch.Tensor) -> None:
    loop.scaler.scale(loss).backward()
    loop.scaler.step(loop.optimizer)


def _no_step(loop: Loop, loss: torch.Tensor) -> None:
    loop.scaler.scale(loss).backward()
    loop.scaler.unscale_(loop.optimizer)


WRONG = [
    (
        _unscale_twice,
        "unscale_() has already been called on this optimizer since the last update()",
    ),
    (_step_twice, "step() has already been called since the last update()"),
    (_update_without_step, "No inf checks were recorded prior to update"),
    (_no_update, "the step calls scaler.step but ends before scaler.update()"),
    (_no_step, "the step calls scaler.unscale_ but ends before scaler.step and scaler.update()"),
]


@pytest.mark.parametrize(("step", "message"), WRONG)
def test_wrong_uses_are_refused_at_capture(step: Any, message: str):
    assert message in _refused(step)


def test_a_scaler_that_was_not_passed_is_refused():
    text = _refused(_step_twice, scaler=None)
    assert "a GradScaler that was not passed scales a loss. Pass it in scaler=" in text


def test_the_interpreter_runs_a_scaled_step():
    """The reference of the whole step: the compiled one gives the same scale and record."""
    loop = Loop.make(normed, adamw, max_norm=0.1)
    (x, y), bad = batches(2, {1})
    mod, _ = amp_ir.trace_step(
        loop.step, (x, y), model=loop.model, optimizer=loop.optimizer, scaler=loop.scaler
    )
    for batch in ((x, y), bad):
        names = [one.name for one in mod.signature.inputs]
        given = [
            (state.clone() if isinstance(state, torch.Tensor) else state())
            if (state := mod.state.get(name)) is not None
            else batch[int(name.removeprefix("batch"))]
            for name in names
        ]
        outputs = interpret(mod, given)
        amp_ir.compile(mod)(*batch)
        for spec, expected in zip(mod.signature.outputs, outputs, strict=True):
            if spec.updates is None or spec.name == "scaler0.ring":
                continue
            torch.testing.assert_close(
                mod.state[names[spec.updates]], expected, rtol=1e-4, atol=1e-6, msg=spec.name
            )
