# SPDX-License-Identifier: Apache-2.0
"""What a compiled step logs through `LightningModule.log`: values of the program, logged after it.

While a step is captured its tensors have no numbers, and afterwards its Python does not run. So
`log` only notes the value, which becomes a result of the program, and how it is to be logged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import attrs
import torch

from amp_ir.errors import OptionError


@attrs.define(eq=False)
class Capturing:
    """One run of the step's Python: the name of the hook that runs, and the values so far."""

    hook: str = "training_step"
    values: dict[int, Any] = attrs.Factory(dict)


class LogCalls:
    """The calls of `log` in a module's step; a number stands for a call and its options."""

    def __init__(self, module: Any) -> None:
        self._module = module
        # One object for all calls of the step, since a capture guards what `self.log` is.
        self._noting = self._note
        self._calls: list[tuple[str, str, dict[str, Any]]] = []
        # What the capture cannot see: notes are no state of the step.
        self._capturing: ContextVar[Capturing] = ContextVar("capturing")

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Let `module.log` note its calls, while the compiled step is called."""
        self._module.__dict__["log"] = self._noting
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    @contextlib.contextmanager
    def capturing(self) -> Iterator[Capturing]:
        """Collect the values of one run of the step's Python."""
        capturing = Capturing()
        token = self._capturing.set(capturing)
        try:
            yield capturing
        finally:
            self._capturing.reset(token)

    def log(self, values: dict[int, Any]) -> None:
        """Log what a step returned, as the module would have in its hooks."""
        module = self._module
        before = module._current_fx_name
        try:
            for number, value in values.items():
                module._current_fx_name, name, options = self._calls[number]
                module.log(name, value, **options)
        finally:
            module._current_fx_name = before

    def _note(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        capturing = self._capturing.get()
        if not isinstance(value, (torch.Tensor, int, float)):
            raise OptionError(
                f"self.log({name!r}, ...) in {capturing.hook} is given a {type(value).__name__}; a "
                "compiled step logs tensors and numbers: return what the metric needs from "
                "training_step, and update and log the metric in on_train_batch_end"
            )
        options |= dict(zip(_POSITIONAL, args, strict=False))
        call = (capturing.hook, name, options)
        if call not in self._calls:
            self._calls.append(call)
        value = value.detach() if isinstance(value, torch.Tensor) else value
        capturing.values[self._calls.index(call)] = value


# The options of LightningModule.log, which may be given by position.
_POSITIONAL = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph")
