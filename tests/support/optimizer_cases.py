# SPDX-License-Identifier: Apache-2.0
"""The optimizers of torch.optim with the options that change their steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)

from step_comparison import Training, integers, normal

CASES = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    (SGD, {"lr": torch.tensor(0.1), "momentum": 0.5, "foreach": True}),
    (Adam, {}),
    (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (Adam, {"foreach": True, "maximize": True}),
    (AdamW, {"fused": True}),
    (AdamW, {"lr": torch.tensor(1e-2)}),
    (AdamW, {"lr": 1e-2, "betas": (0.4, 0.8), "amsgrad": True, "maximize": True}),
    (RMSprop, {}),
    (RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    (Adagrad, {"lr": 0.1}),
    (Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.1}),
    (Adadelta, {}),
    (Adamax, {"lr": 0.1, "weight_decay": 0.01}),
    (NAdam, {"lr": 0.1}),
    (Rprop, {}),
    (RAdam, {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (RAdam, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.4, 0.5), "maximize": True}),
    (ASGD, {"lr": 0.1, "lambd": 0.1, "weight_decay": 0.1}),
    (ASGD, {"lr": 0.1, "t0": 2, "maximize": True}),
    (Adafactor, {"lr": 0.1}),
    (Adafactor, {"lr": 0.1, "eps": (1e-6, 0.1), "weight_decay": 0.1, "d": 1.5, "maximize": True}),
]


def training(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> Training:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    values = {k: v.clone() if torch.is_tensor(v) else v for k, v in options.items()}
    optimizer = kind(model.parameters(), **values)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(index, 5, 6), integers(index, 3, 5)


def change_hyper_parameters(trained: Training) -> None:
    """What schedulers do: other values, none of them zero."""
    for group in trained.optimizer.param_groups:
        if torch.is_tensor(group["lr"]):
            group["lr"].mul_(0.5)
        else:
            group["lr"] *= 0.5
        for key in ("weight_decay", "momentum", "alpha", "eps", "lr_decay"):
            if group.get(key) and not isinstance(group[key], tuple):
                group[key] *= 0.9
        if "betas" in group:
            group["betas"] = (group["betas"][0] * 0.9, group["betas"][1] * 0.95)


def name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else "-".join(value)  # type: ignore[arg-type]
