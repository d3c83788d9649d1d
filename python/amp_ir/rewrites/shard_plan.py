# SPDX-License-Identifier: Apache-2.0
"""What of a captured step is split over the ranks, by the names of its inputs."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from amp_ir.distributed.shards import Bucket, Place, Shards
from amp_ir.ir.step_module import Role, StepModule


@attrs.frozen
class ShardPlan:
    """What is split: the place of each parameter, and the state that is held in parts.

    Names are those of inputs; `parts` has the parameter of each state. With `drops_gradients` no
    whole mean of a gradient may be left when the step ends.
    """

    rank: int
    places: Mapping[str, Place]
    parts: Mapping[str, str]
    drops_gradients: bool = False

    @property
    def buckets(self) -> dict[int, Bucket]:
        """The buckets of the parameters, by their numbers."""
        return {one.bucket.number: one.bucket for one in self.places.values()}


def shard_plan(mod: StepModule) -> ShardPlan | None:
    """Return what is split; None for nothing.

    A parameter is split where the step uses state of it that is: without, as SGD without momentum,
    there is nothing to save.
    """
    shards: Shards | None = getattr(mod.hooks.ranks, "shards", None)
    if shards is None:
        return None
    tensors = [
        (one, mod.state[one.name])
        for one in mod.signature.inputs
        if one.role in (Role.PARAMETER, Role.OPTIMIZER_STATE)
    ]
    names = {id(tensor): one.name for one, tensor in tensors if one.role is Role.PARAMETER}
    places: dict[str, Place] = {}
    parts: dict[str, str] = {}
    for one, tensor in tensors:
        owner = shards.parameter_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if one.role is Role.OPTIMIZER_STATE and owner is not None:
            place = shards.place_of(owner)
            assert place is not None
            parts[one.name] = names[id(owner)]
            places[names[id(owner)]] = place
    if not parts:
        return None
    return ShardPlan(shards.groups[0].rank, places, parts, shards.kind == "gradients")
