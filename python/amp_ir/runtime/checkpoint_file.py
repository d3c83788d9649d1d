# SPDX-License-Identifier: Apache-2.0
"""The file of a checkpoint: `torch.save`'s file, sealed with a digest of all its bytes.

The seal (files/sealed_zip.py) is checked before PyTorch sees the file, whose
reader checks no CRC and trusts the lengths that it reads. The dictionary also has an entry
"amp_ir", so that a file that lost its seal does not pass for one of amp_ir 0.1.0. Those had none:
they are read with a warning where the CRCs of the zip file are right, since a run may depend on
one.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
import zipfile
from typing import Any, BinaryIO

import torch

from amp_ir.errors import ArgumentError, FileFormatError
from amp_ir.files.atomic_file import atomic_file
from amp_ir.files.check_path import check_path
from amp_ir.files.sealed_zip import Seal

FORMAT = 2
# The entry of the dictionary that says that there must be a seal, by this text.
ENTRY = "amp_ir"
# The entry of the random state; every checkpoint has one.
RANDOM = "random"
MARK = "this checkpoint ends with a seal"
_CHUNK_BYTES = 1 << 20
_REMEDY = "take an earlier checkpoint; nothing was loaded"
_PLAIN = (
    "give numbers, strings, tensors and containers of these (a NumPy number is made one with "
    ".item(), an array with torch.from_numpy), and each model, optimizer or scheduler by a name of "
    "its own or in a list (net=net, ema=ema). Nothing was written"
)
_SEAL = Seal("checkpoint", FORMAT, _REMEDY)


def write_states(path: str | os.PathLike[str], states: dict[str, Any]) -> None:
    """Write state dictionaries, sealed, over an existing file.

    Raises:
        ArgumentError: they hold objects that a checkpoint cannot be loaded with.
        OSError: the file cannot be written.
    """
    with atomic_file(path) as file:
        try:
            torch.save(states, file)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            # What it is of depends on the object and on Python's version.
            raise ArgumentError(
                f"the parts hold what a file cannot: {str(error).splitlines()[0]}; {_PLAIN}"
            ) from error
        _refuse_objects(file)
        _SEAL.append(file)


def read_states(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that `write_states` wrote.

    Raises:
        FileFormatError: the file is damaged, newer, or no checkpoint.
        OSError: it cannot be read.
    """
    check_path(path)
    with open(path, "rb") as file:
        is_sealed = _SEAL.check(file, path)
        if not is_sealed:
            _check_unsealed(file, path)
        file.seek(0)
        try:
            states = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise FileFormatError(
                f"{path} cannot be read: it holds objects of other classes than tensors, numbers, "
                "strings and containers, as torch.save(model) writes them; save the state_dict() "
                f"of each with amp_ir.save_checkpoint, or {_REMEDY}"
            ) from error
        except Exception as error:  # any, for PyTorch passes on what its parsers raise
            # Its first sentence: those after it advise on other uses of PyTorch.
            reason = re.split(r"\.\s", str(error))[0].rstrip(".") or type(error).__name__
            raise FileFormatError(
                f"{path} cannot be read: torch.load(weights_only=True) says: {reason}; {_REMEDY}"
            ) from error
    if not isinstance(states, dict) or RANDOM not in states:
        found = "no entry for the random state"
        if not isinstance(states, dict):
            found = f"a {type(states).__name__} and no dictionary"
        raise FileFormatError(
            f"{path} is not a checkpoint: it has {found}. What torch.save wrote is read by "
            "torch.load and loaded by load_state_dict; nothing was loaded"
        )
    if not is_sealed:
        warnings.warn(
            f"{path} is of amp_ir 0.1.0 and has no seal, so that damage may go unseen; save it "
            "again with amp_ir.save_checkpoint",
            stacklevel=3,
        )
    return states


def _check_unsealed(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """Refuse a file that lost its seal, and entries of another CRC, which PyTorch ignores."""
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            had_seal = any([_has_mark(archive, name) for name in names])
    except Exception as error:  # any, for damage reaches every part of the reader
        raise FileFormatError(
            f"{path} is not a checkpoint, or damaged: it has no seal of amp_ir, and as a zip file "
            f"it cannot be read: {error or type(error).__name__}; {_REMEDY}"
        ) from error
    if had_seal or len(set(names)) != len(names):
        reason = "its seal is missing" if had_seal else "it has entries of the same name"
        raise FileFormatError(
            f"{path} was altered or damaged after it was written: {reason}; {_REMEDY}"
        )


def _has_mark(archive: zipfile.ZipFile, name: str) -> bool:
    """Read an entry to its end, where its CRC is checked, and look for the mark in a pickle."""
    found = False
    with archive.open(name) as entry:
        while chunk := entry.read(_CHUNK_BYTES):
            found = found or (name.endswith(".pkl") and MARK.encode() in chunk)
    return found


def _refuse_objects(file: BinaryIO) -> None:
    """Refuse what torch.load(weights_only=True) would not load: before the run, not after it."""
    file.flush()
    file.seek(0)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if names:
        raise ArgumentError(
            f"the parts hold objects of {', '.join(sorted(names))}, which a checkpoint cannot be "
            f"loaded with; {_PLAIN}"
        )
