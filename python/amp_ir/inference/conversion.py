# SPDX-License-Identifier: Apache-2.0
"""The conversion of a model: from the model and its options to a program for each shape."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from amp_ir.amp.custom_type_hint import RulesInEffect
from amp_ir.amp.hints import FULL_DTYPE
from amp_ir.amp.op_lists import OpLists
from amp_ir.api import autocast, trace_model
from amp_ir.errors import CaptureError, StateError
from amp_ir.inference.stored_parameters import StoredParameters
from amp_ir.ir.fixed_values import fixed_inputs
from amp_ir.ir.short_list import short_names
from amp_ir.ir.step_module import StepHooks, StepModule
from amp_ir.rewrites.fold_batch_norm import fold_batch_norm
from amp_ir.rewrites.fold_casts import fold_casts
from amp_ir.rewrites.fold_parameters import fold_parameters
from amp_ir.rewrites.store_low import store_low


@attrs.define(eq=False)
class Conversion:
    """A model with the options of its conversion, from which programs are made.

    `rules` are those in effect at the conversion: they hold for every program.
    """

    model: torch.nn.Module
    target_dtype: str
    lists: OpLists
    casts_optional: bool
    stored: StoredParameters = attrs.field(factory=StoredParameters)
    rules: RulesInEffect = attrs.field(factory=RulesInEffect)
    _first: StepModule | None = None
    # What the model's first call leaves in itself (`if self.size is None: ...`), for later shapes.
    _left: list[Callable[[], contextlib.AbstractContextManager[None]]] = attrs.field(factory=list)

    def program(self, inputs: tuple[Any, ...]) -> StepModule:
        """Return the program for the shapes of some inputs, on stored parameters.

        `inputs` are as `call_arguments` returns them: by name where the model is called so.

        Raises:
            StateError: the model has changed since its conversion.
        """
        captured = self._captured(inputs)
        full = captured.with_ir(fold_batch_norm(captured.ir, fixed_inputs(captured)))
        full = fold_parameters(full, self.stored.postpone)
        full = full.with_ir(fold_casts(full.ir))
        names = [name for name, _ in self.model.named_modules()]
        overrides = self.lists.overrides(full.ir, names)
        with self.rules.again():
            low = autocast(full, amp_dtype=self.target_dtype, overrides=overrides)
        if self.casts_optional and self.target_dtype != FULL_DTYPE:
            low = low.with_ir(store_low(low.ir, fixed_inputs(low), self.target_dtype))
        low = fold_parameters(low, self.stored.store)
        self._first = self._first or captured
        # The program no longer depends on the model, so it has no guards.
        return attrs.evolve(self.stored.finish(low), hooks=StepHooks())

    def without_casts(self, inputs: Sequence[tuple[Any, ...]]) -> list[StepModule]:
        """Return the float32 programs for the shapes of these inputs, on float32 weights.

        Raises:
            StateError: the model has changed since its conversion.
        """
        for one in inputs:
            self._captured(one)
        full = Conversion(self.model, FULL_DTYPE, OpLists(), casts_optional=False)
        return [full.program(one) for one in inputs]

    def _captured(self, inputs: tuple[Any, ...]) -> StepModule:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_in_eval_mode(self.model))
            stack.enter_context(torch.no_grad())
            self._check_unchanged()
            for held in self._left:
                stack.enter_context(held())
            captured, _ = trace_model(self.model, inputs)
        if captured.hooks.kept:
            raise CaptureError(
                f"the model keeps a tensor in {short_names(captured.hooks.kept)}, where a "
                "converted one puts none. Return it from forward, or clear the attribute at its end"
            )
        if captured.hooks.left:
            self._left.append(captured.hooks.as_left)
        self.stored.begin(captured)
        return captured

    def _check_unchanged(self) -> None:
        reason = "" if self._first is None else self._first.hooks.recompile_reason()
        if reason:
            raise StateError(
                f"the model is no longer as it was converted: {reason}. Convert it again"
            )


@contextlib.contextmanager
def _in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch every module to eval mode inside the block."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
