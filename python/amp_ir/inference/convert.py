# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.convert_model`: a PyTorch model in mixed precision for inference, after MXNet's."""

from __future__ import annotations

from typing import Any

import torch

from amp_ir.amp.hints import FULL_DTYPE, LOW_DTYPES
from amp_ir.amp.op_lists import OpLists
from amp_ir.capture.call_arguments import split
from amp_ir.capture.model_inputs import model_inputs
from amp_ir.errors import OptionError
from amp_ir.inference.conversion import Conversion
from amp_ir.inference.converted_model import ConvertedModel
from amp_ir.ir.options import check_limit, check_opt_level, check_rounding, dtype_name, meant_dtype
from amp_ir.ir.public_function import public_function
from amp_ir.ir.target import target_of
from amp_ir.runtime.step_variants import DEFAULT_SHAPES


@public_function("amp_ir.convert_model")
def convert_model(
    model: torch.nn.Module,
    example_inputs: Any,
    target_dtype: str | torch.dtype = "float16",
    target_dtype_ops: Any = None,
    fp32_ops: Any = None,
    conditional_fp32_ops: Any = None,
    excluded_names: Any = (),
    cast_optional_params: bool = False,
    *,
    device: str = "cpu",
    opt_level: int = 3,
    rounding: str = "fast",
    max_shapes: int = DEFAULT_SHAPES,
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
        example_inputs: one tensor, the tuple of the arguments by position, or a dict or
            BatchEncoding of the arguments by name, as `model(**batch)` takes them;
            `call_arguments` makes one of both. Other shapes, batch sizes for one, are compiled at
            their first call, and kept.
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
        max_shapes: for how many structures, shapes, dtypes and plain values of the inputs programs
            are kept. The one not used for longest goes, which one warning says.

    Raises:
        OptionError: unknown names, an op in two lists, other wrong options; all at once.
        CaptureError, UnsupportedOpError, ArgumentError: as for `trace_model`.
    """
    dtype: str = dtype_name(target_dtype)
    _check_options(model, dtype, cast_optional_params)
    check_opt_level(opt_level)
    check_rounding(rounding)
    check_limit("max_shapes", max_shapes)
    target_of(device)
    lists = OpLists(
        target_dtype_ops=target_dtype_ops,
        fp32_ops=fp32_ops,
        conditional_fp32_ops=conditional_fp32_ops,
        excluded_names=excluded_names,
    )
    by_position, named = split(model_inputs(model, example_inputs))
    conversion = Conversion(model, dtype, lists, cast_optional_params)
    options = {"device": device, "opt_level": opt_level, "rounding": rounding}
    converted = ConvertedModel(conversion, conversion.stored, options, max_shapes=max_shapes)
    converted.compile(*by_position, **named)
    return converted


def _check_options(model: Any, target_dtype: Any, cast_optional_params: Any) -> None:
    errors = []
    if not isinstance(model, torch.nn.Module):
        errors.append(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if target_dtype not in (*LOW_DTYPES, FULL_DTYPE):
        meant = meant_dtype(target_dtype, (*LOW_DTYPES, FULL_DTYPE))
        accepted = '"float16", "bfloat16" or "float32"'
        errors.append(f"target_dtype is {target_dtype!r}; expected {accepted}{meant}")
    if not isinstance(cast_optional_params, bool):
        errors.append(f"cast_optional_params is {cast_optional_params!r}; expected True or False")
    if errors:
        raise OptionError("; ".join(errors))
