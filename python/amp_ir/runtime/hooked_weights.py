# SPDX-License-Identifier: Apache-2.0
"""Weights that PyTorch's own hooks compute before a module runs, and keep as its attribute.

`torch.nn.utils.prune` keeps `weight_orig * weight_mask` in `weight`, and the next pruning ranks the
elements by it; the older `weight_norm` keeps `g * v / |v|`, `spectral_norm` a weight of norm 1. A
compiled step runs no hooks, so that the attribute is computed before each run: from the weights
that the step begins with, as the last forward pass does where a step updates once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


@attrs.frozen(eq=False)
class HookedWeight:
    """An attribute of a module, and what computes it."""

    module: torch.nn.Module
    name: str
    compute: Callable[[torch.nn.Module], Any]

    def refresh(self) -> None:
        """Keep the weight of now, without a gradient."""
        with torch.no_grad():
            setattr(self.module, self.name, self.compute(self.module))


def hooked_weights(models: Iterable[torch.nn.Module]) -> list[HookedWeight]:
    """Return the weights that hooks of PyTorch's keep in these models."""
    found = {}
    for model in models:
        for module in model.modules():
            for hook in module._forward_pre_hooks.values():
                weight = _hooked_by(hook, module)
                if weight is not None:
                    found[id(module), weight.name] = weight
    return list(found.values())


def _hooked_by(hook: Any, module: torch.nn.Module) -> HookedWeight | None:
    if isinstance(hook, BasePruningMethod):
        return HookedWeight(module, hook._tensor_name, hook.apply_mask)
    if isinstance(hook, WeightNorm):
        return HookedWeight(module, hook.name, hook.compute_weight)
    if isinstance(hook, SpectralNorm):
        return HookedWeight(module, hook.name, functools.partial(_spectral, hook))
    return None


def _spectral(hook: Any, module: torch.nn.Module) -> torch.Tensor:
    """Return the weight of the next forward pass, and leave its vectors to the step."""
    vectors = [getattr(module, f"{hook.name}_{which}") for which in "uv"]
    before = [one.clone() for one in vectors]
    weight: torch.Tensor = hook.compute_weight(module, do_power_iteration=module.training)
    for one, kept in zip(vectors, before, strict=True):
        one.copy_(kept)
    return weight
