# SPDX-License-Identifier: Apache-2.0
"""What calls of ops become, kept for the next capture of this process.

Of a step with another batch, the ops on parameters have the arguments of before: the optimizer's
updates, casts and transposes of weights. What is kept refers to no graph and no tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
# Some kilobytes each; a step of 12 layers of BERT has about 300 different calls.
_MOST_OUTCOMES = 4096


class OutcomeStore(Generic[T]):
    """Outcomes by the kinds of a call's arguments; the oldest goes first."""

    def __init__(self) -> None:
        # Each of its methods is one step to other threads that capture.
        self._outcomes: OrderedDict[Any, T] = OrderedDict()

    def get(self, key: tuple[Any, ...]) -> T | None:
        """Return the outcome of an equal call under the settings of now."""
        return self._outcomes.get((_settings(), key))

    def put(self, key: tuple[Any, ...], outcome: T) -> None:
        """Keep an outcome; the key tells apart all that it depends on but the settings."""
        self._outcomes[_settings(), key] = outcome
        if len(self._outcomes) > _MOST_OUTCOMES:
            self._outcomes.popitem(last=False)

    def clear(self) -> None:
        """Forget all, as those do who time a first capture."""
        self._outcomes.clear()


def _settings() -> tuple[Any, ...]:
    """Return PyTorch's settings that choose a kernel, and by it the layout of results."""
    return (
        torch.get_default_dtype(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
    )
