# SPDX-License-Identifier: Apache-2.0
"""The memory of the state that a step writes, which no tensor of its batch may share.

A compiled step takes its inputs for tensors of their own: it may write state before it reads the
batch, and reads after a write would not see what was written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from amp_ir.errors import ArgumentError
from amp_ir.ir.memory_overlap import overlap
from amp_ir.ir.step_module import OutputSpec
from amp_ir.runtime.program_input import ProgramInput

_storage_of = torch.Tensor.untyped_storage
_address_of = torch.UntypedStorage.data_ptr


class WrittenMemory:
    """The inputs that a program updates, by the address of their storage.

    Batches are checked at each call, and addresses read again where `version` is another one.
    """

    def __init__(self, inputs: Sequence[ProgramInput], outputs: Sequence[OutputSpec]) -> None:
        updated = {spec.updates for spec in outputs}
        self._written = [
            (one, one.source)
            for k, one in enumerate(inputs)
            if k in updated and isinstance(one.source, torch.Tensor)
        ]
        self._version: object = None
        self._owners: dict[int, list[tuple[ProgramInput, torch.Tensor]]] = {}

    def refuse_shared(self, batch: Sequence[torch.Tensor], version: object) -> None:
        """Refuse a batch that shares memory with state that the step writes.

        Raises:
            ArgumentError: a tensor of it does; nothing has changed.
        """
        if version != self._version:
            self._read_addresses()
            self._version = version
        for k, storage in enumerate(map(_storage_of, batch)):
            for one, tensor in self._owners.get(_address_of(storage), ()):
                if overlap(batch[k], tensor):
                    raise ArgumentError(self._message(k, one))

    def _read_addresses(self) -> None:
        self._owners = {}
        for one, tensor in self._written:
            if tensor.numel():
                address = _address_of(_storage_of(tensor))
                self._owners.setdefault(address, []).append((one, tensor))

    @staticmethod
    def _message(k: int, one: ProgramInput) -> str:
        return (
            f"tensor {k} of the batch (counted from 0) shares memory with {one.spec.role.value} "
            f"{one.spec.name}, which the step writes: a compiled step would not see there what it "
            "has written. Read it in the step from the model or the optimizer, not from an "
            "argument; or pass a copy (.clone()), which keeps the values of before the step. "
            "Nothing has changed"
        )
