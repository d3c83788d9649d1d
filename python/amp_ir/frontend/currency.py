# SPDX-License-Identifier: Apache-2.0
"""Around the runs of a captured step: whether it still holds, and what to set after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from amp_ir.errors import StateError
from amp_ir.frontend.hyper_parameters import HyperParameter, frozen_options
from amp_ir.frontend.interface import Interface
from amp_ir.frontend.state import State
from amp_ir.frontend.symbolic_float import Guard
from amp_ir.frontend.tracing import Traced
from amp_ir.module import Role


class Currency:
    """Compares the user's models and optimizers with what the capture saw."""

    def __init__(
        self,
        state: State,
        hypers: list[HyperParameter],
        traced: Traced,
        interface: Interface,
        guards: list[Guard],
    ) -> None:
        self._state = state
        self._hypers = hypers
        self._guards = guards
        self._interface = interface
        self._stepped = traced.stepped
        self._frozen = frozen_options(state.optimizers, hypers)
        self._kinds = [(t, _kind(t)) for t in (slot.tensor for slot in state.parameters)]
        self._modules = [
            (module, module.training, len(module._modules), len(module._parameters))
            for model in state.models
            for module in model.modules()
        ]
        self._places = _places(state)
        self._owned = _owned_state(state)
        gradients = {
            e.name: e.tensor_or_reader for e in interface.inputs if e.role is Role.GRADIENT
        }
        self._gradients: list[tuple[torch.Tensor, Any]] = []
        for slot in state.parameters:
            if id(slot.tensor) in traced.observed:
                expected = gradients.get(f"{slot.name}.grad")
                self._gradients.append((slot.tensor, expected))
        put = {id(tensor) for tensor in (*interface.put, *interface.kept)}
        self._cleared = [s.tensor for s in state.parameters if id(s.tensor) not in put]
        self._is_first_step_only = bool(traced.created)
        self._has_run = False

    def holds(self) -> bool:
        """Whether the graph is what the step would do now."""
        checks: tuple[Callable[[], bool], ...] = (
            lambda: not (self._is_first_step_only and self._has_run),
            lambda: frozen_options(self._state.optimizers, self._hypers) == self._frozen,
            self._guards_hold,
            lambda: all(_kind(tensor) == kind for tensor, kind in self._kinds),
            lambda: all(
                m.training is training and len(m._modules) == n and len(m._parameters) == k
                for m, training, n, k in self._modules
            ),
            lambda: all(owner.get(key) is tensor for owner, key, tensor in self._places),
            lambda: all(_same_gradient(p.grad, expected) for p, expected in self._gradients),
            self._optimizer_state_stands,
        )
        return all(check() for check in checks)

    def install_state(self) -> None:
        """Put the optimizer state that the capture made where the optimizer keeps it."""
        for index, parameter, key, tensor in self._interface.fresh:
            self._state.optimizers[index].state[parameter].setdefault(key, tensor)

    def after_step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Set or clear every `grad` as the step leaves it.

        Raises:
            StateError: not as many gradients as the graph has GRADIENT outputs without `updates`.
        """
        parameters = self._interface.put
        if len(gradients) != len(parameters):
            raise StateError(
                f"after_step got {len(gradients)} gradients, expected {len(parameters)}: the "
                "values of the GRADIENT outputs that have updates=None"
            )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for parameter in self._cleared:
            parameter.grad = None
        for optimizer in self._stepped:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # LR schedulers ask for it
        self._has_run = True

    def _guards_hold(self) -> bool:
        values = [hyper.value() for hyper in self._hypers]
        return all(guard.holds(values) for guard in self._guards)

    def _optimizer_state_stands(self) -> bool:
        for optimizer, parameter, owned in self._owned:
            present = optimizer.state.get(parameter, {})
            for key, tensor, may_miss in owned:
                value = present.get(key)
                if value is not tensor and not (may_miss and value is None):
                    return False
        return True


def _same_gradient(gradient: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    return gradient is expected


def _kind(tensor: torch.Tensor) -> tuple[bool, torch.dtype, torch.device]:
    """What the graph depends on and the user may change."""
    return tensor.requires_grad, tensor.dtype, tensor.device


_Owned = tuple[torch.optim.Optimizer, torch.Tensor, list[tuple[str, torch.Tensor, bool]]]


def _owned_state(state: State) -> list[_Owned]:
    """For each optimizer and parameter: key, tensor, and whether it is not installed yet."""
    fresh = {(index, id(parameter), key) for index, parameter, key in state.fresh}
    parameters = {id(slot.tensor): slot.tensor for slot in state.parameters}
    return [
        (
            state.optimizers[index],
            parameters[parameter],
            [(key, s.tensor, (index, parameter, key) in fresh) for key, s in slots.items()],
        )
        for (index, parameter), slots in state.optimizer_slots.items()
    ]


def _places(state: State) -> list[tuple[dict[str, Any], str, Any]]:
    """Every place of a parameter or buffer in a module, with the tensor in it."""
    return [
        (owner, key, tensor)
        for model in state.models
        for module in model.modules()
        for owner in (module._parameters, module._buffers)
        for key, tensor in owner.items()
    ]
