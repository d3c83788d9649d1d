# SPDX-License-Identifier: Apache-2.0
"""Around the runs of a captured step: whether it still holds, and what to set after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from amp_ir.dialect.loss_scale import options_of
from amp_ir.errors import StateError
from amp_ir.frontend.distribution import process_count
from amp_ir.frontend.hyper_parameters import HyperParameter, frozen_options
from amp_ir.frontend.interface import Interface
from amp_ir.frontend.state import State
from amp_ir.frontend.symbolic_float import Guard
from amp_ir.frontend.tracing import Traced


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
        self._kinds = [(slot.name, slot.tensor, _kind(slot.tensor)) for slot in state.parameters]
        self._modules = [
            (name, module, _form(module))
            for model in state.models
            for name, module in model.named_modules()
        ]
        self._places = _places(state)
        self._owned = _owned_state(state, interface)
        self._gradients = [
            (slot.name, slot.tensor, _kind_of_gradient(slot.tensor))
            for slot in state.parameters
            if id(slot.tensor) in traced.observed
        ]
        put = {id(tensor) for tensor in (*interface.put, *interface.kept)}
        self._cleared = [s.tensor for s in state.parameters if id(s.tensor) not in put]
        self._scaler_options = [options_of(slots.scaler) for slots in state.scalers]
        self._is_first_step_only = bool(traced.created)
        self._has_run = False
        self._installed: set[int] = set()

    def holds(self) -> bool:
        """Whether the graph is what the step would do now."""
        return not self.what_changed()

    def what_changed(self) -> str:
        """What makes the graph another one than the step's, in words; "" where nothing does."""
        return next(self._changes(), "")

    def is_over(self) -> bool:
        """Whether the graph is of a state of the optimizer that will not be again."""
        return self._was_first_step() or any(self._changed_optimizer_state())

    def _changes(self) -> Iterator[str]:
        if self._was_first_step():
            yield "the optimizer's first step is unlike the later ones"
        if (count := process_count()) > 1:
            yield f"torch.distributed has a group of {count} processes now"
        yield from self._changed_options()
        if not self._guards_hold():
            yield "a hyper-parameter has passed a value that the step decides by"
        yield from self._changed_models()
        for name, parameter, expected in self._gradients:
            if (now := _kind_of_gradient(parameter)) != expected:
                yield f"the step reads {name}.grad, which {_gradient_in_words(expected, now)}"
        yield from self._changed_optimizer_state()
        yield from self._changed_scalers()

    def _was_first_step(self) -> bool:
        """Whether the graph is of the optimizer's first step, and one was made: here or eagerly."""
        if not self._is_first_step_only:
            return False
        optimizers = self._state.optimizers
        return self._has_run or any(
            optimizers[index].state.get(parameter, {}).get(key, tensor) is not tensor
            for index, parameter, key, tensor in self._interface.fresh
        )

    def _changed_models(self) -> Iterator[str]:
        for name, tensor, before in self._kinds:
            if (now := _kind(tensor)) != before:
                yield f"parameter {name} {_kind_in_words(before, now)}"
        for name, module, form in self._modules:
            if _form(module) != form:
                yield f"module {name or '(the model itself)'} {_form_in_words(module, form)}"
        for owner, key, name, tensor in self._places:
            if owner.get(key) is not tensor:
                yield f"{name} was replaced by another tensor"

    def install_state(self) -> None:
        """Put the optimizer state that the capture made where the optimizer keeps it."""
        for index, parameter, key, tensor in self._interface.fresh:
            self._state.optimizers[index].state[parameter].setdefault(key, tensor)
            self._installed.add(id(tensor))

    def after_step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Set or clear every `grad` as the step leaves it.

        Raises:
            StateError: not as many gradients as the graph has GRADIENT outputs without `updates`.
            SkippedTooOftenError: a scaler's `max_consecutive_skips` was passed.
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
        for slots in self._state.scalers:
            # On a GPU this would wait for the step.
            if hasattr(slots.scaler, "check_limits") and slots.scale.tensor.device.type == "cpu":
                slots.scaler.check_limits()

    def _guards_hold(self) -> bool:
        values = [hyper.value() for hyper in self._hypers]
        return all(guard.holds(values) for guard in self._guards)

    def _changed_options(self) -> Iterator[str]:
        now = frozen_options(self._state.optimizers, self._hypers)
        if len(now) != len(self._frozen):
            yield f"the optimizer had {len(self._frozen)} param groups and has {len(now)}"
        for number, (group, before) in enumerate(zip(now, self._frozen, strict=False)):
            for key in {**before, **group}:
                was, is_now = before.get(key), group.get(key)
                if was == is_now:
                    continue
                if key == "params":
                    yield f"param group {number} has other parameters"
                yield f"{key} of param group {number} was {was!r} and is {is_now!r}"

    def _changed_optimizer_state(self) -> Iterator[str]:
        for optimizer, parameter, owned in self._owned:
            present = optimizer.state.get(parameter, {})
            for key, name, tensor, is_fresh in owned:
                value = present.get(key)
                if value is tensor:
                    continue
                if value is not None:
                    yield f"{name} was replaced by another tensor, as load_state_dict does"
                elif not is_fresh or id(tensor) in self._installed:
                    yield f"{name} was removed"

    def _changed_scalers(self) -> Iterator[str]:
        for index, (slots, before) in enumerate(
            zip(self._state.scalers, self._scaler_options, strict=True)
        ):
            for key, value in options_of(slots.scaler).items():
                if value != before[key]:
                    yield f"{key} of scaler {index} was {before[key]:g} and is {value:g}"
            if slots.scaler._scale is not slots.scale.tensor:
                yield f"the scale of scaler {index} was replaced by another tensor"
            if len(slots.scaler._per_optimizer_states) > 0:
                yield f"scaler {index} is in the middle of an iteration; call update() on it"


_Kind = tuple[bool, torch.dtype, torch.device, torch.Size]


def _kind(tensor: torch.Tensor) -> _Kind:
    """What the graph depends on and the user may change."""
    return tensor.requires_grad, tensor.dtype, tensor.device, tensor.shape


def _kind_in_words(before: _Kind, now: _Kind) -> str:
    """What differs, as "was ... and is ..."."""
    words = []
    for kind, other in ((before, now), (now, before)):
        requires_grad, dtype, device, shape = kind
        texts = ("trained" if requires_grad else "frozen", dtype, f"on {device}", tuple(shape))
        differing = [str(t) for t, a, b in zip(texts, kind, other, strict=True) if a != b]
        words.append(", ".join(differing))
    return f"was {words[0]} and is {words[1]}"


_KindOfGradient = tuple[torch.dtype, torch.device, torch.layout] | None


def _kind_of_gradient(parameter: torch.Tensor) -> _KindOfGradient:
    """What the graph depends on of a gradient beside its values; None where there is none."""
    gradient = parameter.grad
    return None if gradient is None else (gradient.dtype, gradient.device, gradient.layout)


def _gradient_in_words(before: _KindOfGradient, now: _KindOfGradient) -> str:
    if before is None or now is None:
        return "was None and is set" if before is None else "was set and is None"
    words = [(str(a), str(b)) for a, b in zip(before, now, strict=True) if a != b]
    return f"was {', '.join(a for a, _ in words)} and is {', '.join(b for _, b in words)}"


def _form(module: torch.nn.Module) -> tuple[bool, int, int]:
    """What the graph depends on of a module, its tensors apart."""
    return module.training, len(module._modules), len(module._parameters)


def _form_in_words(module: torch.nn.Module, before: tuple[bool, int, int]) -> str:
    if module.training != before[0]:
        modes = ("train", "eval") if module.training else ("eval", "train")
        return f"is in {modes[0]} mode now, and was in {modes[1]} mode"
    return "has other submodules or parameters"


_Owned = tuple[torch.optim.Optimizer, torch.Tensor, list[tuple[str, str, torch.Tensor, bool]]]


def _owned_state(state: State, interface: Interface) -> list[_Owned]:
    """For each optimizer and parameter: key, name, tensor, and whether the capture made it.

    Only what the graph works on: a step that calls no optimizer leaves its state alone.
    """
    used = {id(entry.tensor_or_reader) for entry in interface.inputs}
    used |= {id(tensor) for _, _, _, tensor in interface.fresh}
    fresh = {(index, id(parameter), key) for index, parameter, key in state.fresh}
    parameters = {id(slot.tensor): slot.tensor for slot in state.parameters}
    return [
        (
            state.optimizers[index],
            parameters[parameter],
            [
                (key, slot.name, slot.tensor, (index, parameter, key) in fresh)
                for key, slot in slots.items()
                if id(slot.tensor) in used
            ],
        )
        for (index, parameter), slots in state.optimizer_slots.items()
    ]


def _places(state: State) -> list[tuple[dict[str, Any], str, str, Any]]:
    """Every place of a parameter or buffer in a module, with its name and the tensor in it."""
    return [
        (owner, key, f"{name}.{key}" if name else key, tensor)
        for model in state.models
        for name, module in model.named_modules()
        for owner in (module._parameters, module._buffers)
        for key, tensor in owner.items()
    ]
