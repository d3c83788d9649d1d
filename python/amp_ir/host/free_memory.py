# SPDX-License-Identifier: Apache-2.0
"""The memory of this machine, and how much of it is free."""

from __future__ import annotations

import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# What is taken for free where the system does not say.
_UNKNOWN_NBYTES = 1 << 30


def memory_nbytes() -> dict[str, int]:
    """Return what Linux says of its memory, by its names ("MemAvailable"); nothing elsewhere."""
    try:
        text = _MEMINFO.read_text()
    except OSError:
        return {}
    return {name: int(kib) * 1024 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}


def free_nbytes() -> int:
    """Return how many bytes a process may still take without swapping; 1 GiB if not known."""
    return memory_nbytes().get("MemAvailable", _UNKNOWN_NBYTES)
