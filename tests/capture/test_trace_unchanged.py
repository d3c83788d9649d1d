# SPDX-License-Identifier: Apache-2.0
"""A capture leaves model, optimizer and generators exactly as they were, also when it fails."""

from __future__ import annotations

import copy
import math
import random
import sys
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ir.capture.trace import capture_step
from amp_ir.errors import AmpIrError
from captured_runner import CapturedRunner
from step_comparison import integers, normal

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
FAULTS = (
    "none", "item", "raise", "interrupt", "write", "closure", "object", "lr", "counter", "list",
    "leak", "draw", "array draw", "toggle",
)  # fmt: skip
outside = torch.zeros(3)


class Remembering(torch.nn.Module):
    """Writes to Python attributes as well as to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2)
        )
        self.head = torch.nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.calls, self.history, self.last = 0, [], None
        self.fault, self.batch_size = "none", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.layers(x))
        self.mean = self.mean * 0.9 + y.detach().mean(0)
        self.batch_size = len(x)
        if self.fault == "counter":
            self.calls += 1
        if self.fault == "list":
            self.history.append(y)
        if self.fault == "leak":
            self.last = self.head.weight[0]
        return y


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a capture might touch: identities, values bit for bit, flags."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    parameters = list(model.parameters())
    return {
        "identities": [(name, id(tensor), tensor.data_ptr()) for name, tensor in tensors],
        "values": [tensor.detach().clone() for _, tensor in tensors],
        "gradients": [(id(p.grad), p.grad is None) for p in parameters],
        "gradient_values": [p.grad.clone() for p in parameters if p.grad is not None],
        "flags": [(p.requires_grad, p._version, len(p._backward_hooks or ())) for p in parameters],
        "training": [module.training for module in model.modules()],
        "attributes": [
            {k: id(v) for k, v in vars(module).items()} for module in model.modules()
        ],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "history": list(model.history),
        "groups": [
            {k: id(v) if torch.is_tensor(v) else copy.copy(v) for k, v in group.items()}
            for group in optimizer.param_groups
        ],
        "group_parameters": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        "optimizer_attributes": {k: id(v) for k, v in vars(optimizer).items()},
        "state_identities": [
            (id(p), {k: id(v) for k, v in values.items()}) for p, values in optimizer.state.items()
        ],
        "state": copy.deepcopy(list(optimizer.state.values())),
        "random": (torch.get_rng_state(), random.getstate(), numpy.random.get_state()),
        "pytorch": (
            torch.nn.Module.__call__, torch.nn.Module.zero_grad, torch.optim.Optimizer.zero_grad,
            torch.nn.functional.scaled_dot_product_attention, math.sqrt,
            sys.modules["torch.optim.adam"]._get_value,
            torch.optim.lr_scheduler.LRScheduler.step, torch.utils.checkpoint.CheckpointFunction,
            torch.is_grad_enabled(), torch._C._get_mkldnn_enabled(), outside.sum().item(),
            torch.backends.mha.get_fastpath_enabled(),
        ),
    }  # fmt: skip


def same(first: Any, second: Any) -> bool:
    """Deep equality, bit for bit for tensors and arrays."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, numpy.ndarray):
        return numpy.array_equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def disturb(fault: str, model: Any, optimizer: Any, loss: torch.Tensor) -> None:
    """What a step should not do, after its backward pass."""
    if fault == "item":
        float(loss)
    elif fault == "raise":
        raise ValueError("the user's own")
    elif fault == "interrupt":
        raise KeyboardInterrupt
    elif fault == "write":
        outside.add_(1.0)
    elif fault == "lr":
        optimizer.param_groups[0]["lr"] = 3.0
    elif fault == "draw":
        random.random()
    elif fault == "array draw":
        numpy.random.rand()
    elif fault == "toggle":
        model.train(mode=not model.training)


def make_step(model: Any, optimizer: Any, fault: str, clears: bool) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        torch.rand(2)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        disturb(fault, model, optimizer, loss)
        optimizer.step(*((lambda: loss,) if fault == "closure" else ()))
        if clears:
            optimizer.zero_grad()
        torch.set_grad_enabled(False)
        return object() if fault == "object" else loss

    return step


@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    fault=st.sampled_from(FAULTS),
    eager_steps=st.integers(0, 1),
    clears=st.booleans(),
    frozen=st.booleans(),
    holds_graph=st.booleans(),
)
def test_nothing_is_changed_by_a_capture(
    kind: str, fault: str, eager_steps: int, clears: bool, frozen: bool, holds_graph: bool
) -> None:
    model = Remembering()
    model.fault = fault
    model.head.bias.requires_grad_(not frozen)
    optimizer = OPTIMIZERS[kind](model.parameters())
    batch = normal(0, 4, 6), integers(0, 3, 4)
    for _ in range(eager_steps):
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    held = model(batch[0]).sum() if holds_graph else None
    before = snapshot(model, optimizer)
    try:
        capture_step(
            make_step(model, optimizer, fault, clears), batch, model=model, optimizer=optimizer
        )
        assert fault in ("none", "write", "closure", "toggle")
    except (AmpIrError, KeyboardInterrupt):
        assert fault not in ("none", "write", "closure", "toggle")
    after = snapshot(model, optimizer)
    for key in before:
        assert same(before[key], after[key]), key
    if held is not None:
        held.backward()  # the user's own graph still works


def test_a_failed_capture_does_not_spoil_the_next() -> None:
    model = Remembering()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    batch = normal(0, 4, 6), integers(0, 3, 4)
    for fault in ("item", "raise"):
        with pytest.raises(AmpIrError):
            step = make_step(model, optimizer, fault, clears=True)
            capture_step(step, batch, model=model, optimizer=optimizer)
    captured = capture_step(
        make_step(model, optimizer, "none", clears=True), batch, model=model, optimizer=optimizer
    )
    assert not captured.hooks.recompile_reason()
    assert CapturedRunner(captured)(*batch).isfinite()
