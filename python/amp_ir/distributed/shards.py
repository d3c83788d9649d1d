# SPDX-License-Identifier: Apache-2.0
"""Optimizer state that is split over the ranks: which rank holds which part of which parameter.

The parameters of an optimizer lie one after the other in buckets, and each rank holds an equal
range of every bucket. Its part of a parameter is where the two meet. What an optimizer keeps for
the elements of a parameter (moments, momentum, master weights) is the same part of it, as a flat
tensor; the parameters themselves stay whole on every rank.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", stages 1 and 2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import attrs
import torch
from torch.utils.weak import WeakIdKeyDictionary

from amp_ir.distributed.process_group import Group
from amp_ir.ir.bucket_sizes import BucketSizes

# Elements: 64 bytes of a dtype of two, the alignment of tensors in the arena.
GRAIN = 32
KINDS = ("optimizer", "gradients")


def _padded(size: int) -> int:
    """Return the elements that a parameter takes in a bucket."""
    return -(-size // GRAIN) * GRAIN


@attrs.define(eq=False)
class Bucket:
    """Parameters of one optimizer and dtype, one after the other in a range of elements."""

    number: int
    group: int
    ranks: int
    members: list[torch.Tensor] = attrs.field(factory=list)
    offsets: list[int] = attrs.field(factory=list)
    end: int = 0

    def add(self, parameter: torch.Tensor) -> None:
        """Put a parameter behind the others."""
        self.members.append(parameter)
        self.offsets.append(self.end)
        self.end += _padded(parameter.numel())

    @property
    def is_split(self) -> bool:
        """Whether more than one rank has elements."""
        return self.part_size < self.end

    @property
    def part_size(self) -> int:
        """The number of elements of each rank's part, a multiple of GRAIN."""
        return math.ceil(self.end / self.ranks / GRAIN) * GRAIN

    def part(self, member: int, rank: int) -> tuple[int, int]:
        """Return the first and the end of a rank's part of a parameter; equal for none."""
        size, offset = self.members[member].numel(), self.offsets[member]
        first = min(max(rank * self.part_size - offset, 0), size)
        end = min(max((rank + 1) * self.part_size - offset, 0), size)
        return first, end

    def share_of(self, members: Sequence[int]) -> float:
        """Return how much of the bucket these parameters are."""
        return sum(_padded(self.members[one].numel()) for one in members) / self.end

    def reaches_all(self, members: Sequence[int]) -> bool:
        """Return whether every rank has an element of one of these parameters."""
        return all(
            any(end > first for first, end in (self.part(one, rank) for one in members))
            for rank in range(self.ranks)
        )


@attrs.frozen(eq=False)
class Place:
    """Where a parameter is: the bucket, its number there, and this rank's part of it.

    The last ranks of a small bucket have nothing of it; they take part in its exchanges.
    """

    bucket: Bucket
    member: int
    first: int
    end: int

    @property
    def offset(self) -> int:
        """The parameter's first element in the bucket."""
        return self.bucket.offsets[self.member]


@attrs.frozen(eq=False)
class Candidate:
    """A parameter that may be split: its group's number, and the sizes of buckets.

    `key` is alike for what may share a bucket.
    """

    parameter: torch.Tensor
    group: int
    key: tuple[object, ...]
    sizes: BucketSizes


@attrs.define(eq=False)
class Shards:
    """The split of a step's optimizer state; `kind` is one of KINDS.

    The layout depends on the optimizers alone, so that all programs of a step share it, and state
    that was gathered can be split again.
    """

    kind: str
    groups: list[Group]
    buckets: list[Bucket] = attrs.field(factory=list)
    _places: dict[int, Place] = attrs.field(factory=dict)
    # The optimizers that whole state was loaded into since it is split, in order.
    loads: list[str] = attrs.field(factory=list)
    # What is a part, and of which parameter. A part that nobody holds any more goes.
    _parts: WeakIdKeyDictionary = attrs.field(factory=WeakIdKeyDictionary)

    def adopt(self, other: Shards) -> bool:
        """Share the layout and the parts of another step; return whether that is possible."""
        if self._parts is other._parts:
            return True
        if self.buckets or self.groups[0].handle is not other.groups[0].handle:
            return False
        self.buckets, self._places, self._parts = other.buckets, other._places, other._parts
        self.loads = other.loads
        return True

    def lay_out(self, candidates: Sequence[Candidate]) -> None:
        """Give each new parameter a place; a bucket that would be one rank's stays whole.

        Buckets are filled in the reverse of the order given, about that of gradients. No rank has
        more than GRAIN elements of a bucket above an equal part.
        """
        new = [one for one in candidates if id(one.parameter) not in self._places]
        kinds: dict[tuple[object, ...], list[Candidate]] = {}
        for one in reversed(new):
            kinds.setdefault(one.key, []).append(one)
        for alike in kinds.values():
            for bucket in self._filled(alike):
                if bucket.is_split:
                    self._keep(bucket)

    def _filled(self, alike: Sequence[Candidate]) -> list[Bucket]:
        """Return the buckets of parameters that may share them.

        A bucket goes on until each rank has GRAIN elements of it, however small it should be.
        """
        group, ranks = alike[0].group, self.groups[alike[0].group].size
        item, least = alike[0].parameter.element_size(), ranks * GRAIN
        counts = alike[0].sizes.counts([item * one.parameter.numel() for one in alike])
        left = iter(alike)
        buckets: list[Bucket] = []
        last = Bucket(0, group, ranks)
        for count in counts:
            for one in itertools.islice(left, count):
                last.add(one.parameter)
            if last.end >= least:
                buckets.append(last)
                last = Bucket(0, group, ranks)
        if last.members and last.end < least and buckets:
            # A small rest goes with the bucket before.
            for parameter in last.members:
                buckets[-1].add(parameter)
        elif last.members:
            buckets.append(last)
        return buckets

    def _keep(self, bucket: Bucket) -> None:
        bucket.number = len(self.buckets)
        self.buckets.append(bucket)
        rank = self.groups[bucket.group].rank
        for k, parameter in enumerate(bucket.members):
            self._places[id(parameter)] = Place(bucket, k, *bucket.part(k, rank))

    def place_of(self, parameter: torch.Tensor) -> Place | None:
        """Return where a parameter is; None for one that stays whole."""
        return self._places.get(id(parameter))

    def is_split(self, parameter: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether what an optimizer keeps for a parameter is to be split, or is."""
        if self.place_of(parameter) is None:
            return False
        return self.parameter_of(value) is not None or value.shape == parameter.shape

    def part_of(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of a parameter's shape: a new flat tensor."""
        if self.parameter_of(value) is not None:
            return value
        place = self._places[id(parameter)]
        part = value.detach().reshape(-1)[place.first : place.end].clone()
        self._parts[part] = parameter
        return part

    def parameter_of(self, value: torch.Tensor) -> torch.Tensor | None:
        """Return the parameter that a tensor is a part for; None for another tensor."""
        found: torch.Tensor | None = self._parts.get(value)
        return found

    def gather(self, parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor of which each rank holds a part; every rank calls this.

        Raises:
            RuntimeError: a rank is not there, as the process group says.
        """
        place = self._places[id(parameter)]
        group = self.groups[place.bucket.group]
        ranges = [place.bucket.part(place.member, rank) for rank in range(group.size)]
        longest = max(end - first for first, end in ranges)
        sent = torch.zeros(longest, dtype=part.dtype, device=part.device)
        sent[: part.numel()] = part
        received = torch.empty(longest * group.size, dtype=part.dtype, device=part.device)
        group.all_gather(received, sent).wait()
        rows = received.view(group.size, longest)
        pieces = [rows[rank, : end - first] for rank, (first, end) in enumerate(ranges)]
        whole = torch.empty_like(parameter, dtype=part.dtype, requires_grad=False)
        with torch.no_grad():
            whole.copy_(torch.cat(pieces).view(parameter.shape))
        return whole

    def parts_held(
        self, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """Return the parts in an optimizer's state, as (parameter, key, part), in one order."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and self.parameter_of(value) is not None:
                        yield parameter, key, value
