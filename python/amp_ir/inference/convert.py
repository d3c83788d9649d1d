# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.convert_model`: a PyTorch model in mixed precision for inference, after MXNet's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from amp_ir.amp.hints import FULL_DTYPE, LOW_DTYPES
from amp_ir.amp.op_lists import OpLists
from amp_ir.api import autocast, trace_model
from amp_ir.errors import OptionError, StateError
from amp_ir.inference.converted_model import ConvertedModel
from amp_ir.inference.stored_parameters import StoredParameters
from amp_ir.ir.fixed_values import fixed_inputs
from amp_ir.ir.options import check_opt_level, check_rounding
from amp_ir.ir.step_module import StepHooks, StepModule
from amp_ir.ir.target import target_of
from amp_ir.rewrites.fold_batch_norm import fold_batch_norm
from amp_ir.rewrites.fold_casts import fold_casts
from amp_ir.rewrites.fold_parameters import fold_parameters
from amp_ir.rewrites.store_low import store_low


def convert_model(
    model: torch.nn.Module,
    example_inputs: Any,
    target_dtype: str = "float16",
    target_dtype_ops: Any = None,
    fp32_ops: Any = None,
    conditional_fp32_ops: Any = None,
    excluded_names: Any = (),
    cast_optional_params: bool = False,
    *,
    device: str = "cpu",
    opt_level: int = 3,
    rounding: str = "fast",
) -> ConvertedModel:
    """Convert a model for inference in mixed precision; the model itself does not change.

    It is captured as `model.eval()` computes it: no dropout, BatchNorm with its running statistics,
    which is folded into the convolution before it. Inputs and outputs keep their dtypes. Names and
    meanings are MXNet's where it has them.

    Parameters are copied: training the model afterwards changes nothing here, until you convert it
    again. A parameter is stored in `target_dtype` where every op reads it so, which changes no
    result.

    Args:
        model: any module; its mode is as before afterwards.
        example_inputs: the tuple of the positional arguments, or one tensor. Other shapes, batch
            sizes for one, are compiled at their first call, and kept.
        target_dtype: "float16", "bfloat16", or "float32", which inserts no casts.
        target_dtype_ops: ops that run in `target_dtype`, whatever their rule says: names of
            `amp_ir.list_ops()`, with or without their prefix, or PyTorch's ("linear", "conv2d").
        fp32_ops: ops that run in float32.
        conditional_fp32_ops: triples (op, attribute, [values]): calls with such an attribute run in
            float32. Of the types there are "input_dtype", "input_ndim" and "input_shape".
        excluded_names: globs of module paths, which run in float32 with what is inside of them.
        cast_optional_params: store in `target_dtype` also what is only looked up or moved, such as
            the table of an embedding that otherwise stays in float32; this rounds it.
        device: "cpu", or "cuda" where the model is on that GPU.
        opt_level: as for `compile`.
        rounding: as for `compile`.

    Raises:
        OptionError: unknown names, an op in two lists, other wrong options; all at once.
        CaptureError, UnsupportedOpError, ArgumentError: as for `trace_step`.
    """
    _check_options(model, target_dtype, cast_optional_params)
    check_opt_level(opt_level)
    check_rounding(rounding)
    target_of(device)
    lists = OpLists(
        target_dtype_ops=target_dtype_ops,
        fp32_ops=fp32_ops,
        conditional_fp32_ops=conditional_fp32_ops,
        excluded_names=excluded_names,
    )
    is_one = isinstance(example_inputs, torch.Tensor)
    inputs = (example_inputs,) if is_one else example_inputs
    conversion = Conversion(model, target_dtype, lists, cast_optional_params)
    options = {"device": device, "opt_level": opt_level, "rounding": rounding}
    converted = ConvertedModel(conversion, conversion.stored, options)
    converted.compile(*inputs)
    return converted


def _check_options(model: Any, target_dtype: Any, cast_optional_params: Any) -> None:
    errors = []
    if not isinstance(model, torch.nn.Module):
        errors.append(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if target_dtype not in (*LOW_DTYPES, FULL_DTYPE):
        accepted = '"float16", "bfloat16" or "float32"'
        errors.append(f"target_dtype is {target_dtype!r}; expected {accepted}")
    if not isinstance(cast_optional_params, bool):
        errors.append(f"cast_optional_params is {cast_optional_params!r}; expected True or False")
    if errors:
        raise OptionError("; ".join(errors))


@attrs.define(eq=False)
class Conversion:
    """A model with the options of its conversion, from which programs are made."""

    model: torch.nn.Module
    target_dtype: str
    lists: OpLists
    casts_optional: bool
    stored: StoredParameters = attrs.field(factory=StoredParameters)
    _first: StepModule | None = None

    def program(self, inputs: tuple[Any, ...]) -> StepModule:
        """Return the program for the shapes of some inputs, on stored parameters.

        Raises:
            StateError: the model is no longer as it was converted.
        """
        captured = self._captured(inputs)
        full = captured.with_ir(fold_batch_norm(captured.ir, fixed_inputs(captured)))
        full = fold_parameters(full, self.stored.postpone)
        full = full.with_ir(fold_casts(full.ir))
        names = [name for name, _ in self.model.named_modules()]
        overrides = self.lists.overrides(full.ir, names)
        low = autocast(full, amp_dtype=self.target_dtype, overrides=overrides)
        if self.casts_optional and self.target_dtype != FULL_DTYPE:
            low = low.with_ir(store_low(low.ir, fixed_inputs(low), self.target_dtype))
        low = fold_parameters(low, self.stored.store)
        self._first = self._first or captured
        # The program is the model's no more: nothing of it is guarded.
        return attrs.evolve(self.stored.finish(low), hooks=StepHooks())

    def without_casts(self, inputs: Sequence[tuple[Any, ...]]) -> list[StepModule]:
        """Return the float32 programs for the shapes of these inputs, on float32 weights.

        Raises:
            StateError: the model is no longer as it was converted.
        """
        for one in inputs:
            self._captured(one)
        full = Conversion(self.model, FULL_DTYPE, OpLists(), casts_optional=False)
        return [full.program(one) for one in inputs]

    def _captured(self, inputs: tuple[Any, ...]) -> StepModule:
        with _in_eval_mode(self.model), torch.no_grad():
            self._check_unchanged()
            captured, _ = trace_model(self.model, inputs)
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
    """Switch every module to evaluation, and back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
