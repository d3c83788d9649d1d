# SPDX-License-Identifier: Apache-2.0
"""Which parameters' gradients from before a step affect it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class GradientWatch:
    """A record of whether a parameter's gradient from before the step affects the step.

    It does when the step reads it (`optimizer.step`, clipping, `backward` adds to it) before it is
    replaced or cleared.
    """

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = parameters
        self._known = {id(parameter) for parameter in parameters}
        self._settled: set[int] = set()
        self.observed: set[int] = set()
        self._clearing = 0
        self.has_differentiated = False

    def looked_at(self, tensor: object) -> None:
        """Record that the step reads `tensor.grad`."""
        key = id(tensor)
        if key in self._known and key not in self._settled and not self._clearing:
            self.observed.add(key)

    def replaced(self, tensor: object) -> None:
        """Record that the step sets `tensor.grad`."""
        if id(tensor) not in self.observed:
            self._settled.add(id(tensor))

    def touched(self) -> set[int]:
        """Return the ids of the parameters whose gradient the step read, set or cleared."""
        return self.observed | self._settled

    @contextlib.contextmanager
    def clearing_of(self, owner: torch.nn.Module | torch.optim.Optimizer) -> Iterator[None]:
        """Record that `owner.zero_grad` runs: it reads gradients only to drop them."""
        self._clearing += 1
        try:
            yield
        finally:
            self._clearing -= 1
        if isinstance(owner, torch.nn.Module):
            parameters = list(owner.parameters())
        else:
            parameters = [p for group in owner.param_groups for p in group["params"]]
        for parameter in parameters:
            self.replaced(parameter)

    def accumulated(self) -> None:
        """Record that a backward pass has added to the gradients."""
        for parameter in self._parameters:
            if parameter.grad is not None and id(parameter) not in self._settled:
                self.observed.add(id(parameter))
