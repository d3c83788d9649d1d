# SPDX-License-Identifier: Apache-2.0
"""External calls as the virtual machine makes them: one function that calls back into PyTorch.

`write_external` turns the dialect's op into a call of it. The function gets a description and flat
tensors, calls the op on views of them, checks what the op returns and copies that to where the plan
puts it: what the op itself allocates is PyTorch's, and not in the plan.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Callable
from typing import Any

import attrs
import torch
import tvm
import tvm_ffi
from tvm import relax

from amp_ir.dialect.external_call import (
    NAME,
    ResultSpec,
    arguments_text,
    call_overload,
    check_results,
    external_op,
    find_overload,
    read_results,
    write_results,
)
from amp_ir.dialect.registry import options_of
from amp_ir.errors import BrokenPromiseError
from amp_ir.ir.dataflow import DPS_CALL, op_name
from amp_ir.ir.library_call import library_call
from amp_ir.ir.memory_plan import MemoryPlan
from amp_ir.ir.static_shape import shape_of

SYMBOL = "amp_ir.external.call"


class _Run(threading.local):
    """The calls of Python in this thread's run: how many began, and what the last one raised."""

    begun = 0
    error: BaseException | None = None


_run = _Run()


def begin_run() -> None:
    """Forget the calls of an earlier run of this thread."""
    _run.begun, _run.error = 0, None


def failed_call() -> tuple[int, BaseException] | None:
    """Return which call of Python of this thread's run raised, counted from 0, and what."""
    return None if _run.error is None else (_run.begun - 1, _run.error)


@attrs.frozen(eq=False)
class ExternalCall:
    """An external call in any of its forms: the op's name for people, and what it is called with.

    `arguments` are encoded as in the dialect's op; `tensors` are those that it reads.
    """

    op: str
    arguments: str
    tensors: tuple[relax.Expr, ...]

    def arguments_text(self, tensor_text: Callable[[relax.Expr], str]) -> str:
        """Return the arguments as a call in Python has them: `x, [0, 1], upper=True`."""
        return arguments_text(self.arguments, [tensor_text(one) for one in self.tensors])


def read_external(value: relax.Expr) -> ExternalCall | None:
    """Read the dialect's op, a call that `write_external` wrote, or a planned one; else None."""
    name = op_name(value)
    if name == NAME:
        return ExternalCall(
            external_op(value), str(options_of(value)["arguments"]), tuple(value.args)
        )
    if name == DPS_CALL and str(value.args[0].global_symbol) == SYMBOL:
        fields = value.args[1].fields
    elif isinstance(value, relax.Call) and getattr(value.op, "global_symbol", "") == SYMBOL:
        fields = value.args
    else:
        return None
    known = _described(str(fields[0].value))
    tensors = tuple(fields[1 : len(known.shapes) + 1])
    return ExternalCall(known.op.removesuffix(".default"), known.arguments, tensors)


def write_external(call: relax.Call) -> relax.Call:
    """Return the planned form of the dialect's op: destinations for its results follow."""
    assert call.op.name == NAME, call
    options = options_of(call)
    type_ = call.ty
    types = list(type_.fields) if isinstance(type_, relax.TupleType) else [type_]
    description = json.dumps(
        {
            "op": options["op"],
            "arguments": options["arguments"],
            "shapes": [list(shape_of(argument)) for argument in call.args],
            "results": _results_now(options, types),
        }
    )
    new = library_call(SYMBOL, [tvm.ir.StringImm(description), *call.args], type_, call.span)
    notes = tvm.ir.make_node("ir.DictAttrs", ops=external_op(call))
    made = relax.Call(new.op, new.args, notes, new.ty_args, new.span)
    relax.expr._update_type(made, type_)
    return made


def _results_now(options: dict[str, Any], types: list[relax.TensorType]) -> str:
    """Return the results as the types say, complex ones as captured."""
    captured = read_results(str(options["results"]))
    now = [
        spec
        if spec.dtype.startswith("complex")
        else ResultSpec(tuple(int(n) for n in type_.shape), str(type_.dtype))
        for spec, type_ in zip(captured, types, strict=True)
    ]
    return write_results(now)


def unrecordable_ops(plan: MemoryPlan) -> list[str]:
    """Return the ops of a plan whose authors say that no CUDA graph may hold them."""
    names = dict.fromkeys(one.ops[0] for one in plan.calls if one.symbol == SYMBOL)
    tag = torch.Tag.cudagraph_unsafe
    return [name for name in names if tag in _overload_of(name).tags]


def _overload_of(name: str) -> torch._ops.OpOverload:
    """Return the overload of a name that `external_op` gave."""
    has_overload = "." in name.partition("::")[2]
    return find_overload(name if has_overload else f"{name}.default")


@attrs.frozen
class _Description:
    """A call's description: the op, its arguments, the shapes of its tensors and its results."""

    op: str
    arguments: str
    shapes: tuple[tuple[int, ...], ...]
    results: tuple[ResultSpec, ...]


@functools.lru_cache(maxsize=4096)
def _described(description: str) -> _Description:
    known = json.loads(description)
    return _Description(
        known["op"],
        known["arguments"],
        tuple(map(tuple, known["shapes"])),
        tuple(read_results(known["results"])),
    )


def register_in_run(symbol: str, function: Callable[..., None]) -> None:
    """Let the virtual machine call a function of Python; a run that fails knows which call did."""

    def call(*arguments: Any) -> None:
        _run.begun += 1
        try:
            function(*arguments)
        except Exception as error:
            # It comes out of the virtual machine as another object, and may be of a class that the
            # virtual machine does not know.
            _run.error = error
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        except BaseException as error:
            _run.error = error
            raise

    tvm_ffi.register_global_func(symbol, call, override=True)


def _call(description: str, *buffers: tvm.runtime.Tensor) -> None:
    """Call the op on the first buffers and copy its results into the others."""
    _call_op(_described(description), buffers)


def _call_op(call: _Description, buffers: tuple[tvm.runtime.Tensor, ...]) -> None:
    flat = [torch.utils.dlpack.from_dlpack(one) for one in buffers]
    count = len(call.shapes)
    tensors = [_view(one, shape) for one, shape in zip(flat[:count], call.shapes, strict=True)]
    versions = [one._version for one in tensors]
    values = check_results(call.op, call.results, call_overload(call.op, call.arguments, tensors))
    if [one._version for one in tensors] != versions:
        raise BrokenPromiseError(
            f"{call.op} wrote to an argument that its schema does not mark as written; list it in "
            "mutates_args"
        )
    for target, value in zip(flat[count:], values, strict=True):
        _view(target, tuple(value.shape)).copy_(value)


def _view(flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a flat buffer in its shape; that of an empty tensor has one element too many."""
    return flat[: math.prod(shape)].view(shape)


register_in_run(SYMBOL, _call)
