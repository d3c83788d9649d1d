# SPDX-License-Identifier: Apache-2.0
"""Whether tensors are as they were when they were last checked: asked in C, a tenth of a check.

A check of one tensor in Python takes 4 us, and a step asks for every parameter, buffer and entry
of the optimizers at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

try:
    # Not part of PyTorch's public interface; without it, every tensor is checked at every call.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

_address_of = torch.Tensor.data_ptr
_storage_of = torch.Tensor.untyped_storage
_nbytes_of = torch.UntypedStorage.nbytes


class TensorKinds:
    """The classes, key sets, dtypes, devices, shapes and strides of tensors, in order.

    The key set has layout, negation, wrappers and all else that PyTorch dispatches by.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._count = len(tensors)
        self._check: Any = None
        if tensors and TensorGuards is not None:
            guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._check = guards.check

    def fit(self, tensors: Sequence[Any]) -> bool:
        """Return whether values are tensors of these kinds; may be False where they are.

        It is where one of them occurs twice.
        """
        return len(tensors) == self._count and (
            not self._count or (self._check is not None and self._check(*tensors))
        )


class HeldTensors:
    """Tensors that stay the same objects; their memory may be replaced."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._kinds: TensorKinds | None = None
        self._memory: list[int] = []

    def remember(self) -> None:
        """Take them as they are now for checked."""
        self._kinds, self._memory = TensorKinds(self._tensors), self._memory_now()

    def hold(self) -> bool:
        """Return whether kinds, addresses and bytes are as remembered; may be False where so."""
        return (
            self._kinds is not None
            and self._kinds.fit(self._tensors)
            and self._memory_now() == self._memory
        )

    def _memory_now(self) -> list[int]:
        storages = map(_storage_of, self._tensors)
        return [*map(_address_of, self._tensors), *map(_nbytes_of, storages)]
