# SPDX-License-Identifier: Apache-2.0
"""Whether other processes use the machine while times are measured."""

from __future__ import annotations

import contextlib
import os


def load_warning() -> str:
    """Return why measured times may not be the machine's best; "" where it is not busy."""
    with contextlib.suppress(AttributeError, OSError):
        # Our own threads are part of the load; more than them belong to other processes.
        load, cpus = os.getloadavg()[0], os.cpu_count() or 1
        if load > cpus + 0.5:
            return f"The machine is busy (load {load:.1f} on {cpus} CPUs): times are not its best."
    return ""
