# SPDX-License-Identifier: Apache-2.0
"""The `requires_grad` that a traced step leaves in parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import attrs
import torch


@attrs.frozen(eq=False)
class GradientFlags:
    """Parameters whose `requires_grad` a step changes, and what it was before, of each."""

    parameters: tuple[torch.Tensor, ...]
    before: tuple[bool, ...]

    @classmethod
    def of_changed(cls, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> GradientFlags | None:
        """Return those of (parameter, its fake after the step) that differ; None where none do."""
        changed = [one for one, fake in pairs if one.requires_grad is not fake.requires_grad]
        return cls(tuple(changed), tuple(one.requires_grad for one in changed)) if changed else None

    def name(self) -> str:
        """Return how a message calls the flags."""
        return f"requires_grad of {len(self.parameters)} parameters"

    def now(self) -> tuple[bool, ...]:
        """Return the flags."""
        return tuple(one.requires_grad for one in self.parameters)

    def after(self) -> tuple[bool, ...]:
        """Return the flags that the step leaves."""
        return tuple(not one for one in self.before)

    def is_left(self) -> bool:
        """Return whether all are as the step leaves them."""
        return self.now() == self.after()

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether the step changes the flag of a parameter."""
        return any(one is parameter for one in self.parameters)

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Leave the flags as the step does for the duration of the context."""
        self.put(self.after())
        try:
            yield
        finally:
            self.put(self.before)

    def put(self, flags: Sequence[bool]) -> None:
        """Set the flags."""
        for one, flag in zip(self.parameters, flags, strict=True):
            if one.requires_grad is not flag:
                one.requires_grad_(flag)
