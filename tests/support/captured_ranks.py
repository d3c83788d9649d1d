# SPDX-License-Identifier: Apache-2.0
"""Steps of several ranks that are captured in one process, without a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm
from torch import nn

from amp_ir.capture import trace
from amp_ir.distributed.process_group import Group
from amp_ir.distributed.replicas import Ranks, Replica
from amp_ir.distributed.shards import Shards
from amp_ir.importer import import_step as importer
from amp_ir.ir.step_module import StepModule


def replicas(
    models: Sequence[nn.Module], count: int, *, rank: int = 0, shard: str = "", **options: Any
) -> Ranks:
    """Plain models as they are on one of `count` ranks; nothing can be sent."""
    group = Group(None, rank, count, 20.0)
    made = Ranks([*models], [Replica(one, group, **options) for one in models], [group])
    made.shards = Shards(shard, [group]) if shard else None
    return made


def captured(
    step: Callable[..., Any],
    batch: tuple[torch.Tensor, ...],
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    count: int = 2,
    *,
    scaler: Any = None,
    **options: Any,
) -> StepModule:
    """A step as imported, with whole collectives."""
    ranks = replicas(models, count, **options)
    found = trace.capture_step(
        step, batch, model=[*models], optimizer=[*optimizers], scaler=scaler, ranks=ranks
    )
    return importer.import_step(found)


def op_names(ir: tvm.IRModule) -> list[str]:
    """The dialect's and Relax's ops of a step, in order."""
    bindings = [b for block in ir["main"].body.blocks for b in block.bindings]
    return [b.value.op.name for b in bindings if hasattr(b.value, "op")]
