# SPDX-License-Identifier: Apache-2.0
"""Ways to train that PyTorch's own tools offer, three steps beside eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import amp_ir
from huggingface_models import distilbert

TIGHT: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}  # float32, three steps, sums of few products


def batch(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(6, 4, generator=generator)
    return x, torch.randint(0, 3, (6,), generator=generator)


def trained(make: Callable[[], tuple[Any, Any, Any]], *, is_ours: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    models, optimizers, step = make()
    call = amp_ir.jit(step, model=models, optimizer=optimizers) if is_ours else step
    losses = [call(*batch(k)).detach() for k in range(3)]
    state = [one for model in models for one in model.state_dict().values()]
    return [*losses, *(one.detach() for one in state)]


def assert_as_eager(make: Callable[[], tuple[Any, Any, Any]]) -> None:
    for one, other in zip(trained(make, is_ours=True), trained(make, is_ours=False), strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def own_average(old: torch.Tensor, new: torch.Tensor, count: Any) -> torch.Tensor:
    return old + (new - old) / (count + 1)


AVERAGES: dict[str, dict[str, Any]] = {
    "equal weights": {},
    "a function": {"avg_fn": own_average},
    "a moving average": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "buffers too": {"use_buffers": True, "avg_fn": own_average},
    # At the count 0 its result is not finite, and not taken.
    "divides by the count": {"avg_fn": lambda old, new, count: old + (new - old) / count},
}


@pytest.mark.parametrize("name", AVERAGES)
def test_an_averaged_model_inside_of_the_step(name: str) -> None:
    def make() -> tuple[Any, Any, Any]:
        model = net()
        mean = swa_utils.AveragedModel(model, **AVERAGES[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(model)
            return loss

        return [model, mean], optimizer, step

    assert_as_eager(make)


def test_gradients_of_torch_func() -> None:
    def make() -> tuple[Any, Any, Any]:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            weights = {name: p.detach() for name, p in model.named_parameters()}
            grads, loss = torch.func.grad_and_value(loss_of)(weights, x, y)
            for name, parameter in model.named_parameters():
                parameter.grad = grads[name]
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return [model], optimizer, step

    assert_as_eager(make)


@pytest.mark.parametrize("activation", [torch.sin, torch.tanh, torch.exp])
def test_second_derivatives_of_each_row_by_a_hessian(activation: Any) -> None:
    """As physics-informed networks take them; forward mode has zeros without memory."""

    def make() -> tuple[Any, Any, Any]:
        inner, outer = nn.Linear(4, 5), nn.Linear(5, 3)
        optimizer = torch.optim.SGD([*inner.parameters(), *outer.parameters()], lr=0.01)

        def value(row: torch.Tensor) -> torch.Tensor:
            return outer(activation(inner(row))).sum()

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            curvature = torch.func.vmap(torch.func.hessian(value))(x)
            residual = curvature.diagonal(dim1=1, dim2=2).sum(1) - y
            slope = torch.func.vmap(torch.func.jacfwd(torch.func.grad(lambda z: z.sin().sum())))(x)
            loss = residual.square().mean() + slope.sum(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return [inner, outer], optimizer, step

    assert_as_eager(make)


def test_gradients_of_each_row_by_vmap() -> None:
    def make() -> tuple[Any, Any, Any]:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = torch.func.functional_call(model, weights, (x[None],))
            return nn.functional.cross_entropy(logits, y[None])

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            weights = {name: p.detach() for name, p in model.named_parameters()}
            rows = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)
            norms = torch.stack([one.flatten(1).norm(dim=1) for one in rows.values()]).norm(dim=0)
            for name, parameter in model.named_parameters():
                scaled = rows[name] / norms.clamp(min=1.0).reshape(-1, *[1] * parameter.dim())
                parameter.grad = scaled.mean(0)
            optimizer.step()
            optimizer.zero_grad()
            return norms.mean()

        return [model], optimizer, step

    assert_as_eager(make)


def test_an_optimizer_for_each_parameter_that_steps_in_backward() -> None:
    def make() -> tuple[Any, Any, Any]:
        model = net()
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def hook(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return [model], list(optimizers.values()), step

    assert_as_eager(make)


def clamped(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-2, 1e-2)


def replaced(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


@pytest.mark.parametrize("hook", [clamped, replaced])
def test_a_hook_changes_what_was_accumulated(hook: Any) -> None:
    def make() -> tuple[Any, Any, Any]:
        model = net()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return [model], optimizer, step

    assert_as_eager(make)


class MakesActivation(nn.Module):
    """A module that makes another at each call, as transformers' poolers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OwnActivation(0.5)(self.inner(x))


class OwnActivation(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.factor


def test_a_module_that_is_made_inside_of_the_step() -> None:
    def make() -> tuple[Any, Any, Any]:
        model = MakesActivation()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return [model], optimizer, step

    assert_as_eager(make)


def test_grouped_matmuls_of_a_mixture_of_experts() -> None:
    """Rows are sorted by their expert, whose matmuls are one call, as in transformers."""

    def make() -> tuple[Any, Any, Any]:
        model = nn.ParameterDict({
            "route": nn.Parameter(torch.randn(4, 3) * 0.3),
            "experts": nn.Parameter(torch.randn(3, 4, 4) * 0.3),
        })  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            share, expert = torch.softmax(x @ model["route"], 1).max(1)
            order = expert.argsort(stable=True)
            counts = nn.functional.one_hot(expert, 3).sum(0)
            ends = counts.cumsum(0).to(torch.int32)
            rows = torch._grouped_mm(x[order], model["experts"], offs=ends)
            out = torch.zeros_like(rows).index_add(0, order, rows * share[order, None])
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return [model], optimizer, step

    assert_as_eager(make)


def test_a_module_that_is_converted_to_its_own_dtype() -> None:
    def make() -> tuple[Any, Any, Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model.to(torch.float32)(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return [model], optimizer, step

    assert_as_eager(make)


def test_hidden_states_of_a_model_that_was_not_called_before() -> None:
    """transformers puts its hooks on a model at the first call, which is the captured one."""

    def make() -> tuple[Any, Any, Any]:
        model, inputs = distilbert()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
            out = model(**inputs, output_hidden_states=True)
            loss = torch.stack(out.hidden_states).square().mean() * x.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return [model], optimizer, step

    assert_as_eager(make)


@pytest.mark.parametrize("amp_dtype", [None, "float16"])
def test_gradients_of_several_batches_before_an_update_of_its_own(amp_dtype: str | None) -> None:
    """The update is a step without arguments; it takes the gradients that the other one left."""

    def trained_in_two(*, is_ours: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = amp_ir.GradScaler("cpu", enabled=is_ours and amp_dtype is not None)

        def accumulate(x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), classes) / 2
            scaler.scale(loss).backward()
            return loss.detach()

        def update() -> torch.Tensor:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return norm.detach()

        options = {"model": model, "optimizer": optimizer, "scaler": scaler, "amp_dtype": amp_dtype}
        calls = [amp_ir.jit(one, **options) if is_ours else one for one in (accumulate, update)]
        found = []
        for k in range(3):
            found += [calls[0](*batch(2 * k)), calls[0](*batch(2 * k + 1)), calls[1]()]
        return [*found, *(one.detach() for one in model.parameters())]

    # float16 has 11 bits; AdamW divides by gradients, whose rounding moves weights by parts of lr.
    near = TIGHT if amp_dtype is None else {"rtol": 5e-3, "atol": 5e-3}
    pairs = zip(trained_in_two(is_ours=True), trained_in_two(is_ours=False), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, **near)
