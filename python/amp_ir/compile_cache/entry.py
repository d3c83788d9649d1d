# SPDX-License-Identifier: Apache-2.0
"""An entry of the compile cache, in the form of a program of a model file.

A zip, sealed with a digest of all its bytes (files/sealed_zip.py):

    program.json    the key's parts, and what `BuiltStep.describe` says
    program.so      the machine code, with the virtual machine's program

Its name is its key, which is the digest of the parts in it: an entry under another's name is
refused. The seal finds damage and alterations; it is not a signature.
"""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import attrs

from amp_ir.compile_cache.key import digest_of
from amp_ir.errors import FileFormatError
from amp_ir.files.sealed_zip import Seal
from amp_ir.ir.built_step import BuiltStep

FORMAT = 1
_KIND, _REMEDY = "program", "it is made again"
_DESCRIPTION, _LIBRARY = "program.json", "program.so"


@attrs.frozen
class CacheEntry:
    """A built step and the parts of its key."""

    parts: dict[str, Any] = attrs.field(repr=False)
    built: BuiltStep

    @property
    def key(self) -> str:
        """Return the name of the entry."""
        return digest_of(self.parts)


def entry_to_bytes(entry: CacheEntry) -> bytes:
    """Return the file of an entry."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        description = {"parts": entry.parts, **entry.built.describe()}
        archive.writestr(_DESCRIPTION, json.dumps(description))
        archive.writestr(_LIBRARY, entry.built.library)
    Seal(_KIND, FORMAT, _REMEDY).append(file)
    return file.getvalue()


def entry_from_bytes(content: bytes, key: str, path: Any, *, remedy: str = _REMEDY) -> CacheEntry:
    """Return the entry of that key that a file holds; `path` and `remedy` are for messages.

    Raises:
        FileFormatError: it is damaged, altered, of another key or of another format.
    """
    file = io.BytesIO(content)
    if not Seal(_KIND, FORMAT, remedy).check(file, path):
        raise FileFormatError(f"{path} has no seal at its end; {remedy}")
    try:
        with zipfile.ZipFile(file) as archive:
            description = json.loads(_stored(archive, _DESCRIPTION))
            library = _stored(archive, _LIBRARY)
        entry = CacheEntry(description["parts"], BuiltStep.read(description, library))
        found = entry.key
    except Exception as error:  # any, for it was altered and sealed again
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise FileFormatError(f"{path} cannot be read: {reason}; {remedy}") from error
    if found != key:
        raise FileFormatError(f"{path} is the entry {found}, and {key} was expected; {remedy}")
    return entry


def _stored(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a file of the archive, which is not compressed: it is as large as it says."""
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    return archive.read(name)
