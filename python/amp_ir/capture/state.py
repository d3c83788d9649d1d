# SPDX-License-Identifier: Apache-2.0
"""The tensors that a step works on: found, named, replaced by fakes for a capture, restored.

The user's tensors are never written: the model's and the optimizer's dictionaries hold fakes
while the step is traced, and their contents are restored afterwards, whatever happened.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_ir.capture.locations import is_users_file
from amp_ir.capture.patches.generators import keep_generators
from amp_ir.capture.patches.restores import restoring
from amp_ir.capture.untouched_zeros import UntouchedZeros
from amp_ir.distributed.shards import Shards
from amp_ir.errors import AmpIrError, StateError
from amp_ir.ir.step_module import Role
from amp_ir.ir.unusable_tensors import tensor_error


@attrs.define(eq=False)
class StateTensor:
    """One tensor of the state, and the fake that replaces it while the step is traced.

    A part of a tensor that ranks have split is `like` a parameter: its fake is whole.
    """

    name: str
    role: Role
    tensor: torch.Tensor
    like: torch.Tensor | None = None
    fake: torch.Tensor = attrs.field(init=False)


@attrs.frozen(eq=False)
class GradientReader:
    """A reader of a parameter's current gradient: another tensor after every `zero_grad`."""

    name: str
    parameter: torch.Tensor

    def __call__(self) -> torch.Tensor:
        """Return the gradient.

        Raises:
            StateError: there is none, or its memory does not hold its values.
        """
        gradient = self.parameter.grad
        if gradient is None:
            raise StateError(
                f"the step reads {self.name}.grad, which was set at the capture and is None now; "
                "run the backward pass that sets it, or capture the step again"
            )
        error = tensor_error(gradient)
        if error:
            raise StateError(f"{self.name}.grad {error}")
        return gradient


@attrs.frozen(eq=False)
class ScalerState:
    """The state of one loss scaler: f32[], i32[], i32[], and its log's ring and counts."""

    scaler: Any
    scale: StateTensor
    growth_tracker: StateTensor
    hysteresis_tracker: StateTensor
    ring: StateTensor
    counts: StateTensor

    @property
    def all(self) -> list[StateTensor]:
        """Return the tensors in the order of the graph's inputs."""
        return [self.scale, self.growth_tracker, self.hysteresis_tracker, self.ring, self.counts]


@attrs.define(eq=False)
class State:
    """All tensors of the state, and where the optimizers keep theirs.

    `optimizer_state` maps (optimizer position, id of the parameter) to the tensors by key; `fresh`
    are those that did not exist before the capture, as (optimizer position, parameter, key).
    `plain_values` is the optimizer state that is not a tensor. `outside` are the tensors that the
    step reads from elsewhere, known once it is traced. `shards` is how ranks split the optimizers'
    state, None where they do not.
    """

    models: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    parameters: list[StateTensor]
    buffers: list[StateTensor]
    gradients: dict[int, StateTensor]
    optimizer_state: dict[tuple[int, int], dict[str, StateTensor]]
    fresh: list[tuple[int, torch.Tensor, str]]
    plain_values: dict[tuple[int, int], dict[str, Any]]
    scalers: list[ScalerState] = attrs.field(factory=list)
    outside: list[StateTensor] = attrs.field(factory=list)
    shards: Shards | None = None
    # What an optimizer holds until the part of it is installed, by the part's id.
    wholes: dict[int, torch.Tensor] = attrs.field(factory=dict)

    @property
    def tensors(self) -> list[StateTensor]:
        """Return all tensors in the order of the graph's inputs."""
        owned = [entry for by_key in self.optimizer_state.values() for entry in by_key.values()]
        scaling = [entry for scaler in self.scalers for entry in scaler.all]
        return [
            *self.parameters,
            *self.buffers,
            *self.gradients.values(),
            *owned,
            *scaling,
            *self.outside,
        ]


class LookedEarlyError(AmpIrError, RuntimeError):
    """The step of a user's optimizer looks at state that PyTorch's part of it has not made yet."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(f"{type(optimizer).__name__} looks at its state before its first step")
        self.optimizer = optimizer


class WritesOutsideError(AmpIrError, RuntimeError):
    """The step writes to `tensors` outside of the models and optimizers, with their names."""

    def __init__(self, tensors: list[tuple[torch.Tensor, str]]) -> None:
        super().__init__(f"the step writes to {', '.join(name for _, name in tensors)}")
        self.tensors = tensors


def find_state(
    models: list[torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    unmade: Sequence[torch.optim.Optimizer] = (),
    written: Sequence[tuple[torch.Tensor, str]] = (),
) -> State:
    """Name every tensor of the models and optimizers; tied tensors get their first name.

    Of optimizers, the state is made that their first step would make; not of the `unmade`.
    `written` are tensors elsewhere that the step writes to, with their names.
    """
    parameters: dict[int, StateTensor] = {}
    buffers: dict[int, StateTensor] = {}
    for index, model in enumerate(models):
        prefix = f"model{index}." if index else ""
        for name, parameter in model.named_parameters():
            entry = StateTensor(prefix + name, Role.PARAMETER, parameter)
            parameters.setdefault(id(parameter), entry)
        for name, buffer in model.named_buffers():
            buffers.setdefault(id(buffer), StateTensor(prefix + name, Role.BUFFER, buffer))
    for tensor, name in written:
        buffers[id(tensor)] = StateTensor(name, Role.BUFFER, tensor)
    gradients = {
        key: StateTensor(f"{entry.name}.grad", Role.GRADIENT, entry.tensor.grad)
        for key, entry in parameters.items()
        if entry.tensor.grad is not None
    }
    state = State(
        models, optimizers, list(parameters.values()), list(buffers.values()), gradients, {}, [], {}
    )
    names = {key: entry.name for key, entry in parameters.items()}
    for index, optimizer in enumerate(optimizers):
        is_unmade = any(one is optimizer for one in unmade)
        fresh = {} if is_unmade else initial_state(optimizer)
        _find_optimizer_state(state, index, optimizer, names, fresh)
    return state


def _find_optimizer_state(
    state: State,
    index: int,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    fresh: Mapping[torch.Tensor, Mapping[str, torch.Tensor]],
) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            existing = optimizer.state.get(parameter, {})
            for key, value in {**fresh.get(parameter, {}), **existing}.items():
                if not isinstance(value, torch.Tensor):
                    state.plain_values.setdefault((index, id(parameter)), {})[key] = value
                    continue
                name = f"optimizer{index}.{names[id(parameter)]}.{key}"
                entry = StateTensor(name, Role.OPTIMIZER_STATE, value)
                state.optimizer_state.setdefault((index, id(parameter)), {})[key] = entry
                if key not in existing:
                    state.fresh.append((index, parameter, key))


def initial_state(
    optimizer: torch.optim.Optimizer,
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the state that the optimizer would make for parameters that have none, as new tensors.

    PyTorch's optimizers make it in `_init_group` (SGD: in `step`, as a copy of the first gradient,
    which is momentum over zeros unless gradients are damped). Others make none here.
    """
    made: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    init_group = getattr(optimizer, "_init_group", None)
    if init_group is None:
        return made
    lists = len(inspect.signature(init_group).parameters) - 1
    for group in optimizer.param_groups:
        missing = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
        if isinstance(optimizer, torch.optim.SGD):
            if group["momentum"] != 0 and group["dampening"] == 0:
                with UntouchedZeros():
                    made.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in missing})
            continue
        with _only_gradients_of(missing, optimizer), UntouchedZeros():
            init_group({**group, "params": missing}, *([] for _ in range(lists)))
            made.update({p: dict(optimizer.state[p]) for p in missing if optimizer.state.get(p)})
    return {
        p: {k: _beside(p, v.detach()) for k, v in s.items() if torch.is_tensor(v)}
        for p, s in made.items()
    }


def move_counters(optimizers: list[torch.optim.Optimizer]) -> int:
    """Move step counters of parameters on a GPU there; return how many were elsewhere.

    PyTorch's loops keep the counter of such a parameter on the host unless the optimizer is fused
    or capturable; a step on the GPU advances it there. Eager steps still work: they read it.
    """
    moved = 0
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in values.items() if torch.is_tensor(parameter) else ():
                if torch.is_tensor(value) and _beside(parameter, value) is not value:
                    values[key] = _beside(parameter, value)
                    moved += 1
    return moved


def _beside(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Move a number of the optimizer's state to the device of its parameter."""
    return value.to(parameter.device) if value.dim() == 0 else value


@contextlib.contextmanager
def _only_gradients_of(
    parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Give only these parameters a gradient (themselves: no memory) and a separate state."""
    gradients = [parameter.grad for parameter in parameters]
    kept_state = optimizer.state
    optimizer.state = collections.defaultdict(dict)
    try:
        for parameter in parameters:
            parameter.grad = parameter.detach()
        yield
    finally:
        optimizer.state = kept_state
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def fake_of_state(entry: StateTensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return the fake of a tensor of the state: whole, where this rank holds a part."""
    if entry.like is None:
        return fake_of(entry.tensor, mode)
    with mode, torch.no_grad():
        return torch.empty_strided(
            entry.like.size(),
            entry.like.stride(),
            dtype=entry.tensor.dtype,
            device=entry.tensor.device,
        )


def fake_of(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake with the tensor's shape, strides, dtype, device and `requires_grad`."""
    with mode, torch.no_grad():
        fake = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    fake.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        fake._is_param = True
    attributes = {k: v for k, v in vars(tensor).items() if not k.startswith("_backward")}
    vars(fake).update(attributes)
    for hook in (tensor._backward_hooks or {}).values():
        fake.register_hook(hook)
    for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
        fake.register_post_accumulate_grad_hook(hook)
    return fake


@contextlib.contextmanager
def kept(state: State) -> Iterator[None]:
    """Restore models, optimizers and random generators on exit, whatever happens."""
    containers = [_Contents(vars(module)) for model in state.models for module in model.modules()]
    for optimizer in state.optimizers:
        containers.append(_Contents(vars(optimizer)))
        containers += [_Contents(group) for group in optimizer.param_groups]
        states = optimizer.state.values()
        containers += [_Contents(values) for values in states if isinstance(values, dict)]
    containers += [_Contents(vars(scaler_state.scaler)) for scaler_state in state.scalers]
    with restoring() as restores:
        keep_generators(restores)
        restores.add(functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        for container in reversed(containers):
            restores.add(container.restore)
        # Casts of fakes must not stay in the cache, nor those of parameters be used. The cache is
        # the process's; PyTorch clears it too, wherever a thread leaves its outermost autocast.
        restores.add(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        yield


class _Contents:
    """A dictionary's contents, and those of the lists, dictionaries and sets directly in it."""

    def __init__(self, target: dict[Any, Any]) -> None:
        self._target = target
        self._items = dict(target)
        inner = [value for value in target.values() if isinstance(value, (list, dict, set))]
        self._inner = [(value, value.copy()) for value in inner]

    def restore(self) -> None:
        """Restore the contents of the same objects; unchanged ones are not written."""
        for value, contents in self._inner:
            _refill(value, contents)
        _refill(self._target, self._items)


def _refill(target: Any, contents: Any) -> None:
    if isinstance(target, dict):
        same = len(target) == len(contents) and all(
            key in target and target[key] is value for key, value in contents.items()
        )
        if not same or list(target) != list(contents):
            target.clear()
            target.update(contents)
    elif isinstance(target, list):
        target[:] = contents
    elif target != contents:
        target.clear()
        target.update(contents)


def put_fakes(state: State) -> dict[int, torch.Tensor]:
    """Put the fakes into models and optimizers; call it inside of `kept`.

    Returns:
        the fake by the id of the user's tensor.
    """
    fakes = {id(entry.tensor): entry.fake for entry in state.tensors}
    for model in state.models:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers, vars(module)):
                _replace_values(tensors, fakes)
            if isinstance(module, torch.nn.RNNBase):
                _put_flat_weights(module, fakes)
    for parameter, gradient in state.gradients.items():
        fakes[parameter].grad = gradient.fake
    for index, optimizer in enumerate(state.optimizers):
        _put_optimizer_fakes(state, index, optimizer, fakes)
    # An optimizer around another one, as of SAM, has the other's groups themselves.
    groups = {id(one): one for optimizer in state.optimizers for one in optimizer.param_groups}
    for group in groups.values():
        group["params"] = [fakes[id(parameter)] for parameter in group["params"]]
    return fakes


def _replace_values(tensors: dict[str, Any], fakes: Mapping[int, torch.Tensor]) -> None:
    for key, value in tensors.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = fakes.get(id(value), value)


def _put_flat_weights(module: torch.nn.RNNBase, fakes: Mapping[int, torch.Tensor]) -> None:
    """Put the fakes where a recurrent layer compares its weights with those of the last call.

    Where they differ it reads all again, and a parametrized one, as of `spectral_norm`, changes
    with each read.
    """
    weights: list[Any] = module._flat_weights
    weights[:] = [fakes.get(id(one), one) for one in weights]
    refs: list[Any] = module._flat_weight_refs
    for k, ref in enumerate(refs):
        fake = None if ref is None else fakes.get(id(ref()))
        if fake is not None:
            refs[k] = weakref.ref(fake)


class _StateOfFakes(collections.defaultdict[Any, Any]):
    """An optimizer's state by the fakes of its parameters, also where the user's own are the keys.

    Hooks look it up where no mode sees that the two are one. `looked_early` is called where the
    user's code looks at what is `made_ahead` of the optimizer's first step, which makes it in
    PyTorch, by `_init_group`.
    """

    def __init__(self, fakes: Mapping[int, torch.Tensor]) -> None:
        super().__init__(dict)
        self._fakes = fakes
        self.made_ahead: set[int] = set()
        self.looked_early: Callable[[], None] | None = None

    def _by_fake(self, key: Any) -> Any:
        fake = self._fakes.get(id(key), key)
        if id(fake) in self.made_ahead:
            caller = sys._getframe(2)
            if caller.f_code.co_name == "_init_group":
                self.made_ahead.discard(id(fake))
            else:
                self._note_look(caller)
        return fake

    def _note_look(self, caller: FrameType) -> None:
        code = caller.f_code
        if self.looked_early is not None:
            if is_users_file(code.co_filename) or code.co_name == "state_dict":
                self.looked_early()

    def _note_look_at_all(self) -> None:
        if self.made_ahead:
            self._note_look(sys._getframe(2))

    def __len__(self) -> int:
        self._note_look_at_all()
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        self._note_look_at_all()
        return super().__iter__()

    def keys(self) -> Any:
        """Return the parameters' fakes, and what else there is state of."""
        self._note_look_at_all()
        return super().keys()

    def values(self) -> Any:
        """Return the states."""
        self._note_look_at_all()
        return super().values()

    def items(self) -> Any:
        """Return pairs of what `keys` and `values` return."""
        self._note_look_at_all()
        return super().items()

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._by_fake(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._by_fake(key), value)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self._by_fake(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter or its fake, if there is any."""
        return super().get(self._by_fake(key), default)


def _put_optimizer_fakes(
    state: State, index: int, optimizer: torch.optim.Optimizer, fakes: Mapping[int, torch.Tensor]
) -> None:
    """Store the state under the fakes of the parameters."""
    replaced = _StateOfFakes(fakes)
    for key, values in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            replaced[key] = values
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = dict(optimizer.state.get(parameter, {}))
            by_key = state.optimizer_state.get((index, id(parameter)), {})
            values.update({key: entry.fake for key, entry in by_key.items()})
            if values:
                replaced[parameter] = values
            if by_key and not optimizer.state.get(parameter):
                replaced.made_ahead.add(id(fakes[id(parameter)]))
    optimizer.state = replaced
