# SPDX-License-Identifier: Apache-2.0
"""The file of a checkpoint: `torch.save`'s file, sealed with a digest of all its bytes.

The seal is the comment at the end of the zip file, which PyTorch and zip tools ignore:

    amp_ir checkpoint format 2 sha256 5f1c...

and the SHA-256 is of every byte before it. It is checked before PyTorch sees the file, whose
reader checks no CRC and trusts the lengths that it reads. The dictionary also has an entry
"amp_ir", so that a file that lost its seal does not pass for one of amp_ir 0.1.0. Those had none:
they are read with a warning where the CRCs of the zip file are right, since a run may depend on
one.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
import zipfile
from typing import Any, BinaryIO

import torch

from amp_ir.errors import ArgumentError, FileFormatError
from amp_ir.files.atomic_file import atomic_file

FORMAT = 2
# The entry of the dictionary that says that there must be a seal, by this text.
ENTRY = "amp_ir"
MARK = "this checkpoint ends with a seal"
_HEAD = b"amp_ir checkpoint format %d sha256 "
_SEAL = re.compile(rb"amp_ir checkpoint format (\d{1,9}) sha256 \Z")
_HEX_BYTES = 64
_LONGEST_SEAL_BYTES = 128
_CHUNK_BYTES = 1 << 20
_REMEDY = "take an earlier checkpoint; nothing was loaded"


def write_states(path: str | os.PathLike[str], states: dict[str, Any]) -> None:
    """Write state dictionaries, sealed, over an existing file.

    Raises:
        ArgumentError: they hold objects that a checkpoint cannot be loaded with.
        OSError: the file cannot be written.
    """
    with atomic_file(path) as file:
        torch.save(states, file)
        _refuse_objects(file)
        _seal(file)


def read_states(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that `write_states` wrote.

    Raises:
        FileFormatError: the file is damaged, newer, or no checkpoint.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        is_sealed = _check_seal(file, path)
        if not is_sealed:
            _check_unsealed(file, path)
        file.seek(0)
        try:
            states = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # any, for PyTorch passes on what its parsers raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FileFormatError(
                f"{path} cannot be read: torch.load(weights_only=True) says: {reason}; {_REMEDY}"
            ) from error
    if not isinstance(states, dict):
        found = type(states).__name__
        raise FileFormatError(f"{path} is no checkpoint: it holds a {found}, expected a dictionary")
    return states


def _seal(file: BinaryIO) -> None:
    """Append the comment, after its length in the last two bytes of the zip file."""
    head = _HEAD % FORMAT
    file.seek(-2, os.SEEK_END)
    file.write((len(head) + _HEX_BYTES).to_bytes(2, "little") + head)
    digest = _digest(file, file.tell())
    file.seek(0, os.SEEK_END)
    file.write(digest.encode())


def _check_seal(file: BinaryIO, path: str | os.PathLike[str]) -> bool:
    """Return whether the file has a seal; refuse a broken one."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - _LONGEST_SEAL_BYTES, 0))
    tail = file.read()
    found = _SEAL.search(tail[:-_HEX_BYTES])
    if found is None:
        return False
    if int(found[1]) > FORMAT:
        raise FileFormatError(
            f"{path} has format {int(found[1])}, and this version of amp_ir reads up to {FORMAT}; "
            "it was written by a newer one: use that to load it"
        )
    made, said = _digest(file, end - _HEX_BYTES), tail[-_HEX_BYTES:].decode("latin-1")
    if made != said:
        raise FileFormatError(
            f"{path} is damaged: the SHA-256 of its content is {made}, and its seal says {said!r}; "
            f"{_REMEDY}"
        )
    return True


def _digest(file: BinaryIO, nbytes: int) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while nbytes:
        chunk = file.read(min(nbytes, _CHUNK_BYTES))
        if not chunk:
            break  # cut off meanwhile: another digest
        digest.update(chunk)
        nbytes -= len(chunk)
    return digest.hexdigest()


def _check_unsealed(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """Refuse a file that lost its seal, and entries of another CRC, which PyTorch does not check.

    Warns of a file of amp_ir 0.1.0.
    """
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            had_seal = any([_has_mark(archive, name) for name in names])
    except Exception as error:  # any, for damage reaches every part of the reader
        raise FileFormatError(
            f"{path} is no checkpoint, or damaged: it has no seal of amp_ir, and as a zip file it "
            f"cannot be read: {error or type(error).__name__}; {_REMEDY}"
        ) from error
    if had_seal or len(set(names)) != len(names):
        fault = "its seal is missing" if had_seal else "it has entries of the same name"
        raise FileFormatError(
            f"{path} was altered or damaged after it was written: {fault}; {_REMEDY}"
        )
    warnings.warn(
        f"{path} is of amp_ir 0.1.0 and has no seal, so that damage may go unseen; save it again "
        "with amp_ir.save_checkpoint",
        stacklevel=4,
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
            "loaded with; give numbers, strings, tensors and containers of these (a NumPy number "
            "is made one with .item(), an array with torch.from_numpy). Nothing was written"
        )
