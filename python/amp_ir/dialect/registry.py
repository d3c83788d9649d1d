# SPDX-License-Identifier: Apache-2.0
"""Registry of `amp_ir.*` ops: type inference and reference implementation in PyTorch.

One declaration per op, in the file of its family:

    @declare("amp_ir.softmax_backward", "grad", "y")
    def softmax_backward(grad, y, *, axis): ...        # infer: types in, type out

The registered op takes its options as `DictAttrs`. The lowering to loops is registered in
`loops/`, the cast rule in `amp/type_hints.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import _ffi_api as _ir_api

InferType = Callable[..., relax.Type]
Reference = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...]"]


@attrs.frozen
class Declaration:
    """One op of the dialect.

    `infer(*types, **options)` gives the result type; `defaults` are the options that a call may
    leave out, with their values (`call_op` fills them in); `reference(*tensors, **options)`
    computes the op with PyTorch in the dtype of its arguments (float64 included) and is the op's
    definition. `unrounded` does, and rounds no result to the dtype that the options ask for.
    """

    name: str
    arguments: tuple[str, ...]
    infer: InferType
    reference: Reference
    unrounded: Reference
    summary: str
    defaults: Mapping[str, Any]


DECLARATIONS: dict[str, Declaration] = {}


def declare(
    name: str, *arguments: str, reference: Reference, unrounded: Reference | None = None
) -> Callable[[InferType], InferType]:
    """Register `name` as a Relax op; decorates its type inference.

    `unrounded` is `reference` where it is not given.

    An argument whose name ends in "?" may be left out of a call, one that ends in "..." stands
    for any number of them.

    Raises:
        ValueError: the op is declared already.
    """

    def register(infer: InferType) -> InferType:
        if name in DECLARATIONS:
            raise ValueError(f"{name} is declared twice; first as {DECLARATIONS[name]}")
        summary = (infer.__doc__ or "").strip().splitlines()[0] if infer.__doc__ else ""
        defaults = {
            option.name: option.default
            for option in inspect.signature(infer).parameters.values()
            if option.kind is option.KEYWORD_ONLY and option.default is not option.empty
        }
        DECLARATIONS[name] = Declaration(
            name, arguments, infer, reference, unrounded or reference, summary, defaults
        )
        _ir_api.RegisterOp(name, summary)
        op = tvm.ir.Op.get(name)
        op.set_num_inputs(len(arguments))

        def infer_type(call: relax.Call, _builder: Any) -> relax.Type:
            return infer(*(argument.ty for argument in call.args), **options_of(call))

        op.set_attr("FInferType", tvm_ffi.convert(infer_type))
        op.set_attr("FPurity", True)
        return infer

    return register


def options_of(call: relax.Call) -> dict[str, Any]:
    """Return the options of a call as plain Python values (tuples for lists)."""
    if not isinstance(call.attrs, tvm.ir.attrs.DictAttrs):
        return {}
    return {
        key: tuple(value) if isinstance(value, tvm_ffi.Array) else value
        for key, value in call.attrs.items()
    }


def call_op(
    name: str, args: list[relax.Expr], span: tvm.ir.Span | None = None, **options: Any
) -> relax.Call:
    """Build a call of an op of the dialect; options that are left out take their defaults."""
    complete = {**DECLARATIONS[name].defaults, **options}
    values: Mapping[str, Any] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in complete.items()
    }
    dict_attrs = tvm.ir.make_node("ir.DictAttrs", **values)
    return relax.Call(tvm.ir.Op.get(name), args, dict_attrs, [], span)
