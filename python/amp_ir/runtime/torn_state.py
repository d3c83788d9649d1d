# SPDX-License-Identifier: Apache-2.0
"""State that a failed step left half written: no step runs on it until it is loaded.

The mark is per tensor, since other compiled steps share the model. A tensor counts as loaded once
PyTorch has written to it, as `load_state_dict` does, or another tensor replaces it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import attrs
import torch

from amp_ir.errors import StepFailedError
from amp_ir.ir.short_list import short_names

REMEDY = (
    "load a saved state with load_checkpoint, or with load_state_dict of the model and of the "
    "optimizer"
)


@attrs.frozen(eq=False)
class _Torn:
    tensor: weakref.ref[torch.Tensor]
    version: int
    why: str

    def is_still(self, tensor: torch.Tensor) -> bool:
        return self.tensor() is tensor and self.version == _version(tensor)


# By the id of the tensor; empty but after a failure.
_torn: dict[int, _Torn] = {}


def mark(tensors: Iterable[torch.Tensor], why: str) -> None:
    """Refuse steps on `tensors`, which the failure `why` left torn."""
    for tensor in tensors:
        _torn[id(tensor)] = _Torn(weakref.ref(tensor), _version(tensor), why)


def refuse_torn(state: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse a step's state, as (name, tensor), that is torn, before the step runs.

    Raises:
        StepFailedError: some of it is torn.
    """
    if not _torn:
        return
    found = [(name, torn) for name, tensor in state if (torn := _still_torn(tensor))]
    if found:
        names = [name for name, _ in found]
        raise StepFailedError(
            f"a step failed earlier and left {short_names(names)} torn, with values of "
            f"before and after it; {REMEDY}. It had said: {found[0][1].why}",
            is_torn=True,
        )


def is_torn(state: Iterable[tuple[str, torch.Tensor]]) -> bool:
    """Return whether any of a step's state is torn."""
    return bool(_torn) and any(_still_torn(tensor) for _, tensor in state)


def _still_torn(tensor: torch.Tensor) -> _Torn | None:
    torn = _torn.get(id(tensor))
    if torn is None or torn.is_still(tensor):
        return torn
    del _torn[id(tensor)]
    return None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
