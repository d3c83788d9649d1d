# SPDX-License-Identifier: Apache-2.0
"""What one variant of a step made of a batch, and its errors against another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from amp_ir.capture.containers import leaves_of

# Below the rounding of float32 beside the norm of all parameters together.
_NOTHING = 2.0**-24
Tensors = Mapping[str, torch.Tensor]


@attrs.frozen(eq=False)
class Outcome:
    """The floating results of a step, its gradients and its updates by parameter, in float64."""

    results: tuple[torch.Tensor, ...]
    gradients: Tensors
    updates: Tensors

    @classmethod
    def of(cls, returned: Any, before: Tensors, after: Tensors) -> Outcome:
        """Make it of what a recorded step returned, and parameters before and after it."""
        result, gradients = returned
        leaves = [one for one in leaves_of(result) if torch.is_tensor(one)]
        results = tuple(one.detach().double() for one in leaves if one.is_floating_point())
        updates = {name: after[name].detach().double() - before[name].double() for name in after}
        found = {name: one.detach().double() for name, one in gradients.items()}
        return cls(results, found, updates)

    @property
    def is_finite(self) -> bool:
        """Whether every result, gradient and update is."""
        tensors = (*self.results, *self.gradients.values(), *self.updates.values())
        return all(bool(torch.isfinite(one).all()) for one in tensors)

    def is_finite_beside(self, exact: Outcome) -> bool:
        """Whether it is, and has every gradient of `exact`: PyTorch's skipped steps have none."""
        return self.is_finite and exact.gradients.keys() <= self.gradients.keys()

    @property
    def has_numbers(self) -> bool:
        """Whether anything but 0 is among them."""
        tensors = (*self.results, *self.gradients.values(), *self.updates.values())
        return any(bool(one.any()) for one in tensors)

    @property
    def has_updates(self) -> bool:
        """Whether a parameter changes."""
        return any(bool(one.any()) for one in self.updates.values())


@attrs.frozen
class Errors:
    """Relative errors in the 2-norm: of the results, and of gradients and updates by parameter.

    `gradient` and `update` are those of all parameters together. Parameters whose exact gradient is
    nothing beside the others (the bias of attention's keys: 0 but for rounding) have no entry, and
    their updates do not count: what Adam makes of rounding is rounding.
    """

    result: float
    gradient: float
    update: float
    gradients: Mapping[str, float]
    updates: Mapping[str, float]

    @property
    def median(self) -> float:
        """The median of the gradients' errors by parameter."""
        return statistics.median(self.gradients.values()) if self.gradients else 0.0

    @property
    def largest(self) -> float:
        """The largest of the gradients' errors by parameter."""
        return max(self.gradients.values(), default=0.0)

    def worst(self, count: int) -> list[str]:
        """Return the parameters whose gradients have the largest errors."""
        return sorted(self.gradients, key=lambda name: -_ordered(self.gradients[name]))[:count]


def errors_of(got: Outcome, exact: Outcome) -> Errors:
    """Return the errors of an outcome; infinite where it is not finite and `exact` is."""
    results = dict(enumerate(got.results)), dict(enumerate(exact.results))
    known = _with_gradient(exact)
    updates = {name: one for name, one in exact.updates.items() if name in known}
    gradients = {name: one for name, one in exact.gradients.items() if name in known}
    return Errors(
        relative_error(*results),
        relative_error(got.gradients, exact.gradients),
        relative_error(got.updates, updates),
        _by_name(got.gradients, gradients),
        _by_name(got.updates, updates),
    )


def _with_gradient(exact: Outcome) -> set[str]:
    """Return the parameters whose gradient is more than rounding."""
    norms = {name: float(one.norm()) for name, one in exact.gradients.items()}
    least = _NOTHING * math.hypot(*norms.values())
    return {name for name, norm in norms.items() if not norm <= least}


def _by_name(got: Tensors, exact: Tensors) -> dict[str, float]:
    return {name: relative_error(got, {name: one}) for name, one in exact.items()}


def relative_error(got: Mapping[Any, torch.Tensor], exact: Mapping[Any, torch.Tensor]) -> float:
    """Return |got - exact| / |exact| of all tensors together, 0 where both are zero.

    Infinite where a tensor is missing, as the gradients of a step that was skipped.
    """
    if not exact.keys() <= got.keys():
        return math.inf
    with torch.no_grad():
        error = sum(float(((got[name] - exact[name]) ** 2).sum()) for name in exact)
        size = sum(float((one**2).sum()) for one in exact.values())
    if math.isnan(error):
        return math.inf
    if error == 0.0:
        return 0.0
    return math.sqrt(error / size) if size > 0.0 else math.inf


def _ordered(value: float) -> float:
    return math.inf if math.isnan(value) else value
