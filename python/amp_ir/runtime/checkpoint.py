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

from amp_ir.errors import ArgumentError, FileFormatError, StateError
from amp_ir.runtime.checkpoint_file import ENTRY, FORMAT, MARK, read_states, write_states
from amp_ir.runtime.checkpoint_parts import Part, kind_of, load_all, part_errors
from amp_ir.runtime.random_state import random_state, random_state_errors

RANDOM = "random"
_RESERVED = {RANDOM: "the random state", ENTRY: "what the file says of itself"}


def save_checkpoint(path: str | os.PathLike[str], **parts: Any) -> None:
    """Write a checkpoint; a process that is killed meanwhile leaves the previous file intact.

    The bytes go to a temporary file beside `path` and to the disk, then replace `path` in one
    operation of the file system (files/atomic_file.py). The next call removes what a killed one
    left behind. Gradients are in no state dictionary: save where an accumulation has ended.

    Args:
        path: the file to write; where it is a link, its target.
        parts: by name, objects with `state_dict()` (models, optimizers, scalers, schedulers,
            compiled steps), lists of such, or plain values: numbers, strings, tensors and
            containers of these.

    Raises:
        ArgumentError: a part is named "random" or "amp_ir", or holds objects of other classes.
        OSError: the file cannot be written.
    """
    for name, what in _RESERVED.items():
        if name in parts:
            raise ArgumentError(f'a part is named "{name}", which is {what}; rename it')
    states = {name: _state_of(part) for name, part in parts.items()}
    states[RANDOM] = random_state()
    classes = {name: [kind_of(one) for one in _several(part)] for name, part in parts.items()}
    kinds = {name: several for name, several in classes.items() if any(several)}
    states[ENTRY] = {"mark": MARK, "format": FORMAT, "kinds": kinds}
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
        FileFormatError: the file is damaged, is of a newer format, or is not a checkpoint.
        StateError: the file does not fit the objects; the message lists everything.
        OSError: the file cannot be read.
    """
    states = read_states(path)
    if RANDOM not in states:
        raise FileFormatError(f"{path} is not a checkpoint: it has no entry for the random state")
    kinds = (states.pop(ENTRY, None) or {}).get("kinds", {})
    _refuse(_name_errors(states, parts))
    loaded = [one for name, part in parts.items() for one in _parts(name, part, states, kinds)]
    random = states.pop(RANDOM)
    errors = [error for one in loaded for error in part_errors(one)]
    _refuse([*errors, *random_state_errors(random)])
    load_all(loaded, random)
    return states


def _parts(
    name: str, given: Any, states: dict[str, Any], kinds: Mapping[str, Any]
) -> Iterator[Part]:
    objects, saved = _several(given), _several(states.pop(name))
    classes = kinds.get(name, [None] * len(objects))
    for number, (one, state, kind) in enumerate(zip(objects, saved, classes, strict=True)):
        yield Part(f"{name}[{number}]" if len(objects) > 1 else name, one, state, kind)


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _state_of(part: Any) -> Any:
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
