# SPDX-License-Identifier: Apache-2.0
"""Cache directories of a user, and removal of damaged entries."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

_LOG = logging.getLogger("amp_ir")
_TOLD: set[object] = set()


def cache_directory(name: str) -> Path | None:
    """Return the directory for one kind of cache (the XDG base directory rules).

    None where this user has no home directory: nothing is cached then.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the rules say to ignore another
        return Path(given) / "amp_ir" / name
    try:
        return Path.home() / ".cache" / "amp_ir" / name
    except RuntimeError:
        return None


def drop_damaged(path: Path, reason: str) -> None:
    """Remove a cache's file that cannot be used, and log it once."""
    with contextlib.suppress(OSError):
        path.unlink()
    say_once(path, logging.WARNING, f"{path} is not used and is made again: {reason}")


def say_once(subject: object, level: int, message: str) -> None:
    """Log a message, unless one about this subject was logged by this process."""
    if subject not in _TOLD:
        _TOLD.add(subject)
        _LOG.log(level, "%s", message)
