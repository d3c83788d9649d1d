# SPDX-License-Identifier: Apache-2.0
"""Training that several processes or devices share, which a compiled step does not take part in.

What `DistributedDataParallel` and its like do besides the forward pass (sums of gradients over
processes, started by hooks of the backward pass) is no op of the step. Left out, the processes'
models would drift apart without a word.
"""

from __future__ import annotations

import torch

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def wrapper_fault(module: torch.nn.Module) -> str | None:
    """What is wrong with a module that shares its training; None for any other."""
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
    """The processes that train together; 1 where nothing was initialised."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def group_fault() -> str | None:
    """What is wrong where several processes train together; None where one does."""
    count = process_count()
    if count == 1:
        return None
    return (
        f"torch.distributed has a group of {count} processes, and a compiled step exchanges "
        "nothing with the others: train in plain PyTorch; or, where each process trains for "
        "itself, call torch.distributed.destroy_process_group() first"
    )
