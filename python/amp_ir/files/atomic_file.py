# SPDX-License-Identifier: Apache-2.0
"""Write a file so that a reader sees the old content or the new, and never a part of it.

    with atomic_file(path) as file:
        file.write(content)

The content goes to a temporary file in the folder of the target. It is created exclusively, under
a random name and never through a link. It is flushed to the disk and then renamed to the target in
one operation of the file system. An error removes it. The next writer of the same target removes
the temporary file of a process that was killed: its lock is gone.

A target that is a link stays one: the file that it leads to is replaced, as an editor does it. A
file that existed keeps its mode, and its owner where the system allows that; a new one has what
the umask leaves of 0666. A target that is not a file, such as /dev/stdout or a pipe, is written
directly: nothing there could be half a file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from amp_ir.files.check_path import check_path

SUFFIX = ".part"
# A file system takes names of up to 255 bytes; the random part and the suffix have 23.
_LONGEST_STEM_BYTES = 200
_EXCLUSIVE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A planted link or pipe of such a name is neither followed nor waited for.
_LEFT_BEHIND = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], *, new_mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a binary file, readable too, whose content replaces `path` at the end.

    `new_mode` is the mode of a file that did not exist, less the umask.

    Raises:
        ArgumentError: `path` is no path.
        OSError: the file cannot be written; it is as before, or still missing.
    """
    check_path(path)
    target = _target_of(path)
    before = _status(target)
    if before is not None and not stat.S_ISREG(before.st_mode):
        with open(target, "wb") as direct:
            yield direct
        return
    _remove_left_behind(target)
    descriptor, temporary = _create(target, new_mode if before is None else 0o600)
    try:
        with open(descriptor, "w+b") as file:
            yield file
            file.flush()
            _keep_owner_and_mode(descriptor, before)
            # Without this a power failure could leave the new name with none of the bytes.
            os.fsync(descriptor)
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(target.parent)


def write_bytes(path: str | os.PathLike[str], content: bytes, *, new_mode: int = 0o666) -> None:
    """Write a whole file at once; see `atomic_file`."""
    with atomic_file(path, new_mode=new_mode) as file:
        file.write(content)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole file of UTF-8 at once; see `atomic_file`."""
    write_bytes(path, text.encode())


def _target_of(path: str | os.PathLike[str]) -> Path:
    """Return the file to replace: the end of the links."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # only a circle of links is left as one
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def _status(target: Path) -> os.stat_result | None:
    try:
        return target.stat()
    except FileNotFoundError:
        return None


def _stem(target: Path) -> str:
    """Return the common prefix of the names of a target's temporary files."""
    return os.fsdecode(os.fsencode(f".{target.name}")[:_LONGEST_STEM_BYTES])


def _create(target: Path, mode: int) -> tuple[int, Path]:
    """Create a file beside the target, locked; return it and its path.

    One that replaces a file is the owner's alone until it has that file's mode.
    """
    while True:
        temporary = target.with_name(f"{_stem(target)}.{secrets.token_hex(8)}{SUFFIX}")
        try:
            descriptor = os.open(temporary, _EXCLUSIVE, mode)
        except FileNotFoundError as error:
            # The temporary file's name says nothing to the user.
            raise FileNotFoundError(
                error.errno, "There is no such folder", str(target.parent)
            ) from None
        _lock(descriptor, fcntl.LOCK_EX)
        # Between the creation and the lock another process may take it for one left behind.
        if os.fstat(descriptor).st_nlink:
            return descriptor, temporary
        os.close(descriptor)


def _lock(descriptor: int, how: int) -> bool:
    """Take the lock of a living writer; False where another has it, or locks do not exist."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True


def _remove_left_behind(target: Path) -> None:
    """Remove the target's temporary files that no living process writes."""
    stem = _stem(target)
    pattern = re.compile(re.escape(stem) + r"\.[0-9a-f]{16}" + re.escape(SUFFIX))
    with contextlib.suppress(OSError):
        # A cache has thousands of names, of which few begin so.
        names = [name for name in os.listdir(target.parent) if name.startswith(stem)]
        for name in filter(pattern.fullmatch, names):
            with contextlib.suppress(OSError):
                _remove_if_dead(target.with_name(name))


def _remove_if_dead(temporary: Path) -> None:
    descriptor = os.open(temporary, _LEFT_BEHIND)
    try:
        if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            os.unlink(temporary)
    finally:
        os.close(descriptor)


def _keep_owner_and_mode(descriptor: int, before: os.stat_result | None) -> None:
    if before is None:
        return
    with contextlib.suppress(PermissionError):
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _sync_folder(folder: Path) -> None:
    """Flush the renaming itself to the disk, where the file system lets folders be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
