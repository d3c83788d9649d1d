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
        self.shared: set[int] = set()
        self._looked_at: set[int] = set()
        self._clearing = 0
        self.has_differentiated = False

    def looked_at(self, tensor: object) -> None:
        """Record that the step reads `tensor.grad`."""
        key = id(tensor)
        if not self._clearing:
            self._looked_at.add(key)
        if key in self._known and key not in self._settled and not self._clearing:
            self.observed.add(key)

    def assigns(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Record that the step's own code sets `tensor.grad`.

        What it has read as the gradient of another parameter is one tensor of both from here on. A
        tensor that `torch.autograd.grad` returns for two is PyTorch's own choice.
        """
        others = (one for one in self._parameters if id(one) in self._looked_at)
        if gradient is not None and any(
            one is not tensor and one.grad is gradient for one in others
        ):
            self.shared.add(id(tensor))
        else:
            self.shared.discard(id(tensor))
        self.replaced(tensor)

    def replaced(self, tensor: object) -> None:
        """Record that `tensor.grad` is set or cleared."""
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
