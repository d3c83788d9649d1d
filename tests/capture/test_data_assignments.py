# SPDX-License-Identifier: Apache-2.0
"""Steps that assign `p.data`, three calls beside eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._pytree import tree_leaves

import amp_ir
from amp_ir.errors import CaptureError
from scaled_training import line_of

Nets = tuple[nn.Linear, nn.Linear]


def put_back(a: nn.Linear, _b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Perturb the weights, as adversarial training does, and put them back without a copy."""
    backup = {name: p.data for name, p in a.named_parameters()}
    for p in a.parameters():
        p.data = p.data + 0.1
    moved = a(x).detach()
    for name, p in a.named_parameters():
        p.data = backup[name]
    return moved


def put_back_detached(a: nn.Linear, _b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    before = a.weight.detach()
    a.weight.data = a.weight * 2
    moved = a(x).detach()
    a.weight.data = before
    return moved


def swap(a: nn.Linear, b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        p.data, q.data = q.data, p.data
    return a(x).detach()


def swap_and_return(a: nn.Linear, b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Evaluate with other weights, such as averaged ones."""
    seen = swap(a, b, x)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        kept = p.data
        p.data = q.data
        q.data = kept
    return seen


def write_to_what_was_taken(a: nn.Linear, _b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    taken = a.weight.data
    a.weight.data = a.weight.data * 2
    taken.add_(1.0)
    return taken.clone()


def put_back_views(a: nn.Linear, _b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    backup = {name: p.data.view(p.shape)[:] for name, p in a.named_parameters()}
    for p in a.parameters():
        p.data = p.data + 0.1
    moved = a(x).detach()
    for name, p in a.named_parameters():
        p.data = backup[name]
    return moved


def read_what_was_assigned(a: nn.Linear, _b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What the step makes and assigns changes with the parameter, and the parameter with it."""
    made = a.weight.data.clone()
    seen = made.detach()
    a.weight.data = made
    with torch.no_grad():
        a.weight.mul_(0.9)
    made.add_(0.1)
    return torch.stack([made, seen, a.weight.detach()]) * a(x).mean().detach()


def average(a: nn.Linear, b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        q.data = q.data * 0.9 + p.data * 0.1
    return b(x).detach()


def assign_itself(a: nn.Linear, _b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    a.weight.data = a.weight.data
    return a(x).detach()


def run(change: Callable[..., torch.Tensor], *, is_ours: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(a(x), y) + 2 * F.cross_entropy(b(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), change(a, b, x)

    call = amp_ir.jit(step, model=[a, b], optimizer=optimizer) if is_ours else step
    found: list[torch.Tensor] = []
    for _ in range(3):
        found += call(torch.randn(6, 4), torch.randint(0, 4, (6,)))
    return [*found, *(p.detach() for p in (*a.parameters(), *b.parameters()))]


CHANGES = [
    put_back,
    put_back_detached,
    swap,
    swap_and_return,
    write_to_what_was_taken,
    put_back_views,
    read_what_was_assigned,
    average,
    assign_itself,
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_assignment_leaves_the_old_numbers_where_they_were_taken(
    change: Callable[..., torch.Tensor],
) -> None:
    expected = run(change, is_ours=False)
    for one, other in zip(run(change, is_ours=True), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_parameters_that_share_memory_after_the_step_are_refused() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        b.weight.data = a.weight.data
        return b(x).detach()

    with pytest.raises(CaptureError, match="assigns the data of one of weight and model1.weight"):
        amp_ir.jit(step, model=[a, b])(torch.randn(2, 4))


def sam(a: nn.Linear, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """Perturb the weights, and put back what the optimizer's state has, as SAMs do."""
    moved = torch.zeros(())
    for p in a.parameters():
        old = optimizer.state[p].get("old")
        moved = moved if old is None else moved + (p - old).detach().abs().sum()
        optimizer.state[p]["old"] = p.data.clone()
        p.data.add_(0.1)
    a(x).square().mean().backward()
    for p in a.parameters():
        p.data = optimizer.state[p]["old"]
    optimizer.step()
    optimizer.zero_grad()
    return moved


def trained_by_sam(*, is_ours: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    a = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(a.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        return sam(a, optimizer, x)

    call = amp_ir.jit(step, model=a, optimizer=optimizer) if is_ours else step
    moved = [call(torch.randn(6, 4)) for _ in range(3)]
    return [*moved, *(one["old"] for one in optimizer.state.values()), *a.parameters()]


def test_state_that_a_step_puts_in_place_is_updated_with_the_parameter() -> None:
    pairs = zip(trained_by_sam(is_ours=True), trained_by_sam(is_ours=False), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_of_the_batch", [True, False])
def test_given_tensors_that_are_assigned_and_then_trained_are_refused(
    is_of_the_batch: bool,
) -> None:
    a, outside = nn.Linear(4, 4), torch.randn(4, 4)
    optimizer = torch.optim.SGD(a.parameters(), lr=0.1)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a.weight.data = weight.view(4, 4) if is_of_the_batch else outside
        loss = a(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=a, optimizer=optimizer)
    with pytest.raises(CaptureError, match="given to the data of weight, and writes to it, which"):
        train(torch.randn(2, 4), torch.randn(4, 4))


def test_a_given_tensor_that_is_only_read_may_be_assigned() -> None:
    a = nn.Linear(4, 4)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a.weight.data = weight
        return a(x).detach()

    x, weight = torch.randn(2, 4), torch.randn(4, 4)
    found = amp_ir.jit(step, model=a)(x, weight)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, a.bias).detach())
    assert torch.equal(a.weight, weight)


def test_state_of_an_optimizer_that_is_assigned_is_refused() -> None:
    a = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(a.parameters(), lr=0.1)
    optimizer.state[a.weight]["old"] = a.weight.detach().clone()

    def step(x: torch.Tensor) -> torch.Tensor:
        a.weight.data = optimizer.state[a.weight]["old"]
        return a(x).detach()

    with pytest.raises(CaptureError, match=r"one of weight and optimizer0\.weight\.old to the"):
        amp_ir.jit(step, model=a, optimizer=optimizer)(torch.randn(2, 4))


def flat_of(net: nn.Module) -> torch.Tensor:
    """Make the parameters views of one tensor, which is returned."""
    flat = parameters_to_vector(net.parameters())
    vector_to_parameters(flat, net.parameters())
    return flat.detach()


def read_flat(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    flat = flat_of(net)
    loss = trained(net, optimizer, x)
    return loss, flat.square().sum(), flat[3:9].clone()


def write_flat(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    flat = flat_of(net)
    loss = trained(net, optimizer, x)
    flat.mul_(0.9)
    return loss, net(x).detach()


def split_flat(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    flat = torch.cat([p.data.reshape(-1) for p in net.parameters()])
    parts = flat.split([p.numel() for p in net.parameters()])
    for p, part in zip(net.parameters(), parts, strict=True):
        p.data = part.view_as(p)
    return trained(net, optimizer, x), flat.clone()


def stack_of_rows(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    """Weights that are rows and entries of larger tensors, with a write by several rows."""
    first, second = (layer for layer in net.modules() if isinstance(layer, nn.Linear))
    rows = torch.cat([first.weight.data, second.weight.data])
    first.weight.data, second.weight.data = rows[:4], rows[4:]
    stack = torch.stack([first.bias.data, second.bias.data])
    first.bias.data, second.bias.data = stack[0], stack[1]
    loss = trained(net, optimizer, x)
    rows[2:6].add_(0.1)
    return loss, stack.clone(), rows.clone()


def between_the_passes(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    """What the backward pass has saved keeps its memory; gradients of weights read the new."""
    loss = net(x).square().mean() + sum(p.square().sum() for p in net.parameters())
    for p in net.parameters():
        p.data = p.data * 0.9
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def low_copies(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    """Evaluate with bfloat16 weights, and put the others back."""
    kept = [p.data for p in net.parameters()]
    for p in net.parameters():
        p.data = p.data.bfloat16()
    seen = net(x.bfloat16()).float().detach()
    for p, value in zip(net.parameters(), kept, strict=True):
        p.data = value
    return seen, trained(net, optimizer, x)


def data_of_gradients(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    net(x).square().mean().backward()
    for p in net.parameters():
        assert p.grad is not None
        p.grad.data = p.grad.data * 2
    optimizer.step()
    optimizer.zero_grad()
    return net(x).detach()


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


STEPS = [
    read_flat,
    write_flat,
    split_flat,
    stack_of_rows,
    between_the_passes,
    low_copies,
    data_of_gradients,
]


def run_step(step: Callable[..., Any], *, is_ours: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def call(x: torch.Tensor) -> Any:
        return step(net, optimizer, x)

    run = amp_ir.jit(call, model=net, optimizer=optimizer) if is_ours else call
    found: list[torch.Tensor] = []
    for _ in range(3):
        found += [one.clone() for one in tree_leaves(run(torch.randn(6, 4)))]
    return [*found, *(p.detach() for p in net.parameters())]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_is_assigned_shares_memory_within_the_step(step: Callable[..., Any]) -> None:
    pairs = zip(run_step(step, is_ours=True), run_step(step, is_ours=False), strict=True)
    for one, other in pairs:
        rtol, atol = (2e-2, 2e-2) if step is low_copies else (1e-5, 1e-6)
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def test_a_flat_tensor_of_parameters_is_not_copied_for_each_of_them() -> None:
    def calls(*, is_flat: bool) -> int:
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        optimizer = torch.optim.AdamW(net.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            if is_flat:
                flat_of(net)
            return trained(net, optimizer, x)

        mod, _ = amp_ir.trace_step(step, (torch.randn(2, 4),), model=net, optimizer=optimizer)
        return len(amp_ir.compile(mod).report.plan.calls)

    assert calls(is_flat=True) <= calls(is_flat=False)


def test_a_skipped_step_puts_back_what_it_trains_in_a_flat_tensor() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = amp_ir.GradScaler(init_scale=4.0)

    def step(x: torch.Tensor) -> Any:
        flat = flat_of(net)
        scaler.scale(net(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return flat

    train = amp_ir.jit(step, model=net, optimizer=optimizer, scaler=scaler)
    state = [{k: v.clone() for k, v in net.state_dict().items()}]
    for scale in (1.0, math.inf, 1.0):
        flat = train(scale * torch.randn(6, 4))
        state.append({k: v.clone() for k, v in net.state_dict().items()})
        torch.testing.assert_close(flat, parameters_to_vector(net.parameters()).detach())
    assert all(torch.equal(state[1][key], state[2][key]) for key in state[1])
    assert not torch.equal(state[2]["2.weight"], state[3]["2.weight"])


def test_views_that_overlap_are_refused() -> None:
    net = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        net.bias.data = net.weight.data.flatten()[2:6]
        return net(x).detach()

    with pytest.raises(CaptureError, match=r"assigns the data of one of weight and bias to the"):
        amp_ir.jit(step, model=net)(torch.randn(2, 4))


@pytest.mark.parametrize("value", [torch.zeros(1), torch.zeros(4, dtype=torch.float64)])
def test_another_shape_or_dtype_at_the_end_is_refused(value: torch.Tensor) -> None:
    net = nn.Linear(4, 4)

    def step() -> torch.Tensor:
        net.bias.data = torch.zeros_like(value)  # here
        return net.weight.detach().clone()

    with pytest.raises(CaptureError) as error:
        amp_ir.jit(step, model=net)()
    assert f"{line_of(step, 'here')}: leaves data of shape {tuple(value.shape)}" in str(error.value)


def test_what_is_expanded_may_be_assigned_and_not_written() -> None:
    for writes in (False, True):
        net = nn.Linear(4, 4)

        def step(net: nn.Linear = net, *, writes: bool = writes) -> torch.Tensor:
            row = torch.arange(4.0)
            net.weight.data = row.expand(4, 4)
            if writes:
                row.add_(net.weight.data[0].add_(1.0))
            return net.weight.detach().clone()

        train = amp_ir.jit(step, model=net)
        if writes:
            with pytest.raises(CaptureError, match="one number for several elements, as of expand"):
                train()
        else:
            assert torch.equal(train(), torch.arange(4.0).expand(4, 4))
