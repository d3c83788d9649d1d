# SPDX-License-Identifier: Apache-2.0
"""The hooks around a run of a captured step: guards before it, state updates after it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch

from amp_ir.capture.guards.ambient import Ambient
from amp_ir.capture.guards.entries import GuardedEntries
from amp_ir.capture.guards.followed_hypers import computes_with_hypers
from amp_ir.capture.guards.followed_numbers import FollowedNumber
from amp_ir.capture.guards.gradient_flags import GradientFlags
from amp_ir.capture.guards.kept_results import KeptResult
from amp_ir.capture.guards.left_values import InitialValues
from amp_ir.capture.guards.modules import GuardedModules, GuardedParameters
from amp_ir.capture.guards.objects import GuardedObjects, Tier
from amp_ir.capture.guards.observer import Observer
from amp_ir.capture.guards.optimizer_methods import GuardedOptimizerMethods
from amp_ir.capture.guards.optimizer_objects import OptimizerObjects
from amp_ir.capture.guards.param_groups import GuardedGroups
from amp_ir.capture.guards.read_places import ReadPlace, ReadPlaces
from amp_ir.capture.guards.watch import watch
from amp_ir.capture.hyper_parameters import HyperParameter
from amp_ir.capture.interface import Interface
from amp_ir.capture.state import State
from amp_ir.capture.symbolic_float import Guard, inputs_of
from amp_ir.capture.traced import Traced
from amp_ir.dialect.loss_scale import options_of
from amp_ir.distributed.process_group import world_size
from amp_ir.distributed.replicas import Ranks
from amp_ir.distributed.split_optimizers import guard_split_state
from amp_ir.ir.memory_order import strides_in_words, strides_unless_contiguous

_gradient_of = attrgetter("grad")


class CaptureGuards:
    """The guards of a capture: the user's models, optimizers and objects as the capture saw them.

    `unfollowed` are the names of numbers that were to be inputs and cannot be.
    """

    def __init__(
        self,
        state: State,
        hypers: list[HyperParameter],
        numbers: list[FollowedNumber],
        unfollowed: frozenset[str],
        traced: Traced,
        interface: Interface,
        guards: list[Guard],
        observer: Observer,
        ambient: Ambient,
        ranks: Ranks | None = None,
        equal_flags: GradientFlags | None = None,
    ) -> None:
        self._ranks = ranks
        self._flags = () if ranks is None else ranks.flags()
        self._flags_after: tuple[bool, ...] = traced.sends_buffers
        self._world_size = world_size()
        self._state = state
        self._hypers = hypers
        self._numbers = numbers
        self._guards = guards
        self._interface = interface
        self._stepped = traced.stepped
        self._stored = traced.stored
        self._kept = traced.kept
        self._state_reads = traced.state_reads
        users_read = computes_with_hypers(observer, state.optimizers)
        self._groups = GuardedGroups(state.optimizers, hypers, users_read=users_read)
        self._owned = _owned_state(state, interface)
        self._find_gradients(traced)
        put = {id(tensor) for tensor in (*interface.put, *interface.kept)}
        # Another step may have left a gradient that this one does not touch.
        cleared = traced.touched - put
        self._cleared = [s.tensor for s in state.parameters if id(s.tensor) in cleared]
        self._scaler_options = [options_of(scaler_state.scaler) for scaler_state in state.scalers]
        self._is_first_step_only = bool(traced.created)
        self._has_run = False
        self._initial_values: InitialValues | None = None
        if traced.initial_values.left:
            self._initial_values = traced.initial_values
        self._installed: set[int] = set()
        self._read: list[KeptResult | ReadPlace] = [one for one in traced.kept if one.is_read]
        self._read += traced.read_places
        self._read_places = ReadPlaces(traced.read_places, state)
        self._objects = GuardedObjects(
            observer,
            frozenset(number.name for number in numbers),
            unfollowed,
            frozenset(one.place.identity for one in self._read),
        )
        self._of_optimizers = OptimizerObjects.of_users(state.optimizers)
        self._watch_state()
        self._parameters = GuardedParameters(state.parameters, equal_flags)
        self._tiers = self._make_tiers(observer, ambient)

    def _make_tiers(self, observer: Observer, ambient: Ambient) -> list[Tier]:
        # A Python number of the step's can change while the groups do not.
        must_compare = bool(self._numbers and self._guards)

        return [
            Tier(lambda: not self._was_first_step(), self._first_step),
            Tier(lambda: world_size() == self._world_size, self._other_processes),
            Tier(self._flags_hold, self._changed_flags),
            Tier(ambient.holds, lambda: iter(ambient.changes())),
            Tier(observer.readings.hold, observer.readings.changes),
            Tier(
                lambda: not must_compare and self._groups.hold(),
                self._changed_options,
                self._groups.refresh,
            ),
            Tier(self._of_optimizers.hold, self._of_optimizers.changes_in_words),
            GuardedEntries(self._state, observer).tier(),
            GuardedOptimizerMethods(self._state.optimizers).tier(),
            self._parameters.tier(),
            Tier(self._kept_holds, self._changed_kept),
            self._python_tier(GuardedModules(list(observer.objects.modules.values()))),
            Tier(self._gradients_hold, self._changed_gradients),
            Tier(self._state_holds, self._changed_optimizer_state, self._watch_state),
            Tier(lambda: not self._state.scalers, self._changed_scalers),
            # Last: of tensors that are still those of the capture.
            Tier(self._state_reads.hold, self._state_reads.changes),
        ]

    def _python_tier(self, modules: GuardedModules) -> Tier:
        """Return guards on modules and objects, whose dictionaries are watched together."""
        objects = self._objects
        watched = self._watched = watch([*modules.dictionaries, *objects.dictionaries])

        def refresh() -> None:
            watched.refresh()
            modules.refresh()

        return Tier(
            lambda: watched.hold() and modules.hold() and objects.hold(),
            lambda: itertools.chain(modules.changes(), objects.changes()),
            refresh,
        )

    def _watch_state(self) -> None:
        """Watch the dictionaries in which the optimizers keep their state now."""
        self._states = [optimizer.state for optimizer in self._state.optimizers]
        inner = [optimizer.state.get(parameter) for optimizer, parameter, _ in self._owned]
        self._watched_state = watch([*self._states, *(one for one in inner if one is not None)])

    def _state_holds(self) -> bool:
        now = [optimizer.state for optimizer in self._state.optimizers]
        return all(map(operator.is_, now, self._states)) and self._watched_state.hold()

    def _find_gradients(self, traced: Traced) -> None:
        self._gradients = [
            (entry.name, entry.tensor, _kind_of_gradient(entry.tensor))
            for entry in self._state.parameters
            if id(entry.tensor) in traced.observed
        ]
        self._without_gradient = [tensor for _, tensor, kind in self._gradients if kind is None]
        self._with_gradient = [
            (tensor, kind) for _, tensor, kind in self._gradients if kind is not None
        ]

    def recompile_reason(self) -> str:
        """Return the recompile reason: how the step differs from the graph; "" if it does not."""
        if self._initial_values is None:
            return self._change()
        change = self._initial_values.change()
        with self._initial_values.held():
            return self._change() or change

    def _change(self) -> str:
        for tier in self._tiers:
            if not tier.holds():
                change = next(tier.changes(), "")
                if change:
                    return change
                tier.refresh()
        return ""

    def is_over(self) -> bool:
        """Return whether the graph is of an optimizer state that will not recur."""
        return self._was_first_step() or any(self._changed_optimizer_state())

    def changed_numbers(self) -> tuple[str, ...]:
        """Return the names of guarded Python numbers that changed and could be inputs."""
        return self._objects.changed_numbers()

    def changed_tensors(self) -> tuple[str, ...]:
        """Return the names of guarded places that hold other tensors, which could be inputs."""
        read = (one.place.name() for one in self._read_places.places)
        return (*self._objects.changed_tensors(), *read)

    def install_state(self) -> None:
        """Put the optimizer state that the capture made where the optimizer keeps it."""
        for index, parameter, key, tensor in self._interface.fresh:
            held = self._state.optimizers[index].state[parameter]
            if held.get(key) is self._state.wholes.get(id(tensor)):
                held[key] = tensor
            self._installed.add(id(tensor))
        self._state.wholes.clear()
        if self._state.shards is not None:
            for optimizer in self._state.optimizers:
                guard_split_state(optimizer, self._state.shards)
        if not next(self._changed_optimizer_state(), ""):
            self._watch_state()

    def keep_results(self, batch: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Put what the step keeps of its batch and results where it keeps them."""
        if not self._kept:
            return
        is_unchanged, tensors = self._watched.hold(), [*batch, *results]
        if self._initial_values is not None:  # first, for the order of a dictionary's keys
            self._initial_values.install()
        for one in self._kept:
            one.install(tensors)
        # A step of the first call alone has a guard on what it then finds there.
        if is_unchanged and not any(one.is_guarded for one in self._kept):
            self._watched.refresh()

    def after_step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Set or clear every `grad`, and other attributes, as the step leaves them.

        Raises:
            SkippedTooOftenError: a scaler's `max_consecutive_skips` was passed.
        """
        parameters = self._interface.put
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for parameter in self._cleared:
            parameter.grad = None
        for optimizer in self._stepped:
            if not getattr(optimizer, "_opt_called", False):
                optimizer._opt_called = True  # type: ignore[attr-defined]  # LR schedulers ask
        if self._initial_values is not None:
            self._initial_values.install()
        for stored in self._stored:
            stored.install(self._input_values)
        self._has_run = True
        if self._ranks is not None:
            self._ranks.after_step(self._flags_after)
        self._check_scale_limits()

    def _check_scale_limits(self) -> None:
        for scaler_state in self._state.scalers:
            # On a GPU this would wait for the step.
            scaler, device = scaler_state.scaler, scaler_state.scale.tensor.device
            if hasattr(scaler, "check_limits") and device.type == "cpu":
                scaler.check_limits()

    def _kept_holds(self) -> bool:
        return all(one.holds() for one in self._read) and self._read_places.hold()

    def _changed_kept(self) -> Iterator[str]:
        yield from (one.change() for one in self._read if not one.holds())
        if not self._read_places.hold():
            yield (
                "a place that the step reads holds a tensor of its state now, or places that held "
                "one tensor hold two"
            )

    @staticmethod
    def _other_processes() -> Iterator[str]:
        yield f"torch.distributed has a group of {world_size()} processes now"

    def _flags_hold(self) -> bool:
        return self._ranks is None or self._ranks.flags() == self._flags

    def _changed_flags(self) -> Iterator[str]:
        if self._ranks is not None:
            yield from self._ranks.flags_in_words(self._flags)

    @staticmethod
    def _first_step() -> Iterator[str]:
        yield "the optimizer's first step is unlike the later ones"

    def _was_first_step(self) -> bool:
        """Return whether the graph is of the optimizer's first step, and the first step has run.

        It may have run compiled or eagerly.
        """
        if not self._is_first_step_only:
            return False
        optimizers = self._state.optimizers
        return self._has_run or any(
            optimizers[index].state.get(parameter, {}).get(key, tensor) is not tensor
            for index, parameter, key, tensor in self._interface.fresh
        )

    def _crossed_comparisons(self) -> Iterator[str]:
        """Return the inputs of each recorded comparison whose result differs from the capture's."""
        inputs = self._inputs()
        values = self._input_values()
        for guard in self._guards:
            if not guard.holds(values):
                positions = sorted(inputs_of(guard.left) | inputs_of(guard.right))
                names = [inputs[i].name for i in positions if i >= len(self._hypers)]
                yield " and ".join(names) or "a hyper-parameter"

    def _inputs(self) -> list[HyperParameter | FollowedNumber]:
        return [*self._hypers, *self._numbers]

    def _input_values(self) -> list[float]:
        return [one.value() for one in self._inputs()]

    def _changed_options(self) -> Iterator[str]:
        yield from self._groups.changes()
        yield from self._objects.changed_kinds()  # what is no number is compared with none
        for name in self._crossed_comparisons():
            yield f"{name} crossed a value at which the step branches"

    def _gradients_hold(self) -> bool:
        # A tensor is not equal to None.
        present = list(map(_gradient_of, self._without_gradient))
        return present == [None] * len(present) and all(
            _kind_of_gradient(tensor) == kind for tensor, kind in self._with_gradient
        )

    def _changed_gradients(self) -> Iterator[str]:
        for name, parameter, expected in self._gradients:
            if (now := _kind_of_gradient(parameter)) != expected:
                yield f"the step reads {name}.grad, which {_gradient_in_words(expected, now)}"

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
        for index, (scaler_state, before) in enumerate(
            zip(self._state.scalers, self._scaler_options, strict=True)
        ):
            for key, value in options_of(scaler_state.scaler).items():
                if value != before[key]:
                    yield f"{key} of scaler {index} was {before[key]:g} and is {value:g}"
            if scaler_state.scaler._scale is not scaler_state.scale.tensor:
                yield f"the scale of scaler {index} was replaced by another tensor"
            if len(scaler_state.scaler._per_optimizer_states) > 0:
                yield f"scaler {index} is in the middle of an iteration; call update() on it"


_Owned = tuple[torch.optim.Optimizer, torch.Tensor, list[tuple[str, str, torch.Tensor, bool]]]


def _owned_state(state: State, interface: Interface) -> list[_Owned]:
    """Return for each optimizer and parameter: key, name, tensor, whether the capture made it.

    Only the state that the graph uses: a step that calls no optimizer leaves its state alone.
    """
    used = {id(entry.tensor_or_reader) for entry in interface.inputs}
    used |= {id(tensor) for _, _, _, tensor in interface.fresh}
    fresh = {(index, id(parameter), key) for index, parameter, key in state.fresh}
    parameters = {id(entry.tensor): entry.tensor for entry in state.parameters}
    return [
        (
            state.optimizers[index],
            parameters[parameter],
            [
                (key, entry.name, entry.tensor, (index, parameter, key) in fresh)
                for key, entry in by_key.items()
                if id(entry.tensor) in used
            ],
        )
        for (index, parameter), by_key in state.optimizer_state.items()
    ]


_KindOfGradient = tuple[torch.dtype, torch.device, torch.layout, tuple[int, ...] | None] | None


def _kind_of_gradient(parameter: torch.Tensor) -> _KindOfGradient:
    """Return the properties of a gradient, besides values, that the graph depends on, or None."""
    gradient = parameter.grad
    if gradient is None:
        return None
    is_strided = gradient.layout is torch.strided
    strides = strides_unless_contiguous(gradient) if is_strided else None
    return gradient.dtype, gradient.device, gradient.layout, strides


def _gradient_in_words(before: _KindOfGradient, now: _KindOfGradient) -> str:
    if before is None or now is None:
        return "was None and is set" if before is None else "was set and is None"
    texts = ([*map(str, one[:3]), strides_in_words(one[3])] for one in (before, now))
    words = [(a, b) for a, b in zip(*texts, strict=True) if a != b]
    return f"was {', '.join(a for a, _ in words)} and is {', '.join(b for _, b in words)}"
