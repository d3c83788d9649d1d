# SPDX-License-Identifier: Apache-2.0
"""What a capture changes in PyTorch, to be compared before and after."""

from __future__ import annotations

import builtins
import logging
import math
import random
import sys
from typing import Any

import torch
import torch._dynamo  # replaces torch.manual_seed when it is first imported
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import clip_grad

_ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (torch.nn.Module, "__call__"),
    (torch.nn.Module, "__getattr__"),
    (torch.nn.Module, "zero_grad"),
    (torch.optim.Optimizer, "zero_grad"),
    (torch.nn.functional, "scaled_dot_product_attention"),
    (torch.utils.checkpoint, "CheckpointFunction"),
    (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"),
    (torch.optim.lr_scheduler.LRScheduler, "step"),
    (torch.amp.GradScaler, "scale"),
    (torch.backends.mha, "get_fastpath_enabled"),
    (torch.autocast, "__enter__"),
    (torch.autocast, "__exit__"),
    (torch.autograd.Function, "apply"),
    (torch.Tensor, "__eq__"),
    (FakeTensor, "__hash__"),
    (type(torch.nn.Parameter), "__instancecheck__"),
    (torch, "manual_seed"),
    (torch, "set_rng_state"),
    (clip_grad, "float"),
    (math, "sqrt"),
    (math, "exp"),
    (math, "log"),
    (math, "pow"),
    (random, "random"),
    (builtins, "print"),
    (logging.Logger, "handle"),
    *(
        (sys.modules[f"torch.optim.{name}"], "_get_value")
        for name in ("adam", "adamw", "adagrad", "rmsprop", "sgd")
        if hasattr(sys.modules.get(f"torch.optim.{name}"), "_get_value")
    ),
)
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def pytorch_state() -> dict[str, Any]:
    """By name, every attribute and flag; takes some microseconds."""
    state = {f"{owner.__name__}.{name}": vars(owner).get(name) for owner, name in _ATTRIBUTES}
    state |= {
        # Which of the two it is, torch.compile changes for good.
        "checks": type(vars(torch.distributions.Distribution)["_validate_args"]),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "cudnn": torch._C._get_cudnn_enabled(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autograd's threads": torch._C._is_multithreading_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "filters": tuple(_FAKE_LOG.filters),
        "log": _FAKE_LOG.disabled,
    }
    return state
