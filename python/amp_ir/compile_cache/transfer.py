# SPDX-License-Identifier: Apache-2.0
"""A compile cache as one file, for another machine of the same kind: a sealed zip of its entries.

Machine code runs in whoever imports it, and a seal is no signature: take such files from nobody
whose programs you would not run.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import attrs

from amp_ir.compile_cache.cache import CompileCache
from amp_ir.compile_cache.entry import CacheEntry, entry_from_bytes, entry_to_bytes
from amp_ir.errors import FileFormatError
from amp_ir.files.atomic_file import atomic_file
from amp_ir.files.check_path import check_path
from amp_ir.files.sealed_zip import Seal

FORMAT = 1
_REMEDY = "export the cache again, or take another copy of the file; nothing was imported"
_SEAL = Seal("cache", FORMAT, _REMEDY)


@attrs.frozen
class Transferred:
    """How many entries were written or read, and their bytes."""

    count: int
    nbytes: int


def export_cache(cache: CompileCache, path: str | os.PathLike[str]) -> Transferred:
    """Write every entry that is whole to one file.

    Raises:
        OSError: the cache cannot be read, or the file not written.
    """
    count = nbytes = 0
    # As the cache: the programs in it are nobody else's.
    with atomic_file(path, new_mode=0o600) as file:
        with zipfile.ZipFile(file, "w") as archive:
            for one in cache.files.entries():
                entry = cache.get(one.name)
                if entry is not None:
                    content = entry_to_bytes(entry)
                    archive.writestr(one.name, content)
                    count, nbytes = count + 1, nbytes + len(content)
        _SEAL.append(file)
    return Transferred(count, nbytes)


def import_cache(cache: CompileCache, path: str | os.PathLike[str]) -> Transferred:
    """Add the entries of a file that `export_cache` wrote; all are checked before one is added.

    Raises:
        FileFormatError: the file, or an entry in it, is damaged or of another format.
        OSError: it cannot be read, or the cache not written.
    """
    check_path(path)
    with open(path, "rb") as file:
        if not _SEAL.check(file, path):
            raise FileFormatError(
                f"{path} is not a compile cache of amp_ir, or damaged: it has no seal at its end; "
                f"{_REMEDY}"
            )
        entries = []
        try:
            with zipfile.ZipFile(file) as archive:
                for one in archive.infolist():
                    if one.compress_type != zipfile.ZIP_STORED:
                        raise ValueError(f"{one.filename} is compressed")
                    place = Path(os.fspath(path), one.filename)
                    content = archive.read(one)
                    entries.append(entry_from_bytes(content, one.filename, place, remedy=_REMEDY))
        except FileFormatError:
            raise
        except Exception as error:  # any, for it was altered and sealed again
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise FileFormatError(f"{path} cannot be read: {reason}; {_REMEDY}") from error
    return _added(cache, entries)


def _added(cache: CompileCache, entries: list[CacheEntry]) -> Transferred:
    nbytes = 0
    for entry in entries:
        content = entry_to_bytes(entry)
        cache.files.store(entry.key, content)
        nbytes += len(content)
    return Transferred(len(entries), nbytes)
