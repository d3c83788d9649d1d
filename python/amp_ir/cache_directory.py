# SPDX-License-Identifier: Apache-2.0
"""Where a user's caches lie."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(name: str) -> Path:
    """The directory for one kind of what is kept (the XDG base directory rules)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "amp_ir" / name
