# SPDX-License-Identifier: Apache-2.0
"""Optimizers of which each rank holds a part of the state: what they refuse, and gathering.

The user's optimizer object keeps the parts where it kept whole tensors. Its own `state_dict` and
`step` would work with parts as if they were whole, so both are refused; `load_state_dict` takes
whole state, as `gather_state_dict` and every checkpoint have it, and splits it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from amp_ir.distributed.process_group import first_line
from amp_ir.distributed.shards import Shards
from amp_ir.errors import ArgumentError, StateError

_split: weakref.WeakKeyDictionary[torch.optim.Optimizer, Shards] = weakref.WeakKeyDictionary()
_gathering: set[int] = set()


def guard_split_state(optimizer: torch.optim.Optimizer, shards: Shards) -> None:
    """Let an optimizer that holds parts refuse what would take them for whole tensors."""
    if optimizer in _split or not any(True for _ in shards.parts_held(optimizer)):
        return
    _split[optimizer] = shards
    optimizer.register_state_dict_pre_hook(_refuse_state_dict)
    optimizer.register_step_pre_hook(_refuse_step)
    optimizer.register_load_state_dict_post_hook(_split_loaded)


def shards_of(optimizer: object) -> Shards | None:
    """Return how an optimizer's state is split; None where it is whole."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    shards = _split.get(optimizer)
    if shards is None or not any(True for _ in shards.parts_held(optimizer)):
        return None
    return shards


def gather_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with whole tensors, where ranks have split its state.

    Every rank has to call it, in the same order as other exchanges; each gets all of it, so it
    takes as many bytes as the state of an optimizer that is not split. Any other optimizer's own
    `state_dict()` is returned.

    Raises:
        ArgumentError: it is no optimizer.
        StateError: a rank did not take part.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"gather_state_dict takes a torch.optim.Optimizer and got a {type(optimizer).__name__}"
        )
    shards = shards_of(optimizer)
    if shards is None:
        return optimizer.state_dict()
    with _whole(optimizer, shards):
        return optimizer.state_dict()


@contextlib.contextmanager
def _whole(optimizer: torch.optim.Optimizer, shards: Shards) -> Iterator[None]:
    """Put gathered tensors in the place of the parts inside."""
    parts = list(shards.parts_held(optimizer))
    held = optimizer.state
    try:
        wholes = [shards.gather(parameter, part) for parameter, _, part in parts]
    except RuntimeError as error:
        first = first_line(error)
        raise StateError(
            "the state of an optimizer that is split over the ranks could not be gathered: every "
            f"rank has to call save_checkpoint, or gather_state_dict, at the same point: {first}"
        ) from error
    state = type(held)(dict)
    state.update({parameter: dict(values) for parameter, values in held.items()})
    for (parameter, key, _), whole in zip(parts, wholes, strict=True):
        state[parameter][key] = whole
    _gathering.add(id(optimizer))
    optimizer.state = state
    try:
        yield
    finally:
        optimizer.state = held
        _gathering.discard(id(optimizer))


def _refuse_state_dict(optimizer: torch.optim.Optimizer) -> None:
    if id(optimizer) in _gathering or shards_of(optimizer) is None:
        return
    raise StateError(
        f"this rank holds a part of the state of the {type(optimizer).__name__} (shard=), so its "
        "state_dict() is not whole; call amp_ir.save_checkpoint, or "
        "amp_ir.gather_state_dict(optimizer), on every rank"
    )


def _refuse_step(optimizer: torch.optim.Optimizer, _args: Any, _named: Any) -> None:
    if shards_of(optimizer) is None:
        return
    raise StateError(
        f"this rank holds a part of the state of the {type(optimizer).__name__} (shard=), which "
        "its step() in plain PyTorch would take for the whole; call the compiled step, or load a "
        "checkpoint into a new optimizer"
    )


def _split_loaded(optimizer: torch.optim.Optimizer) -> None:
    """Split whole state that was loaded; the step then compiles again on the new parts."""
    shards = _split[optimizer]
    shards.loads.append(type(optimizer).__name__)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = optimizer.state.get(parameter, {})
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and shards.is_split(parameter, value):
                    values[key] = shards.part_of(parameter, value)
