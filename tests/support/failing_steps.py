# SPDX-License-Identifier: Apache-2.0
"""Steps in which a library call fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn

import amp_ir
from amp_ir.demo.workloads import WORKLOADS


class InjectedError(RuntimeError):
    """What the tests make a call raise."""


@attrs.define
class Case:
    """A compiled step that has run once, and all that it works on."""

    train: amp_ir.CompiledStep
    batch: tuple[torch.Tensor, ...]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any = None

    @property
    def calls(self) -> tuple[Any, ...]:
        return self.train.report.plan.calls

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that a step may write: state, random state, log, gradients."""
        found = dict(self.train.program.state())
        found |= {f"grad {k}": p.grad for k, p in enumerate(self.model.parameters())
                  if p.grad is not None}  # fmt: skip
        return found

    def bits(self) -> dict[str, torch.Tensor]:
        return {name: one.detach().clone() for name, one in self.tensors().items()}

    def put_back(self, bits: dict[str, torch.Tensor]) -> None:
        """As `load_state_dict` of a model does, for all of the state and without a new capture."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(bits[name])


def compiled(step: Callable[..., Any], batch: Any, model: nn.Module, optimizer: Any,
             scaler: Any = None, amp_dtype: str | None = None) -> Case:  # fmt: skip
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer, scaler=scaler)
    if amp_dtype:
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    case = Case(amp_ir.compile(mod), batch, model, optimizer, scaler)
    case.train(*batch)
    return case


def scaled() -> Case:
    """Dropout, BatchNorm, a loss scale and its log, AdamW, gradients that stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = amp_ir.GradScaler("cpu")

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return compiled(step, (torch.randn(4, 8),), model, optimizer, scaler, "float16")


@functools.cache
def case_of(name: str) -> Case:
    if name == "scaled":
        return scaled()
    training = WORKLOADS[name].make(small=True)
    return compiled(training.step, training.batch, training.model, training.optimizer)


def different(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    assert before.keys() == after.keys()
    as_bytes = {name: (one.reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8))
                for name, one in before.items()}  # fmt: skip
    return [name for name, (a, b) in as_bytes.items() if not torch.equal(a, b)]


def linear_step(momentum: float = 0.9) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model, optimizer
