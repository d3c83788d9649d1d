# SPDX-License-Identifier: Apache-2.0
"""Hooks that transformers puts on a model at its first call, put there before a capture.

They record hidden states. A capture undoes what a step does to Python objects, hooks too, and the
model would note all the same that it has them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch


def install_output_hooks(models: Iterable[torch.nn.Module]) -> None:
    """Install the hooks of every model of transformers, as its first call in PyTorch does."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    library = sys.modules.get("transformers.modeling_utils")
    kind = getattr(library, "PreTrainedModel", None)
    if install is None or kind is None:
        return
    for model in models:
        for module in model.modules():
            if isinstance(module, kind):
                install(module)
