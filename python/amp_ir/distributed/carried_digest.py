# SPDX-License-Identifier: Apache-2.0
"""A digest that travels behind the gradients of a reduction, so that comparing it costs no message.

The range of a step's first reduce-scatter ends with NOTE_SIZE elements for each rank (see
memory/bucket_ranges.py). A rank writes its digest to its own elements, and zero to the others', so
the sums are the digests of all. Each element is a byte, which every float dtype holds exactly.
"""

from __future__ import annotations

import torch

from amp_ir.ir.collective_call import NOTE_SIZE, Collective


class CarriedDigest:
    """The digest of one call: sent, received, and compared with those of the other ranks.

    `is_open` says that a digest travels and has not been compared yet, `key` names the group and
    the bucket that carry it.
    """

    def __init__(self, rank: int) -> None:
        self.is_open = False
        self.key: tuple[int, int] | None = None
        self._rank = rank
        self._digest = ""
        self._are_alike = False
        # What this rank adds, and the sum where all ranks have the same digest; of which digest.
        self._own, self._sum = torch.empty(0), torch.empty(0)
        self._made_of: tuple[object, ...] = ()

    def begin(self, digest: str) -> None:
        """Carry a digest in this call; "" for none."""
        self.is_open, self.key, self._digest = bool(digest), None, digest
        # What an earlier call found says nothing of this one.
        self._are_alike = False

    def send(self, collective: Collective, tensor: torch.Tensor) -> None:
        """Write the digest behind a range that has room for it, before that is sent."""
        has_room = collective.kind == "reduce_scatter" and tensor.numel() > collective.range_size
        if not has_room or not self.is_open or self.key is not None:
            return
        self.key = collective.group, collective.bucket
        made_of = self._digest, tensor.dtype, collective.ranks
        if self._made_of != made_of:
            self._made_of = made_of
            codes = [*bytes.fromhex(self._digest)[:NOTE_SIZE]]
            self._sum = torch.tensor(codes, dtype=tensor.dtype).repeat(collective.ranks)
            self._own = torch.zeros_like(self._sum)
            first = self._rank * NOTE_SIZE
            self._own[first : first + NOTE_SIZE] = self._sum[:NOTE_SIZE]
        tensor[collective.range_size :].copy_(self._own)

    def receive(self, collective: Collective, tensor: torch.Tensor) -> None:
        """Compare the digests of all ranks, where this exchange carried them."""
        if self.is_open and self.key == (collective.group, collective.bucket):
            self._are_alike = torch.equal(tensor[collective.range_size :], self._sum)

    def close(self) -> bool:
        """Return whether all ranks had the same digest."""
        self.is_open = False
        return self._are_alike
