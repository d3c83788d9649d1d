# SPDX-License-Identifier: Apache-2.0
"""Tiny trainings for the compile cache: the same step in every process, unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.runtime.step import CompiledStep


@attrs.define(eq=False)
class TinyTraining:
    """A multi-layer perceptron with dropout under an optimizer; `factor` is a constant in it."""

    amp_dtype: str | None = "bfloat16"
    factor: float = 0.5
    width: int = 8
    scaler: amp_ir.GradScaler | None = None
    model: nn.Module = attrs.field(init=False)
    optimizer: torch.optim.Optimizer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(6, self.width), nn.GELU(), nn.Dropout(0.25), nn.Linear(self.width, 2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train once; return the loss."""
        loss = functional.mse_loss(self.model(x) * self.factor, y)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def traced(self, rows: int = 4) -> amp_ir.StepModule:
        """Return the step after autocast."""
        options = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        mod, args = amp_ir.trace_step(self.step, batch(0, rows), **options)
        if self.amp_dtype is None:
            return mod
        return amp_ir.autocast(mod, args, amp_dtype=self.amp_dtype)

    def compiled(self, rows: int = 4, **options: Any) -> CompiledStep:
        """Return the compiled step."""
        return amp_ir.compile(self.traced(rows), **options)

    def train(self, steps: int = 4, **options: Any) -> tuple[CompiledStep, list[torch.Tensor]]:
        """Return the compiled step, and all that some steps of it compute and leave behind."""
        train = self.compiled(**options)
        found = [train(*batch(number)).clone() for number in range(steps)]
        found += [one.detach().clone() for one in self.model.parameters()]
        for state in self.optimizer.state.values():
            found += [one.clone() for one in state.values() if torch.is_tensor(one)]
        found += list(train.state_dict().values())
        if self.scaler is not None:
            found.append(torch.tensor(self.scaler.get_scale()))
        return train, found


def batch(number: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a step."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 2, generator=generator)


def entries(folder: Path) -> list[Path]:
    """Return the files of a cache's steps, without those of kernels."""
    return sorted(one for one in folder.iterdir() if one.is_file()) if folder.exists() else []


def is_loaded(step: CompiledStep) -> bool:
    """Return whether the step came from the cache."""
    return list(step.report.seconds)[-1] == "cache"
