# SPDX-License-Identifier: Apache-2.0
"""Checks of the options that users pass with a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from amp_ir.errors import ArgumentError, OptionError
from amp_ir.ir.step_module import StepModule

ROUNDINGS = ("strict", "fast")
# What PyTorch, Hugging Face, Lightning and apex call the dtypes.
_OTHER_NAMES = {
    "bf16": "bfloat16", "bfloat": "bfloat16", "fp16": "float16", "f16": "float16",
    "half": "float16", "16": "float16", "fp32": "float32", "f32": "float32", "float": "float32",
    "single": "float32", "32": "float32",
}  # fmt: skip


def dtype_name(dtype: Any) -> Any:
    """Return the name of a dtype of PyTorch's; anything else as it is, for a check to refuse."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def meant_dtype(got: Any, accepted: Collection[str | None]) -> str:
    """Return "; did you mean 'bfloat16'?" for another name of an accepted dtype; else ""."""
    stem = got.lower().removeprefix("torch.").removesuffix("-mixed") if isinstance(got, str) else ""
    meant = _OTHER_NAMES.get(stem, stem)
    is_dtype = meant in _OTHER_NAMES.values() and meant in accepted
    return f"; did you mean {meant!r}?" if is_dtype else ""


def check_rounding(rounding: str) -> None:
    """Refuse a rounding that is neither "strict" nor "fast"."""
    if rounding not in ROUNDINGS:
        accepted = " or ".join(f'"{word}"' for word in ROUNDINGS)
        raise OptionError(f"rounding={rounding!r} is not known; expected {accepted}")


def check_budget(memory_budget: Any, recompute: Any = True) -> None:
    """Refuse a budget that is not a positive number of bytes; None is no limit.

    `recompute` is True or, without a budget, False.
    """
    is_number = isinstance(memory_budget, int) and not isinstance(memory_budget, bool)
    if memory_budget is not None and not (is_number and memory_budget > 0):
        raise OptionError(
            f"memory_budget={memory_budget!r} is not a number of bytes; expected a positive int, "
            "such as 2 * 2**30 for 2 GiB, or None"
        )
    if not isinstance(recompute, bool):
        raise OptionError(
            f"recompute={recompute!r} is not known; expected True, or False for a step that runs "
            "no call a second time"
        )
    if not recompute and memory_budget is not None:
        raise OptionError(
            f"recompute=False with memory_budget={memory_budget}: a budget is held by running "
            "calls a second time; leave one of the two out"
        )


def lowering_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options of a compilation that `lower` takes, too."""
    names = ("rounding", "memory_budget", "recompute")
    # A file of amp_ir 0.1 has fewer.
    return {name: options[name] for name in names if name in options}


def batch_of(mod: StepModule, args: Any) -> list[torch.Tensor]:
    """Return the tensors of `args`, the tuple that `trace_step` returns or one like it."""
    if not isinstance(args, (tuple, list)):
        raise ArgumentError(
            f"args is a {type(args).__name__}, expected the tuple of the step's arguments that "
            "trace_step returns beside the module"
        )
    return mod.signature.flatten_batch(tuple(args))


def check_opt_level(opt_level: Any) -> None:
    """Refuse a level that is none of TVM's optimisation levels."""
    if isinstance(opt_level, bool) or opt_level not in range(4):
        raise OptionError(f"opt_level={opt_level!r} is not known; expected 0, 1, 2 or 3")


def check_module(mod: Any, function: str) -> None:
    """Refuse a module that is not a StepModule; `function` is the caller's name for the message."""
    if not isinstance(mod, StepModule):
        raise OptionError(
            f"{function} takes a StepModule and got {type(mod).__name__}; make one with "
            "amp_ir.trace_step(step, example_batch, model=..., optimizer=...)"
        )


def check_limit(name: str, limit: Any) -> None:
    """Refuse a limit, the option `name`, that is not a positive number."""
    is_number = isinstance(limit, int) and not isinstance(limit, bool)
    if not (is_number and limit > 0):
        raise OptionError(f"{name}={limit!r} is not a number of programs; expected a positive int")
