# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of optimizer state that is split, beside the 1 / N that is promised."""

from __future__ import annotations

import logging
import math

import attrs
import numpy
import torch

from amp_ir.distributed.shards import GRAIN, Shards
from amp_ir.ir.short_list import short_names
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.ir.tensor_layout import dtype_nbytes

log = logging.getLogger("amp_ir")

# What a rank may hold above an equal part, of all the state.
TOLERANCE = 0.02
# An excess of fewer bytes is a note, and no warning.
_WARNED_NBYTES = 2**20


@attrs.frozen
class ShardBalance:
    """The bytes of the optimizers' state: all, and those of the rank that holds most.

    `whole` names what every rank holds all of, `whole_nbytes` are its bytes.
    """

    kind: str
    ranks: int
    nbytes: int
    most_nbytes: int
    fullest_rank: int
    whole: tuple[str, ...]
    whole_nbytes: int

    @property
    def excess_nbytes(self) -> int:
        """Return the bytes above 1 / N and the tolerance; 0 where there are none."""
        promised = (1 / self.ranks + TOLERANCE) * self.nbytes
        return max(0, math.ceil(self.most_nbytes - promised))

    def __str__(self) -> str:
        """Say what a rank holds, and why that is more than its share."""
        why = (
            f"{short_names(self.whole)} are whole on every rank ({_in_words(self.whole_nbytes)}): "
            "state is split that has the shape of a parameter of a data parallel model, in buckets "
            f"of more than {GRAIN} elements"
            if 2 * self.whole_nbytes >= self.excess_nbytes
            else f"a rank's part of a bucket is a multiple of {GRAIN} elements"
        )
        return (
            f"shard={self.kind!r} over {self.ranks} ranks leaves "
            f"{_in_words(self.most_nbytes)} of the optimizers' {_in_words(self.nbytes)} on rank "
            f"{self.fullest_rank}, more than 1 / {self.ranks} and {TOLERANCE:.0%} of all: {why}"
        )


def _in_words(nbytes: int) -> str:
    return f"{nbytes} bytes" if nbytes < 2**20 else f"{nbytes / 2**20:.4g} MiB"


def shard_balance(mod: StepModule, shards: Shards) -> ShardBalance | None:
    """Return how the state of a step, as it was captured, is split; None where it has none."""
    count = shards.groups[0].size
    numbers = numpy.arange(count)
    held, nbytes, whole, whole_nbytes = numpy.zeros(count, dtype=numpy.int64), 0, [], 0
    for one in mod.signature.inputs:
        if one.role is not Role.OPTIMIZER_STATE:
            continue
        item = dtype_nbytes(one.dtype)
        own = math.prod(one.shape) * item
        nbytes += own
        tensor = mod.state[one.name]
        owner = shards.parameter_of(tensor) if isinstance(tensor, torch.Tensor) else None
        place = None if owner is None else shards.place_of(owner)
        if place is None:
            whole.append(one.name)
            whole_nbytes += own
            continue
        begin = numbers * place.bucket.part_size - place.offset
        size = place.bucket.members[place.member].numel()
        ends = numpy.clip(begin + place.bucket.part_size, 0, size)
        held += item * (ends - numpy.clip(begin, 0, size))
    if not nbytes:
        return None
    fullest = int(held.argmax())
    most = int(held[fullest]) + whole_nbytes
    return ShardBalance(shards.kind, count, nbytes, most, fullest, tuple(whole), whole_nbytes)


def note_of_excess(mod: StepModule) -> tuple[str, ...]:
    """Return a note where a rank holds more than its share of a split state; else nothing.

    Much more is a warning of the logger "amp_ir", too.
    """
    shards: Shards | None = getattr(mod.hooks.ranks, "shards", None)
    balance = None if shards is None else shard_balance(mod, shards)
    if balance is None or not balance.excess_nbytes:
        return ()
    if balance.excess_nbytes >= _WARNED_NBYTES:
        log.warning("%s", balance)
    return (str(balance),)
