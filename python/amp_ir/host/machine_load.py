# SPDX-License-Identifier: Apache-2.0
"""Whether other processes use the machine while times are measured."""

from __future__ import annotations

import contextlib
import os

# How OpenMP's threads wait for each other at the end of a kernel.
_WAIT_POLICY = "OMP_WAIT_POLICY"
WAIT_ADVICE = f"{_WAIT_POLICY}=passive, set before Python starts, lets threads sleep that wait"


def load_warning() -> str:
    """Return why measured times may not be the machine's best; "" where it is not busy."""
    with contextlib.suppress(AttributeError, OSError):
        # Our own threads are part of the load; more than them belong to other processes.
        load, cpus = os.getloadavg()[0], os.cpu_count() or 1
        if load > cpus + 0.5:
            text = f"The machine is busy (load {load:.1f} on {cpus} CPUs): times are not its best."
            return f"{text} {WAIT_ADVICE}." if waits_awake() else text
    return ""


def waits_awake() -> bool:
    """Return whether threads that wait for others keep their CPU, which other processes need.

    A thread that another process displaces then holds up all others of the kernel, which spin: on
    two busy CPUs a step of 50 small kernels took 3 to 100 times as long as with sleeping threads.
    """
    return os.environ.get(_WAIT_POLICY, "").lower() != "passive"
