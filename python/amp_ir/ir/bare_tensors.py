# SPDX-License-Identifier: Apache-2.0
"""Tensors that an optimizer trains and that are in no module, as SAC's `log_alpha`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class BareTensors(torch.nn.Module):
    """A model of tensors that are parameters of no module: `tensor0`, `tensor1`, ..."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        # `register_parameter` takes a Parameter alone, which is another tensor.
        held: dict[str, Any] = self._parameters
        held.update({f"tensor{k}": one for k, one in enumerate(tensors)})
        self.eval()  # a note says where all models are


def with_bare_tensors(models: Sequence[Any], optimizers: Sequence[Any]) -> list[Any]:
    """Return the models, and one of the plain tensors among what the optimizers train, if any.

    A Parameter is left out: it belongs to a module, which the caller forgot or whose parameters
    were replaced.
    """
    known = {id(one) for model in models for one in model.parameters()}
    trained = {
        id(one): one
        for optimizer in optimizers
        if isinstance(optimizer, torch.optim.Optimizer)
        for group in optimizer.param_groups
        for one in group["params"]
        if id(one) not in known and not isinstance(one, torch.nn.Parameter)
    }
    return [*models, *([BareTensors(list(trained.values()))] if trained else ())]
