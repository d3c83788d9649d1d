# SPDX-License-Identifier: Apache-2.0
"""External calls: an op of PyTorch, ATen's or a custom one, that amp_ir has no kernel of.

The op keeps its name, its arguments that are not tensors, and what its fake implementation promised
of its results. Its reference implementation is the op itself. A complex tensor is its real view
here, f32[..., 2], as `torch.view_as_real` gives it: the op alone sees complex numbers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from tvm import relax

from amp_ir.dialect.define import dtype_name
from amp_ir.dialect.registry import declare, options_of
from amp_ir.errors import BrokenPromiseError
from amp_ir.host.fake_tensors import fake_tensor_mode

NAME = "amp_ir.external_call"
# The parts of complex dtypes; all other dtypes are the IR's own.
REAL_OF_COMPLEX = {"complex64": "float32", "complex128": "float64"}
# How a tensor's place among those of the call is encoded: itself, read as complex, or its number.
_PLACES = ("tensor", "complex", "number")
# What torch has by name, as arguments of ops.
_NAMED = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


class UnencodableArgumentError(Exception):
    """An argument of an op cannot be part of a compiled step; `str(error)` says what it is."""


@attrs.frozen
class ResultSpec:
    """Shape and dtype that a fake implementation promised of one result, as PyTorch has it."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ResultSpec:
        """Return what a tensor is."""
        return cls(tuple(int(extent) for extent in tensor.shape), dtype_name(tensor))

    @property
    def type_(self) -> relax.TensorType:
        """The type of the IR's value."""
        if self.dtype in REAL_OF_COMPLEX:
            return relax.TensorType([*self.shape, 2], REAL_OF_COMPLEX[self.dtype])
        return relax.TensorType(list(self.shape), self.dtype)

    def __str__(self) -> str:
        """Format for errors: float32[2, 3]."""
        return f"{self.dtype}{list(self.shape)}"


def overload_name(op: torch._ops.OpOverload) -> str:
    """Return the full name of an overload: "mylib::scale.default"."""
    return f"{op.namespace}::{op._schema.name.partition('::')[2]}.{op._overloadname}"


def external_op(call: relax.Call) -> str:
    """Return the op's name for people: "mylib::scale", "aten::linalg_inv_ex"."""
    return str(options_of(call)["op"]).removesuffix(".default")


def find_overload(name: str) -> torch._ops.OpOverload:
    """Return the overload of a name that `overload_name` gave."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.rpartition(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


def encode_arguments(
    args: Sequence[Any], kwargs: dict[str, Any], place_of: Callable[[Any], dict[str, Any] | None]
) -> str:
    """Write the arguments of a call as text.

    `place_of` returns, for a tensor, {"tensor": its position among the call's tensors}, and None
    for anything else.

    Raises:
        UnencodableArgumentError: an argument is neither a tensor nor plain.
    """

    def encode(value: Any) -> Any:
        place = place_of(value)
        if place is not None:
            return place
        if isinstance(value, (list, tuple)):
            return [encode(item) for item in value]
        if type(value) in (bool, int, float, str, type(None)):
            return value
        if type(value) is complex:
            return {"complex number": [value.real, value.imag]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        for kind, name in _NAMED.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        raise UnencodableArgumentError(f"an argument of type {type(value).__name__}")

    return json.dumps([[encode(one) for one in args], {k: encode(v) for k, v in kwargs.items()}])


@functools.lru_cache(maxsize=4096)
def _decoded(arguments: str) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = json.loads(arguments)
    return args, kwargs


def _with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a decoded argument with its tensors in place; a number is read from its tensor."""
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "complex":
        return torch.view_as_complex(tensors[content].contiguous())
    if kind == "number":
        return 1.0 if isinstance(tensors[content], FakeTensor) else tensors[content].item()
    if kind == "complex number":
        return complex(*content)
    return torch.device(content) if kind == "device" else getattr(torch, content)


def arguments_text(arguments: str, tensors: Sequence[str]) -> str:
    """Return encoded arguments as a call in Python has them, with these names of the tensors."""
    args, kwargs = _decoded(arguments)
    named = [f"{name}={_argument_text(one, tensors)}" for name, one in kwargs.items()]
    return ", ".join([*(_argument_text(one, tensors) for one in args), *named])


def _argument_text(value: Any, tensors: Sequence[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_argument_text(one, tensors) for one in value)}]"
    if not isinstance(value, dict):
        return str(value)
    ((kind, content),) = value.items()
    if kind in _PLACES:
        return tensors[content]
    return str(complex(*content)) if kind == "complex number" else str(content)


def call_overload(
    op: str, arguments: str, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Call an op as it is registered, without gradients and outside of autocast.

    Complex results stay complex.
    """
    args, kwargs = _decoded(arguments)
    given = [_with_tensors(one, tensors) for one in args]
    named = {name: _with_tensors(one, tensors) for name, one in kwargs.items()}
    with torch.no_grad(), torch._C._DisableAutocast():
        out = find_overload(op)(*given, **named)
    return pytree.tree_leaves(out, is_leaf=lambda one: one is None)


def check_results(
    op: str, promised: Sequence[ResultSpec], values: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return the results in the IR's form.

    Raises:
        BrokenPromiseError: they are not what the fake implementation promised.
    """
    found = [value for value in values if isinstance(value, torch.Tensor)]
    if len(found) != len(promised):
        raise BrokenPromiseError(
            f"{op} returned {len(found)} tensors, and its fake implementation {len(promised)}; "
            "make the two agree (torch.library.opcheck compares them)"
        )
    for number, (value, spec) in enumerate(zip(found, promised, strict=True)):
        got = ResultSpec.of(value)
        if got != spec:
            raise BrokenPromiseError(
                f"result {number} of {op} is {got}, and its fake implementation promised {spec}; "
                "make the two agree (torch.library.opcheck compares them)"
            )
    return [_as_real(value) for value in found]


def _as_real(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        return torch.view_as_real(value.resolve_conj())
    return value.resolve_neg()


def read_results(results: str) -> list[ResultSpec]:
    """Return what the option `results` says."""
    return [ResultSpec(tuple(shape), dtype) for shape, dtype in json.loads(results)]


def write_results(results: Sequence[ResultSpec]) -> str:
    """Write the option `results`."""
    return json.dumps([[one.shape, one.dtype] for one in results])


def _reference(
    *tensors: torch.Tensor, op: str, arguments: str, results: str, **_options: Any
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Call the op itself; in float64 its results are float64 where it follows its arguments."""
    values = [one for one in call_overload(op, arguments, tensors) if one is not None]
    found = tuple(_as_real(value) for value in values)
    return found[0] if len(found) == 1 else found


@declare(NAME, "tensors...", reference=_reference)
def external_call(
    *types: relax.Type,
    op: str,
    arguments: str,
    reads: Sequence[str],
    results: str,
    device: str = "cpu",
    autocast: str = "",
    gradients: Sequence[int] = (),
) -> relax.Type:
    """Call PyTorch's own implementation of an op.

    `reads` are the dtypes of the tensors as captured, `results` what the op made of them. With
    other dtypes the op's fake implementation is asked. `autocast` is the dtype to which the op's
    registered autocast casts ("low": whichever the step's is), "" where it has none;
    `gradients` are the positions of the tensors that the backward pass made, where it calls the op.
    """
    specs = read_results(results)
    dtypes = tuple(str(one.dtype) for one in types)
    if dtypes != tuple(reads):
        shapes = tuple(tuple(int(extent) for extent in one.shape) for one in types)
        specs = list(_promised(op, arguments, shapes, dtypes, device))
    found = [spec.type_ for spec in specs]
    return found[0] if len(found) == 1 else relax.TupleType(found)


@functools.lru_cache(maxsize=4096)
def _promised(
    op: str,
    arguments: str,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[str, ...],
    device: str,
) -> tuple[ResultSpec, ...]:
    """Return what the op's fake implementation promises for these tensors."""
    mode = fake_tensor_mode()
    empty = [
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    with mode:
        fakes = [FakeTensor(mode, one, torch.device(device)) for one in empty]
        values = call_overload(op, arguments, fakes)
    return tuple(ResultSpec.of(one) for one in values if one is not None)
