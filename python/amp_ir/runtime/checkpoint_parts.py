# SPDX-License-Identifier: Apache-2.0
"""Loading of states into objects, all or none: checked before, and rolled back after an error."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import attrs
import torch
from torch import nn

from amp_ir.errors import StateError
from amp_ir.ir.short_list import short_names
from amp_ir.runtime.random_state import random_state, set_random_state

_NOTHING_LOADED = "Nothing was loaded"
# Whose state is not of the parameters' shapes.
_OWN_SHAPES = frozenset({"LBFGS", "Adafactor", "SparseAdam", "Muon"})


@attrs.frozen
class Part:
    """An object to load into, its name in messages, its state, and the class that was saved."""

    name: str
    target: Any
    state: Any
    kind: str | None = None


def kind_of(part: Any) -> str | None:
    """Name the class for objects where another class's state would load with another effect."""
    is_kind = isinstance(part, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler)
    return type(part).__name__ if is_kind else None


def part_errors(part: Part) -> Iterator[str]:
    """Yield what keeps a part's state from being loaded, as far as it is known beforehand."""
    kind = kind_of(part.target)
    if not hasattr(part.target, "load_state_dict"):
        given = type(part.target).__name__
        yield f"its entry {part.name!r} is for an object with load_state_dict, and got a {given}"
    elif part.kind is not None and kind is not None and part.kind != kind:
        yield f"its entry {part.name!r} is of {part.kind}, and a {kind} was given"
    elif not isinstance(part.state, Mapping):
        found = type(part.state).__name__
        yield f"its entry {part.name!r} is a {found}, and no state dictionary"
    elif isinstance(part.target, nn.Module):
        yield from _module_errors(part)
    elif isinstance(part.target, torch.optim.Optimizer):
        yield from _optimizer_errors(part)


def load_all(parts: Sequence[Part], random: Mapping[str, Any]) -> None:
    """Load every part and set the random state; after an error everything is as before.

    A second copy of all state is in memory meanwhile.

    Raises:
        StateError: a part's `load_state_dict` raised; the message has what it said.
    """
    restores = [(part.name, _restore(part.target)) for part in parts]
    restores.append(("random", functools.partial(set_random_state, random_state())))
    name = ""
    try:
        for part in parts:
            name = part.name
            part.target.load_state_dict(part.state)
        name = "random"
        set_random_state(random)  # last, since loading may draw numbers
    except BaseException as error:
        torn = _put_back(restores)
        if torn:
            raise StateError(
                f"the entry {name!r} cannot be loaded ({_said(error)}), and what was there before "
                f"cannot be put back: {'; '.join(torn)}. Create these objects again"
            ) from error
        if not isinstance(error, Exception):
            raise
        raise StateError(
            f"the checkpoint does not fit: its entry {name!r} cannot be loaded: {_said(error)}. "
            f"{_NOTHING_LOADED}"
        ) from error


def _put_back(restores: Sequence[tuple[str, Callable[[], None]]]) -> list[str]:
    """Restore every part; return the parts that refuse, with their reasons."""
    torn = []
    for name, restore in restores:
        try:
            restore()
        except Exception as error:  # the others must be put back whatever one part's code raises
            torn.append(f"{name!r} ({_said(error)})")
    return torn


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _restore(target: Any) -> Callable[[], None]:
    """Return a function that restores an object to its current state."""
    if isinstance(target, nn.Module):
        return _restore_module(target)
    if isinstance(target, torch.optim.Optimizer) and _loads_as_pytorch(target):
        # It puts new tensors and groups in the place of the old ones, and never writes to these.
        held = {name: vars(target)[name] for name in ("state", "param_groups")}
        return lambda: vars(target).update(held)
    state = _copied(target.state_dict())
    return lambda: target.load_state_dict(state)


def _restore_module(module: nn.Module) -> Callable[[], None]:
    tensors = [
        (tensor, tensor.detach().clone())
        for tensor in chain(module.parameters(), module.buffers())
        if not nn.parameter.is_lazy(tensor)
    ]
    others = {k: _copied(v) for k, v in module.state_dict().items() if not _is_tensor(v)}

    def restore() -> None:
        with torch.no_grad():
            for tensor, before in tensors:
                tensor.copy_(before)
        if others:
            module.load_state_dict(others, strict=False)

    return restore


def _loads_as_pytorch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict


def _copied(value: Any) -> Any:
    if _is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_copied(one) for one in value])
    return copy.copy(value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _module_errors(part: Part) -> Iterator[str]:
    if any(map(_translates, part.target.modules())):
        return  # its own code says which names and shapes it takes
    expected = part.target.state_dict()
    missing = [key for key in expected if key not in part.state]
    unknown = [key for key in part.state if key not in expected]
    if missing:
        yield f"its entry {part.name!r} has no {short_names(missing, most=5)}"
    if unknown:
        yield f"its entry {part.name!r} has {short_names(unknown, most=5)}, which the model has not"
    for key, held in expected.items():
        if key in part.state and _is_tensor(held) and not nn.parameter.is_lazy(held):
            found = _described(part.state[key])
            if found != _described(held):
                yield (
                    f"{key} of its entry {part.name!r} is {found}, and of the model "
                    f"{_described(held)}"
                )


def _translates(module: nn.Module) -> bool:
    """Return whether a module reads other names than it writes; PyTorch's also read older ones."""
    own = type(module)._load_from_state_dict
    return bool(module._load_state_dict_pre_hooks) or not own.__module__.startswith("torch.")


def _optimizer_errors(part: Part) -> Iterator[str]:
    groups, states = part.state.get("param_groups"), part.state.get("state")
    if not isinstance(groups, list) or not isinstance(states, Mapping):
        yield f"its entry {part.name!r} has no param_groups and state of an optimizer"
        return
    held = part.target.param_groups
    counts = [len(group["params"]) for group in held]
    found = [len(one.get("params", ())) if isinstance(one, Mapping) else -1 for one in groups]
    if counts != found:
        yield f"its entry {part.name!r} has parameters {found} by group, the optimizer {counts}"
        return
    named = type(part.target)
    if not named.__module__.startswith("torch.optim") or named.__name__ in _OWN_SHAPES:
        return
    parameters = [one for group in held for one in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        state = states.get(number, {})
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if _is_tensor(value) and value.dim() and value.shape != parameter.shape:
                yield (
                    f"{key} of parameter {number} of its entry {part.name!r} is "
                    f"{_described(value)}, and the parameter {_described(parameter)}"
                )


def _described(value: Any) -> str:
    if not _is_tensor(value):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
