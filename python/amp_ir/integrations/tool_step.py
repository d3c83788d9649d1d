# SPDX-License-Identifier: Apache-2.0
"""A jitted step of a loop whose tool wraps models and optimizers, or casts by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import amp_ir
from amp_ir.errors import OptionError


class ToolStep:
    """A step that `amp_ir.jit` compiles, called while a tool's own casts are set aside.

    Args:
        step: the body of the loop, with the tool's calls in it.
        set_aside: a context in which the tool casts nothing; each call of the step is in it, so
            that what a capture sees is there when its guards are checked.
        options: those of `amp_ir.jit`.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        set_aside: Callable[[], contextlib.AbstractContextManager[Any]],
        **options: Any,
    ) -> None:
        self._set_aside = set_aside
        self._step = amp_ir.jit(step, **options)

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Run one step; as a step of `amp_ir.jit`."""
        with self._set_aside():
            return self._step(*batch, **named)

    @property
    def compiled_step(self) -> Any:
        """The jitted step, as `amp_ir.jit` returns it."""
        return self._step

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint keeps beside model and optimizer: the state of dropout."""
        state: dict[str, torch.Tensor] = self._step.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `state_dict` returned, also before the first step."""
        self._step.load_state_dict(state)

    def __repr__(self) -> str:
        """Describe the step as `amp_ir.jit` does."""
        return repr(self._step)


def listed(value: Any) -> list[Any]:
    """Return one object or a sequence of them as a list."""
    return list(value) if isinstance(value, Sequence) else [value]


def refuse(where: str, amp_dtypes: Mapping[str, str | None], wrong: Mapping[str, bool]) -> None:
    """Reject what one compiled step on one device cannot do: the keys of `wrong` that are true.

    Raises:
        OptionError: lists all of it.
    """
    found = [name for name, is_wrong in wrong.items() if is_wrong]
    if found:
        raise OptionError(
            f"amp_ir.integrations.{where}.jit compiles the whole step, for one device of one "
            f"process, in {', '.join(map(repr, amp_dtypes))}; it cannot do {'; '.join(found)}. "
            'Compile the model where that is enough: torch.compile(model, backend="amp_ir")'
        )
