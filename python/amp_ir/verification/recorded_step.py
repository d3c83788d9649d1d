# SPDX-License-Identifier: Apache-2.0
"""A user's step whose gradients, as the optimizer sees them, are among its results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from amp_ir.ir.bare_tensors import with_bare_tensors


@attrs.frozen(eq=False)
class Owners:
    """The models and optimizers of a step."""

    models: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]

    @classmethod
    def of(cls, model: Any, optimizer: Any) -> Owners:
        """Take them as `trace_step` does: one, a list, or None."""
        optimizers = _listed(optimizer)
        return cls(tuple(with_bare_tensors(_listed(model), optimizers)), optimizers)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters under the names that a capture gives them."""
        return {
            f"model{number}.{name}" if number else name: one
            for number, model in enumerate(self.models)
            for name, one in model.named_parameters()
        }


def _listed(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def recorded(step: Callable[..., Any], owners: Owners) -> Callable[..., Any]:
    """Return the step that returns (its result, its gradients by the parameter's name).

    A gradient is what `optimizer.step` reads: unscaled, clipped and summed. What no optimizer reads
    is the gradient that the step leaves. It may be captured, or called as it is.
    """

    @functools.wraps(step)
    def with_gradients(*batch: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        found: dict[str, torch.Tensor] = {}
        names = {id(one): name for name, one in owners.parameters().items()}

        def note(optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
            for group in optimizer.param_groups:
                for one in group["params"]:
                    if one.grad is not None and id(one) in names:
                        found[names[id(one)]] = one.grad.clone()

        hooks = [one.register_step_pre_hook(note) for one in owners.optimizers]
        try:
            result = step(*batch)
        finally:
            for hook in hooks:
                hook.remove()
        for name, one in owners.parameters().items():
            if name not in found and one.grad is not None:
                found[name] = one.grad.clone()
        return result, found

    return with_gradients


@contextlib.contextmanager
def without_dropout(models: Sequence[torch.nn.Module]) -> Iterator[bool]:
    """Set every dropout probability to 0 inside; gives whether there was another.

    PyTorch's random numbers and amp_ir's are other streams, so that runs with dropout differ.
    """
    changed: list[tuple[torch.nn.Module, str, float]] = []
    for module in (one for model in models for one in model.modules()):
        for name in _probabilities(module):
            value = getattr(module, name)
            if isinstance(value, float | int) and value > 0:
                changed.append((module, name, value))
                setattr(module, name, 0.0)
    try:
        yield bool(changed)
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _probabilities(module: torch.nn.Module) -> tuple[str, ...]:
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return ("p",)
    has_option = isinstance(module, torch.nn.RNNBase | torch.nn.MultiheadAttention)
    return ("dropout",) if has_option else ()
