# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: ordinary PyTorch files of state dictionaries, written so that a kill does no harm.

    amp_ir.save_checkpoint("run.pt", model=model, optimizer=optimizer, scaler=scaler, train=train,
                           epoch=3)
    epoch = amp_ir.load_checkpoint("run.pt", model=model, optimizer=optimizer, scaler=scaler,
                                   train=train)["epoch"]

The file is `torch.save` of one dictionary with an entry for each name, so that
`torch.load("run.pt")["model"]` is the model's state dictionary in plain PyTorch too. It has the
random state of torch, Python and NumPy as "random", and the format and the saved classes as
"amp_ir". A digest of all bytes is at its end (checkpoint_file.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from amp_ir.distributed.process_group import rank_and_size, splitting_group, world_size
from amp_ir.distributed.split_optimizers import gather_state_dict, shards_of
from amp_ir.errors import ArgumentError, StateError
from amp_ir.files.check_path import check_path
from amp_ir.runtime.checkpoint_file import ENTRY, FORMAT, MARK, RANDOM, read_states, write_states
from amp_ir.runtime.checkpoint_parts import Part, kind_of, load_all, part_errors
from amp_ir.runtime.random_state import random_state, random_state_errors

OF_RANKS = "ranks"
_RESERVED = {
    RANDOM: "the random state",
    OF_RANKS: "the random state of each rank",
    ENTRY: "what the file says of itself",
}


def save_checkpoint(path: str | os.PathLike[str], **parts: Any) -> None:
    """Write a checkpoint; a process that is killed meanwhile leaves the previous file intact.

    The bytes go to a temporary file beside `path` and to the disk, then replace `path` in one
    operation of the file system (files/atomic_file.py). The next call removes what a killed one
    left behind. Gradients are in no state dictionary: save where an accumulation has ended.

    Where ranks have split an optimizer's state (`shard=`), every rank has to call this: the state
    is gathered, rank 0 writes the file, and all return when it is there. It can be loaded on any
    number of ranks.

    Args:
        path: the file to write; where it is a link, its target.
        parts: by name, objects with `state_dict()` (models, optimizers, scalers, schedulers,
            compiled steps), lists of such, or plain values: numbers, strings, tensors and
            containers of these.

    Raises:
        ArgumentError: `path` is no path; a part is named "random", "ranks" or "amp_ir", or holds
            objects of other classes.
        StateError: state is split, and a rank did not take part, or rank 0 could not write.
        OSError: the file cannot be written.
    """
    check_path(path)
    for name, what in _RESERVED.items():
        if name in parts:
            raise ArgumentError(f'a part is named "{name}", which is {what}; rename it')
    split = next((one for part in parts.values() for one in _several(part) if shards_of(one)), None)
    states = {name: _state_of(part) for name, part in parts.items()}
    states[RANDOM] = random_state()
    if split is not None:
        group = shards_of(split).groups[0]  # type: ignore[union-attr]
        world = {"world_ranks": group.world_ranks, "world_size": world_size()}
        own = {name: one for name, one in states.items() if name == RANDOM or _is_of_rank(one)}
        states[OF_RANKS] = group.gather_objects(own)
        with group.first_alone() as is_first:
            if is_first:
                _write(path, states, parts, **world)
        return
    _write(path, states, parts)


def _write(
    path: str | os.PathLike[str], states: dict[str, Any], parts: Mapping[str, Any], **said: Any
) -> None:
    classes = {name: [kind_of(one) for one in _several(part)] for name, part in parts.items()}
    kinds = {name: several for name, several in classes.items() if any(several)}
    states[ENTRY] = {"mark": MARK, "format": FORMAT, "kinds": kinds, **said}
    write_states(path, states)


def load_checkpoint(path: str | os.PathLike[str], **parts: Any) -> dict[str, Any]:
    """Load a checkpoint into objects, set the random state, and return the plain values.

    Either everything is loaded, or nothing: names, shapes, dtypes and classes are checked before
    the first object is written, and an error after that rolls back all of them.

    Args:
        path: a file that `save_checkpoint` wrote.
        parts: by the names used there, the objects to load into, or lists of them.

    Returns:
        the entries of the file without an object here, by name.

    Raises:
        ArgumentError: `path` is no path.
        FileFormatError: the file is damaged, is of a newer format, or is not a checkpoint.
        StateError: the file does not fit the objects; the message lists everything.
        OSError: the file cannot be read.
    """
    states = read_states(path)
    of_ranks = states.pop(OF_RANKS, [])
    said = states.pop(ENTRY, None) or {}
    rank, size = _rank_and_size(parts, said)
    if len(of_ranks) == size > 1:
        states.update(of_ranks[rank])
    kinds = said.get("kinds", {})
    _refuse(_name_errors(states, parts))
    loaded = [one for name, part in parts.items() for one in _parts(name, part, states, kinds)]
    random = states.pop(RANDOM)
    errors = [error for one in loaded for error in part_errors(one)]
    _refuse([*errors, *random_state_errors(random)])
    load_all(loaded, random)
    return states


def _rank_and_size(parts: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[int, int]:
    """Return this process's place among those that split state: in a group of the world, or it.

    Where nothing that is loaded has a group, as before a step is jitted, it is the one that wrote
    the file, if the world is as large as it was then.
    """
    several = [one for part in parts.values() for one in _several(part)]
    groups = [splitting_group(one) for one in several]
    groups += [shards.groups[0] for one in several if (shards := shards_of(one)) is not None]
    group = next((one for one in groups if one is not None), None)
    if group is not None:
        return group.rank, group.size
    rank, size = rank_and_size()
    members = said.get("world_ranks", [])
    if size != said.get("world_size") or rank not in members:
        return rank, size
    return members.index(rank), len(members)


def _parts(
    name: str, given: Any, states: dict[str, Any], kinds: Mapping[str, Any]
) -> Iterator[Part]:
    objects, saved = _several(given), _several(states.pop(name))
    classes = kinds.get(name, [None] * len(objects))
    for number, (one, state, kind) in enumerate(zip(objects, saved, classes, strict=True)):
        yield Part(f"{name}[{number}]" if len(objects) > 1 else name, one, state, kind)


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _is_of_rank(state: Any) -> bool:
    """Return whether a state is a compiled step's, whose random numbers are each rank's own."""
    return isinstance(state, Mapping) and set(state) == {"random_state"}


def _state_of(part: Any) -> Any:
    if shards_of(part) is not None:
        return gather_state_dict(part)
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if isinstance(part, list | tuple) and any(hasattr(one, "state_dict") for one in part):
        return [_state_of(one) for one in part]
    return part


def _name_errors(states: dict[str, Any], parts: Mapping[str, Any]) -> Iterator[str]:
    for name, part in parts.items():
        if name not in states or name == RANDOM:
            yield f"it has no entry {name!r}, its entries are {sorted(map(str, states))}"
        elif len(_several(states[name])) != len(_several(part)):
            counts = f"{len(_several(states[name]))} states, {len(_several(part))} objects were"
            yield f"its entry {name!r} has {counts} given"


def _refuse(errors: Iterable[str]) -> None:
    listed = list(errors)
    if listed:
        raise StateError(f"the checkpoint does not fit: {'; '.join(listed)}. Nothing was loaded")
