# SPDX-License-Identifier: Apache-2.0
"""Modules that distribute their training in ways that a compiled step does not follow.

`DistributedDataParallel` is followed where it is passed in `model=`: `distributed/replicas.py`.
"""

from __future__ import annotations

import torch

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def wrapper_error(module: torch.nn.Module) -> str | None:
    """Return what is wrong with a module that distributes its training, and what to do."""
    names = {kind.__name__ for kind in type(module).__mro__}
    wrapper = next((name for name in _WRAPPERS if name in names), None)
    if wrapper is None:
        return None
    if wrapper == "DataParallel":
        return (
            "is a DataParallel, whose copies on other devices a compiled step does not run; start "
            "a process for each device with torchrun, and use DistributedDataParallel or "
            "data_parallel=True"
        )
    if wrapper == "DistributedDataParallel":
        return (
            "is a DistributedDataParallel that was not passed in model=, so its exchange between "
            "processes would be left out; pass it there"
        )
    return (
        f"is a {wrapper}, whose parameters a rank holds in part, which a compiled step does not "
        "follow; use DistributedDataParallel or data_parallel=True, where each rank holds all"
    )
