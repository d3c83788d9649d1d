# SPDX-License-Identifier: Apache-2.0
"""Custom ops in a trace: those that write get a twin that does not; some cannot be captured."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from amp_ir.capture.define_op import define_op
from amp_ir.dialect.external_call import overload_name

# Ops of these are PyTorch's and ours: their schemas are known to the capture.
_KNOWN_NAMESPACES = frozenset(
    {"aten", "prim", "prims", "profiler", "amp_ir", "amp_ir_cell", "amp_ir_written"}
)

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})


def is_custom(func: Any) -> bool:
    """Return whether an op is the user's, or that of a library of kernels."""
    is_op = isinstance(func, torch._ops.OpOverload)
    return is_op and func.namespace not in _KNOWN_NAMESPACES


def unsupported_reason(func: torch._ops.OpOverload) -> tuple[str, str] | None:
    """Return why a custom op cannot be part of a compiled step, and what to do; None if it can."""
    if func.namespace in _COLLECTIVES:
        return (
            f"{func} exchanges tensors between ranks: a compiled step exchanges gradients, buffers "
            "of DistributedDataParallel and statistics of SyncBatchNorm only",
            "Return the tensor, and call torch.distributed on it after the step; gradients are "
            "averaged by a DistributedDataParallel in model=, or with data_parallel=True",
        )
    returns = [str(one.type) for one in func._schema.returns]
    numbers = [one for one in returns if "Tensor" not in one]
    if numbers:
        return (
            f"{func} returns a number ({numbers[0]}), which must be known before the step runs",
            "Let it return a tensor of shape ()",
        )
    if not returns and not func._schema.is_mutable:
        return (
            f"{func} has no result: a compiled step runs ops for their results only",
            "Call it outside of the step, or let it return a tensor that the step uses",
        )
    for one in _written_arguments(func):
        if str(one.type) != "Tensor":
            return (
                f"{func} writes to {one.name}, of type {one.type}: a compiled step follows writes "
                "to tensors only, not to lists of them or to tensors that may be None",
                "Let it return the new values, or take each tensor as an argument of its own",
            )
    return None


def call_written(func: torch._ops.OpOverload, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call an op that writes to arguments: its twin returns their new values, which are copied."""
    schema = func._schema
    names = [one.name for one in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    defaults = {one.name: one.default_value for one in schema.arguments if one.has_default_value()}
    complete = [given[name] if name in given else defaults[name] for name in names]
    out = twin_of(func)(*complete)
    values = list(out) if isinstance(out, (tuple, list)) else [out]
    count = len(schema.returns)
    for name, value in zip(_written(func), values[count:], strict=True):
        torch.ops.aten.copy_.default(given[name], value)
    if count == 0:
        return None
    return values[0] if count == 1 else tuple(values[:count])


@functools.cache
def twin_of(func: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Return an op that writes nothing: its results are those of `func`, then the written tensors.

    `func` writes to tensors only: `unsupported_reason` has seen it.
    """
    written = _written(func)
    name = overload_name(func).replace("::", "_").replace(".", "_")
    arguments = ", ".join(
        f"{'Tensor' if one.name in written else one.type} {one.name}"
        for one in func._schema.arguments
    )
    types = [str(one.type) for one in func._schema.returns] + ["Tensor"] * len(written)
    schema = f"{name}({arguments}) -> ({', '.join(types)})"
    places = [k for k, one in enumerate(func._schema.arguments) if one.name in written]
    positional = [one.name for one in func._schema.arguments if not one.kwarg_only]

    def call(*args: Any) -> Any:
        values = [one.clone() if k in places else one for k, one in enumerate(args)]
        named = dict(zip((one.name for one in func._schema.arguments), values, strict=True))
        options = {key: value for key, value in named.items() if key not in positional}
        out = func(*values[: len(positional)], **options)
        made = list(out) if isinstance(out, (tuple, list)) else [out] * (out is not None)
        results = (*made, *(values[k] for k in places))
        return results[0] if len(results) == 1 else results

    define_op(schema, call, call, namespace="amp_ir_written")
    twin: torch._ops.OpOverload = getattr(torch.ops.amp_ir_written, name).default
    return twin


def _written(func: torch._ops.OpOverload) -> list[str]:
    return [one.name for one in _written_arguments(func)]


def _written_arguments(func: torch._ops.OpOverload) -> list[torch._C.Argument]:
    arguments = func._schema.arguments
    return [one for one in arguments if one.alias_info is not None and one.alias_info.is_write]
