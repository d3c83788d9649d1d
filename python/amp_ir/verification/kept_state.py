# SPDX-License-Identifier: Apache-2.0
"""Run PyTorch code on the user's objects, and put their state back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from amp_ir.ir.step_log import StepLog
from amp_ir.runtime.random_state import random_state, set_random_state
from amp_ir.verification.recorded_step import Owners


@contextlib.contextmanager
def kept_state(owners: Owners, scaler: Any, others: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Restore parameters, buffers, gradients, optimizers, scalers and random generators.

    So are `others`, tensors elsewhere that the step is known to use. Tensors keep their memory and
    identity. What else a step changes in Python is not known here.
    """
    tensors = [*_tensors(owners), *others]
    values = [one.detach().clone() for one in tensors]
    parameters = [one for model in owners.models for one in model.parameters()]
    gradients = [(one.grad, None if one.grad is None else one.grad.clone()) for one in parameters]
    optimizers = [_optimizer_state(one) for one in owners.optimizers]
    generators = random_state()
    try:
        with kept_scalers(scaler):
            yield
    finally:
        with torch.no_grad():
            for one, value in zip(tensors, values, strict=True):
                one.copy_(value)
            for one, (gradient, kept) in zip(parameters, gradients, strict=True):
                one.grad = gradient
                if gradient is not None and kept is not None:
                    gradient.copy_(kept)
            for optimizer, (state, groups) in zip(owners.optimizers, optimizers, strict=True):
                _restore_optimizer(optimizer, state, groups)
        set_random_state(generators)


@contextlib.contextmanager
def kept_scalers(scaler: Any) -> Iterator[None]:
    """Restore a loss scaler, or a list of them."""
    scalers = scaler if isinstance(scaler, list | tuple) else [] if scaler is None else [scaler]
    states = [_attributes(one) for one in scalers]
    try:
        yield
    finally:
        for one, attributes in zip(scalers, states, strict=True):
            _restore_attributes(one, attributes)


def _tensors(owners: Owners) -> Iterator[torch.Tensor]:
    for model in owners.models:
        yield from model.parameters()
        yield from model.buffers()


def _optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    state = {
        parameter: {
            key: (value, value.clone() if torch.is_tensor(value) else None)
            for key, value in entries.items()
        }
        for parameter, entries in optimizer.state.items()
    }
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return state, groups


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: Any, groups: Any) -> None:
    for parameter in list(optimizer.state):
        if parameter not in state:
            del optimizer.state[parameter]
    for parameter, entries in state.items():
        now = optimizer.state[parameter]
        now.clear()
        for key, (held, value) in entries.items():
            if value is not None:
                held.copy_(value)
            now[key] = held
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group.update(before)


def _attributes(scaler: Any) -> dict[str, tuple[Any, Any]]:
    found = {}
    for name, value in vars(scaler).items():
        copies = [(one, one.clone()) for one in _tensors_in(value)]
        found[name] = (dict(value) if name == "_per_optimizer_states" else value, copies)
    return found


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a scaler's attribute that a step writes to in place."""
    if isinstance(value, StepLog):
        return [value.ring, value.counts]
    return [value] if torch.is_tensor(value) else []


def _restore_attributes(scaler: Any, attributes: dict[str, tuple[Any, Any]]) -> None:
    for name in list(vars(scaler)):
        if name not in attributes:
            delattr(scaler, name)
    for name, (held, copies) in attributes.items():
        for tensor, value in copies:
            tensor.copy_(value)
        if name == "_per_optimizer_states":
            # A defaultdict, which stays one.
            vars(scaler)[name].clear()
            vars(scaler)[name].update(held)
        else:
            setattr(scaler, name, held)
