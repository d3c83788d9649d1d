# SPDX-License-Identifier: Apache-2.0
"""Training on several processes or devices, which a compiled step does not support.

Besides the forward pass, `DistributedDataParallel` and similar modules sum gradients over
processes, in hooks of the backward pass that are not ops of the step. Without them, the processes'
models would diverge without an error.
"""

from __future__ import annotations

import torch

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def wrapper_error(module: torch.nn.Module) -> str | None:
    """Return what is wrong with a module that distributes its training; None for any other."""
    names = {kind.__name__ for kind in type(module).__mro__}
    wrapper = next((name for name in _WRAPPERS if name in names), None)
    if wrapper is None:
        return None
    if wrapper == "DataParallel":
        return "is a DataParallel, whose copies on other devices a compiled step does not run"
    return f"is a {wrapper}, whose exchange between processes a compiled step would leave out"


WRAPPER_ADVICE = (
    "train it in plain PyTorch; or train in one process, and let the step use and model= be the "
    "module without the wrapper"
)


def process_count() -> int:
    """Return the number of processes that train together; 1 where nothing was initialised."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def group_error() -> str | None:
    """Return what is wrong where several processes train together; None where one does."""
    count = process_count()
    if count == 1:
        return None
    return (
        f"torch.distributed has a group of {count} processes, and a compiled step exchanges "
        "nothing with the others: train in plain PyTorch; or, where each process trains for "
        "itself, call torch.distributed.destroy_process_group() first"
    )
