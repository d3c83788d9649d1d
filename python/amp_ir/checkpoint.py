# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: ordinary PyTorch files of state dictionaries, written so that a kill does no harm.

    amp_ir.save_checkpoint("run.pt", model=model, optimizer=optimizer, scaler=scaler, train=train,
                           epoch=3)
    epoch = amp_ir.load_checkpoint("run.pt", model=model, optimizer=optimizer, scaler=scaler,
                                   train=train)["epoch"]

The file is `torch.save` of one dictionary with an entry for each name, so that
`torch.load("run.pt")["model"]` is the model's state dictionary in plain PyTorch too. The random
state of torch, Python and NumPy is in it as "random".
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch

from amp_ir.errors import ArgumentError, StateError

RANDOM = "random"
# Beside the file itself, so that os.replace stays within one file system.
PARTIAL_SUFFIX = ".partial"


def save_checkpoint(path: str | os.PathLike[str], **parts: Any) -> None:
    """Write a checkpoint; a process that is killed meanwhile leaves the one before whole.

    The bytes go to `path` + ".partial" and to the disk, then take the place of `path` in one
    operation of the file system. The next call overwrites what a killed one left behind.
    Gradients are in no state dictionary: save where an accumulation has ended.

    Args:
        path: the file to write.
        parts: by name, objects with `state_dict()` (models, optimizers, scalers, schedulers,
            compiled steps), lists of such, or plain values: numbers, strings, tensors and
            containers of these.

    Raises:
        ArgumentError: a part is named "random".
        OSError: the file cannot be written.
    """
    if RANDOM in parts:
        raise ArgumentError('a part is named "random", which is the random state; rename it')
    states = {name: _state_of(part) for name, part in parts.items()}
    states[RANDOM] = _random_state()
    target = Path(path)
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    with open(partial, "wb") as file:
        _write(states, file)
    os.replace(partial, target)
    _sync_folder(target.parent)


def load_checkpoint(path: str | os.PathLike[str], **parts: Any) -> dict[str, Any]:
    """Load a checkpoint into objects, set the random state, and return the plain values.

    Args:
        path: what `save_checkpoint` wrote.
        parts: by the names used there, the objects to load into, or lists of them.

    Returns:
        the entries of the file that no object was given for, by name.

    Raises:
        StateError: the file has no entry of a name that was given, or another number of objects
            for it; nothing has been loaded. What `load_state_dict` raises is passed on.
    """
    states = torch.load(path, map_location="cpu", weights_only=True)
    _check_names(states, parts)
    for name, part in parts.items():
        for one, state in zip(_several(part), _several(states.pop(name)), strict=True):
            one.load_state_dict(state)
    # Last, since loading may draw numbers: nothing after this line may.
    _set_random_state(states.pop(RANDOM))
    return states


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _state_of(part: Any) -> Any:
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if isinstance(part, list | tuple) and any(hasattr(one, "state_dict") for one in part):
        return [_state_of(one) for one in part]
    return part


def _check_names(states: Any, parts: Mapping[str, Any]) -> None:
    if not isinstance(states, dict) or RANDOM not in states:
        raise StateError("the file is no checkpoint: it has no entry for the random state")
    faults = []
    for name, part in parts.items():
        if name not in states or name == RANDOM:
            faults.append(f"it has no entry {name!r}, its entries are {sorted(states)}")
        elif len(_several(states[name])) != len(_several(part)):
            counts = f"{len(_several(states[name]))} states, {len(_several(part))} objects were"
            faults.append(f"its entry {name!r} has {counts} given")
    if faults:
        raise StateError(f"the checkpoint does not fit: {'; '.join(faults)}. Nothing was loaded")


def _write(states: dict[str, Any], file: BinaryIO) -> None:
    torch.save(states, file)
    file.flush()
    # Without this a power failure could leave the new name with none of the bytes.
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Put the renaming itself on the disk; where folders cannot be opened, the system does."""
    if os.name != "posix":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _random_state() -> dict[str, Any]:
    """Every generator a data loader or a step may draw from, in types that torch.load trusts."""
    numpys: Any = numpy.random.get_state()
    name, keys, *rest = numpys
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype("int64")), *rest),
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    version, words, following = state["python"]
    random.setstate((version, tuple(words), following))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
