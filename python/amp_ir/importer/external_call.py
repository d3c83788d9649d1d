# SPDX-License-Identifier: Apache-2.0
"""Ops without a converter become external calls: PyTorch's own implementation in the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from tvm import relax

from amp_ir.dialect.external_call import (
    NAME,
    REAL_OF_COMPLEX,
    ResultSpec,
    UnencodableArgumentError,
    encode_arguments,
    overload_name,
    write_results,
)
from amp_ir.host.fake_tensors import fake_tensor_mode
from amp_ir.importer.converters import ConversionError, Emitter
from amp_ir.importer.converters.emitter import dtype_name
from amp_ir.importer.converters.promotion import dtype_of, is_scalar
from amp_ir.ir.location import META_KEY, Location

Lookup = Callable[[fx.Node], Any]

# Between a complex tensor and its real view, which is all that the IR has, there is nothing to do.
_VIEWS_OF_COMPLEX = frozenset(
    {torch.ops.aten.view_as_real.default, torch.ops.aten.view_as_complex.default}
)
# Ops of the memory of a tensor, which has another layout in a step.
_OF_MEMORY = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter", "_reshape_alias"})
# In training these write running statistics, which their schemas do not declare.
_WRITERS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_LOW = (torch.float16, torch.bfloat16)


def is_complex_call(node: fx.Node) -> bool:
    """Return whether a node reads or makes a complex tensor, which only external calls can."""
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    return any(
        isinstance(one, torch.Tensor) and one.is_complex() for one in pytree.tree_leaves(values)
    )


def reads_number(node: fx.Node) -> bool:
    """Return whether an argument that is a number, by the op's schema, is a value of the step."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return bool(_number_nodes(node.target, node))


def _number_nodes(op: torch._ops.OpOverload, node: fx.Node) -> set[fx.Node]:
    schema = op._schema.arguments
    given = [*zip(schema, node.args, strict=False)]
    given += [(one, node.kwargs[one.name]) for one in schema if one.name in node.kwargs]
    return {
        value
        for argument, value in given
        if isinstance(value, fx.Node) and "Tensor" not in str(argument.type)
    }


def convert_external(emitter: Emitter, node: fx.Node, lookup: Lookup) -> Any:
    """Emit an external call of a node's op; return its value, a tuple for several.

    Raises:
        ConversionError: the op cannot be called inside of a step; says why.
    """
    op = node.target
    if op in _VIEWS_OF_COMPLEX:
        return lookup(node.args[0])  # type: ignore[arg-type]
    if not isinstance(op, torch._ops.OpOverload):
        raise ConversionError("")
    leaves = pytree.tree_leaves(node.meta.get("val", ()), is_leaf=lambda one: one is None)
    _check_op(op, leaves)
    tensors: list[relax.Expr] = []
    places = _Places(emitter, op, node, lookup, tensors)
    try:
        arguments = encode_arguments(places.args, places.kwargs, places.of)
    except UnencodableArgumentError as error:
        raise ConversionError(f"takes {error}, which a compiled step cannot hold") from None
    promised = [ResultSpec.of(one) for one in leaves if one is not None]
    for spec, one in zip(promised, [one for one in leaves if one is not None], strict=True):
        if spec.dtype not in REAL_OF_COMPLEX:
            dtype_name(one.dtype)  # raises where the IR has no such dtype
    location: Location = node.meta.get(META_KEY) or Location()
    made = emitter.call(
        NAME,
        *tensors,
        op=overload_name(op),
        arguments=arguments,
        reads=[dtype_of(one) for one in tensors],
        results=write_results(promised),
        device=str(next(one.device for one in leaves if one is not None)),
        autocast=registered_autocast(op, node),
        gradients=places.gradients() if location.phase == "backward" else [],
    )
    fields = iter(made if isinstance(made, tuple) else (made,))
    values = tuple(None if one is None else next(fields) for one in leaves)
    return values[0] if isinstance(node.meta["val"], torch.Tensor) else values


def _check_op(op: torch._ops.OpOverload, leaves: Sequence[Any]) -> None:
    """Reject an op that is more than a function from tensors to tensors of known shapes."""
    if op.overloadpacket.__name__ in _OF_MEMORY:
        raise ConversionError("depends on how its tensor is laid out in memory")
    if op._schema.is_mutable or op.overloadpacket.__name__ in _WRITERS:
        raise ConversionError("writes to its arguments")
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise ConversionError("draws random numbers from a generator that a compiled step lacks")
    tensors = [one for one in leaves if one is not None]
    strange = next((one for one in tensors if not isinstance(one, torch.Tensor)), None)
    if strange is not None:
        raise ConversionError(
            f"returns a number ({type(strange).__name__}), which a compiled step has only in "
            "tensors"
        )
    if not tensors:
        raise ConversionError("returns no tensor")
    for one in tensors:
        if one.layout is not torch.strided:
            raise ConversionError(f"returns a tensor of layout {one.layout}")
        if not all(isinstance(extent, int) for extent in one.shape):
            raise ConversionError("returns a tensor whose shape depends on values")


class _Places:
    """The tensors of a call by their place, each once."""

    def __init__(
        self,
        emitter: Emitter,
        op: torch._ops.OpOverload,
        node: fx.Node,
        lookup: Lookup,
        tensors: list[relax.Expr],
    ) -> None:
        self._emitter = emitter
        self._lookup = lookup
        self._tensors = tensors
        self._known: dict[fx.Node, int] = {}
        self._numbers = _number_nodes(op, node)
        devices = [one.device for one in pytree.tree_leaves(node.meta["val"]) if one is not None]
        self._is_on_gpu = any(device.type != "cpu" for device in devices)
        self.args = tuple(node.args)
        self.kwargs = dict(node.kwargs)

    def of(self, value: Any) -> dict[str, Any] | None:
        """Return the place of a node's tensor."""
        if not isinstance(value, fx.Node):
            return None
        kind = "complex" if value.meta["val"].is_complex() else "tensor"
        if value in self._numbers:
            if self._is_on_gpu:
                raise UnencodableArgumentError("a number that a GPU computes at each call")
            kind = "number"
        if value not in self._known:
            self._known[value] = len(self._tensors)
            self._tensors.append(self._expression(value))
        return {kind: self._known[value]}

    def gradients(self) -> list[int]:
        """Return the places of the tensors that the backward pass made."""
        made = {node: node.meta.get(META_KEY) or Location() for node in self._known}
        return [place for node, place in self._known.items() if made[node].phase == "backward"]

    def _expression(self, node: fx.Node) -> relax.Expr:
        found = self._lookup(node)
        if is_scalar(found):
            return self._emitter.constant(found, dtype_name(node.meta["val"].dtype))
        return found


def registered_autocast(op: torch._ops.OpOverload, node: fx.Node) -> str:
    """Return to which dtype the autocast registered for a custom op casts: "low" is the step's.

    "" for an op without one, and for PyTorch's own ops, which run in their captured dtypes.
    """
    device = next(
        (one.meta["val"].device.type for one in node.all_input_nodes
         if isinstance(one.meta.get("val"), torch.Tensor)), "cpu",
    )  # fmt: skip
    key = f"Autocast{'CPU' if device == 'cpu' else device.upper()}"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if op.namespace == "aten" or not has_kernel(op.name(), key):
        return ""
    seen = [_cast_under(op, node, device, low) for low in _LOW]
    if seen[0] != seen[1]:
        return "low"
    return "" if seen[0] is None else dtype_name(seen[0])


class _FirstCall(TorchDispatchMode):
    """The dtypes in which an op is called, below autocast."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        super().__init__()
        self._op = op
        self.dtypes: list[torch.dtype] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the float dtypes of the op's tensors."""
        if func is self._op and self.dtypes is None:
            tensors = pytree.tree_leaves((args, kwargs or {}))
            self.dtypes = [
                one.dtype
                for one in tensors
                if isinstance(one, torch.Tensor) and one.is_floating_point()
            ]
        return func(*args, **(kwargs or {}))


def _cast_under(
    op: torch._ops.OpOverload, node: fx.Node, device: str, low: torch.dtype
) -> torch.dtype | None:
    """Return the dtype to which the op's autocast casts its float32 arguments; None: none."""
    mode = fake_tensor_mode()

    def fake(argument: fx.Node) -> Any:
        value = argument.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return FakeTensor(mode, empty, value.device)

    first = _FirstCall(op)
    with mode:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), fake)
        with torch.no_grad(), torch.autocast(device, low), first:
            op(*args, **kwargs)
    before = [
        one.dtype
        for one in pytree.tree_leaves((args, kwargs))
        if isinstance(one, torch.Tensor) and one.is_floating_point()
    ]
    pairs = zip(before, first.dtypes or before, strict=True)
    changed = {now for was, now in pairs if now is not was}
    return next(iter(changed), None)
