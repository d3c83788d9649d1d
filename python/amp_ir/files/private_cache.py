# SPDX-License-Identifier: Apache-2.0
"""A directory of entries that hold code: its user's alone, bounded, safe between processes.

Whoever can write such a directory can run code as its user. It is used only where it belongs to
this user and nobody else can write it, and so are its files. It is opened once for each access, and
what is checked is what is read: a path may lead elsewhere a moment later, an open directory not.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from amp_ir.files.atomic_file import SUFFIX, write_bytes
from amp_ir.files.cache_directory import drop_damaged, say_once

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A planted pipe is not waited for.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NAME = re.compile(r"[0-9a-f]{64}")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# A writer that was killed leaves its temporary file; none takes longer.
_ABANDONED_SECONDS = 3600.0
# A full cache has thousands of entries, which take longer to list than one takes to write. Other
# processes store too: by so many entries each, a cache may have more than its bytes for a while.
_MOST_UNCOUNTED = 32


@attrs.frozen
class StoredEntry:
    """An entry in the directory: its name (64 hexadecimal digits), size and last use.

    Entries of one `inode` are one file, of which each has an equal part of the bytes.
    """

    name: str
    nbytes: int
    used_at: float
    inode: int


@attrs.define
class _Room:
    """The bytes that a directory had left when it was listed, less what was stored since."""

    nbytes: int
    stored: int = 0


# By directory and limit.
_rooms: dict[tuple[Path, int], _Room] = {}


class UnsafeDirectoryError(PermissionError):
    """Another user owns the directory, or can write it."""


@attrs.frozen
class PrivateCache:
    """Entries of a directory by name; those unused for longest go where there are too many bytes.

    A cache never makes its user fail: where the directory cannot be used it is empty, which is
    logged once. Files have the mode 0600, the directory 0700.

    `within` is the cache of whose directory this one is a part: one of both is told of.
    """

    directory: Path
    limit_nbytes: int
    within: Path | None = None

    def get(self, name: str) -> bytes | None:
        """Return the bytes of an entry, and note its use; None where there is none to be used."""
        try:
            with self._opened() as folder:
                return self._read(folder, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say(error)
            return None

    def put(self, name: str, content: bytes, *, also: Iterable[str] = ()) -> None:
        """Store an entry as a whole, if it fits; one of the same name is replaced.

        It is found under the names in `also`, too, where nothing else has such a name.
        """
        try:
            self.store(name, content, also=also)
        except OSError as error:
            self._say(error)

    def store(self, name: str, content: bytes, *, also: Iterable[str] = ()) -> None:
        """Do what `put` does, for whoever has to know that it was not done.

        Raises:
            OSError: the directory cannot be written, or is not private.
        """
        if len(content) > self.limit_nbytes:
            return
        self._make()
        with self._opened() as folder:
            write_bytes(self.directory / name, content, new_mode=0o600)
            for other in also:
                # Not every file system has links: an entry is then found by one name alone.
                with contextlib.suppress(OSError):
                    os.link(
                        name, other, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False
                    )
        self._shrink(len(content))

    def drop(self, name: str, reason: str) -> None:
        """Remove an entry that cannot be used, and log it once."""
        drop_damaged(self.directory / name, reason)

    def entries(self) -> list[StoredEntry]:
        """Return the entries, those unused for longest first.

        Raises:
            OSError: the directory cannot be read, or is not private.
        """
        found = []
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            for name in os.listdir(folder):
                # Another process may have removed it since.
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if _NAME.fullmatch(name) and stat.S_ISREG(status.st_mode):
                        nbytes = -(-status.st_size // max(status.st_nlink, 1))
                        found.append(StoredEntry(name, nbytes, status.st_mtime, status.st_ino))
                    elif name.endswith(SUFFIX) and _is_abandoned(status):
                        os.unlink(name, dir_fd=folder)
        return sorted(found, key=lambda one: (one.used_at, one.inode, one.name))

    def clear(self) -> list[StoredEntry]:
        """Remove all entries, and return what they were.

        Raises:
            OSError: the directory cannot be read or written, or is not private.
        """
        found = self.entries()
        for one in found:
            (self.directory / one.name).unlink(missing_ok=True)
        return found

    def _read(self, folder: int, name: str) -> bytes | None:
        """Return the content of the file, if it is this user's alone."""
        try:
            descriptor = os.open(name, _FILE, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            self.drop(name, "it is a link")
            return None
        try:
            status = os.fstat(descriptor)
            reason = _strangeness(status)
            if not stat.S_ISREG(status.st_mode):
                reason = "it is not a file"
            elif status.st_size > self.limit_nbytes:
                reason = f"it has {status.st_size} bytes, more than a whole cache"
            if reason:
                self.drop(name, reason)
                return None
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(status.st_size)
        finally:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # it may be a read-only file system
            os.utime(name, dir_fd=folder, follow_symlinks=False)
        return content

    def _make(self) -> None:
        """Make the directory, and those above it as the XDG rules say."""
        missing = []
        path = self.directory
        while not path.exists():
            missing.append(path)
            path = path.parent
        owner = path.stat().st_uid
        if missing and os.geteuid() == 0 != owner:
            # As by sudo: that user could not use what root makes there.
            raise PermissionError(f"{path} belongs to the user of number {owner}, and not to root")
        for one in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process made it
                one.mkdir(mode=0o700)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the directory, which has to be this user's alone.

        Raises:
            UnsafeDirectoryError: it is not.
            OSError: it cannot be opened.
        """
        folder = os.open(self.directory, _DIRECTORY)
        try:
            strange = _strangeness(os.fstat(folder))
            if strange:
                raise UnsafeDirectoryError(strange)
            yield folder
        finally:
            os.close(folder)

    def _shrink(self, stored_nbytes: int) -> None:
        room = _rooms.get((self.directory, self.limit_nbytes))
        if room is not None and room.nbytes >= stored_nbytes and room.stored < _MOST_UNCOUNTED:
            room.nbytes -= stored_nbytes
            room.stored += 1
            return
        found = self.entries()
        excess = sum(one.nbytes for one in found) - self.limit_nbytes
        for _, names_of_file in itertools.groupby(found, lambda one: one.inode):
            if excess <= 0:
                break
            for one in names_of_file:
                (self.directory / one.name).unlink(missing_ok=True)
                excess -= one.nbytes
        _rooms[self.directory, self.limit_nbytes] = _Room(-excess)

    def _say(self, error: OSError) -> None:
        """Log once why the directory is not used: a warning where somebody else is at it."""
        whole = self.within or self.directory
        if isinstance(error, UnsafeDirectoryError):
            say_once(
                whole,
                logging.WARNING,
                f"{self.directory} is not used, and steps are compiled at every start: {error}. "
                "What is stored there runs as you; give the folder to yourself alone (chmod 700), "
                "or name another in AMP_IR_CACHE",
            )
            return
        say_once(
            whole,
            logging.INFO,
            f"{whole} cannot be used, and steps are compiled at every start: {error}",
        )


def _strangeness(status: os.stat_result) -> str:
    """Return why others than this user may have written it; "" where none could."""
    if status.st_uid != os.geteuid():
        return f"it belongs to another user (number {status.st_uid})"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"other users can write it (mode {stat.S_IMODE(status.st_mode):03o})"
    return ""


def _is_abandoned(status: os.stat_result) -> bool:
    return time.time() - status.st_mtime > _ABANDONED_SECONDS
