# SPDX-License-Identifier: Apache-2.0
"""`x[mask]` of a mask that the data decides, as far as its uses have a shape that does not.

`a[m] = 2 * b[m]` is a choice between the elements of two tensors, and `loss[m].mean()` a quotient
of sums. What a mask selects is kept as the whole tensor and the mask: arithmetic is done on all
elements, and what leaves chooses the selected ones, so that no others have a gradient, NaN or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from amp_ir.capture.constant_values import constant_value
from amp_ir.capture.decompositions.packed_sequences import PackedPart
from amp_ir.capture.diagnostics import UnsupportedCall

_SET = torch.Tensor.__setitem__
_ELEMENTWISE = frozenset(
    "add radd iadd sub rsub isub subtract mul rmul imul multiply div rdiv truediv rtruediv "
    "itruediv divide true_divide pow rpow ipow neg negative abs exp expm1 log log1p log2 sqrt "
    "rsqrt square reciprocal sigmoid tanh relu gelu silu softplus logsigmoid leaky_relu elu "
    "sin cos erf sign clamp clip clamp_min clamp_max minimum maximum detach float double half "
    "bfloat16 eq ne lt le gt ge logical_and logical_or logical_not invert and or".split()
)
_IN_PLACE = frozenset("iadd isub imul itruediv ipow".split())
_LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip
_TENSOR: Any = torch.Tensor
_KINDS = (_TENSOR.dtype.__get__, _TENSOR.device.__get__)
_OLD_OPTIONS = frozenset({"reduce", "size_average"})
# In the place of what is not selected: few functions, and derivatives, are infinite or NaN there.
_FILLER = 1


def selected(args: tuple[Any, ...]) -> SelectedRows | None:
    """Return what x[mask] selects by a mask of values that do not exist yet; else None."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    x, index = args
    mask = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if not _is_mask(mask) or x.shape[: mask.ndim] != mask.shape:
        return None
    filled = torch.where(_beside(mask, x), x, torch.full((), _FILLER, dtype=x.dtype))
    return SelectedRows.of(filled, mask, x)


def _is_mask(mask: Any) -> bool:
    return (
        type(mask) is FakeTensor
        and mask.dtype is torch.bool
        and mask.ndim > 0
        and mask.constant is None
        and constant_value(mask) is None
    )


def _version(mask: torch.Tensor) -> int:
    return 0 if mask.is_inference() else mask._version


def _beside(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a mask of the first axes with axes of one element for the others of `x`."""
    return mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))


class SelectedRows(PackedPart):
    """Stands for x[mask], f[count, *rest]: `whole` f[*mask.shape, *rest] and the mask."""

    part = "what a mask selects, x[mask]"
    whole: torch.Tensor
    mask: torch.Tensor
    source: torch.Tensor
    version: int

    @classmethod
    def of(cls, whole: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> SelectedRows:
        """Return the stand-in of these values."""
        made: SelectedRows = cls.stand_in(cls, whole.dtype, whole.device)
        made.whole, made.mask, made.source = whole, mask, source
        made.version = _version(mask)
        return made

    def answer_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute what has a shape that the mask does not decide, or is selected by it, too."""
        if func in _KINDS:
            return func(self.whole)
        name = getattr(func, "__name__", "").strip("_")
        # PyTorch passes on options that were left out.
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        answer: Any = NotImplemented
        if func is _SET:
            answer = self._assigned(*args)
        elif name in _ELEMENTWISE:
            answer = self._elementwise(func, name, args, kwargs)
        elif func in _LOSSES:
            answer = self._loss(func, args, kwargs)
        elif func in (F.cross_entropy, F.nll_loss):
            answer = self._class_loss(func, args, kwargs)
        elif name in ("sum", "mean") and len(args) == 1 and not kwargs:
            answer = self._sum() if name == "sum" else self._mean()
        return self._refused() if answer is NotImplemented else answer

    def _refused(self) -> Any:
        """Call PyTorch's own op, which is refused with the place and what to do."""
        with torch._C.DisableTorchFunction():
            return self.source[self.mask]

    def _elementwise(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        rest = self.whole.ndim - self.mask.ndim
        operands = []
        for one in args:
            if isinstance(one, SelectedRows):
                # Of another rank, axes would meet others than they do in PyTorch.
                if not self._is_alike(one) or one.whole.ndim != self.whole.ndim:
                    return NotImplemented
                one = one.whole
            elif isinstance(one, torch.Tensor):
                if one.ndim > rest:
                    return NotImplemented
                if one.requires_grad:
                    one = torch.where(_beside(self.mask, self.whole), one, one.detach())
            operands.append(one)
        is_in_place = name in _IN_PLACE or (name + "_" == func.__name__)
        if any(isinstance(one, torch.Tensor) for one in kwargs.values()) or (
            is_in_place and args[0] is not self
        ):
            return NotImplemented
        out = func(*operands, **kwargs)
        return self if is_in_place else SelectedRows.of(out, self.mask, self.source)

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if len(args) != 2 or not _OLD_OPTIONS.isdisjoint(kwargs):
            return NotImplemented
        options = dict(kwargs)
        reduction = options.pop("reduction", "mean")
        each = self._elementwise(func, "", args, {**options, "reduction": "none"})
        if each is NotImplemented or reduction == "none":
            return each
        return each._sum() if reduction == "sum" else each._mean()

    def _class_loss(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute the loss of all rows, of which those that are not selected are ignored."""
        if len(args) != 2 or not all(isinstance(one, SelectedRows) for one in args):
            return NotImplemented
        logits, labels = args
        axes = self.mask.ndim
        if (
            not logits._is_alike(labels)
            or (logits.whole.ndim, labels.whole.ndim) != (axes + 1, axes)
            or labels.whole.dtype != torch.int64
            or not _OLD_OPTIONS.isdisjoint(kwargs)
        ):
            return NotImplemented
        ignored = torch.full((), kwargs.get("ignore_index", -100))
        of_rows = torch.where(self.mask, labels.whole, ignored).flatten()
        loss = func(logits.whole.flatten(0, axes - 1), of_rows, **kwargs)
        if kwargs.get("reduction") != "none":
            return loss
        return SelectedRows.of(loss.unflatten(0, self.mask.shape), self.mask, loss)

    def _sum(self, **options: Any) -> torch.Tensor:
        zero = torch.zeros((), dtype=self.whole.dtype)
        return torch.where(_beside(self.mask, self.whole), self.whole, zero).sum(**options)

    def _mean(self) -> Any:
        if not self.whole.is_floating_point():
            return NotImplemented
        dtype = torch.promote_types(self.whole.dtype, torch.float32)
        count = self.mask.sum() * math.prod(self.whole.shape[self.mask.ndim :])
        return (self._sum(dtype=dtype) / count).to(self.whole.dtype)

    def _assigned(self, x: Any, index: Any, value: Any) -> Any:
        mask = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        if value is not self or isinstance(x, SelectedRows) or not _is_mask(mask):
            return NotImplemented
        other = SelectedRows.of(x, mask, x)
        if not self._is_alike(other) or x.ndim != self.whole.ndim:
            return NotImplemented
        if x.dtype != self.whole.dtype:
            names = (str(one).removeprefix("torch.") for one in (self.whole.dtype, x.dtype))
            raise UnsupportedCall(
                f"assigns {' to '.join(names)} by a mask, which PyTorch refuses too",
                f"Cast it: b[mask].to({x.dtype})",
            )
        x.copy_(torch.where(_beside(mask, x), self.whole, x))
        return None

    def _is_alike(self, other: SelectedRows) -> bool:
        """Return whether both are selected by one mask, unchanged."""
        if self.mask is other.mask:
            return self.version == other.version == _version(self.mask)
        first, second = _node_of(self.mask), _node_of(other.mask)
        if first is None or second is None or self.mask.shape != other.mask.shape:
            return False
        return _are_alike(first, second, depth=8) and _nothing_is_written(first, second)


def _node_of(tensor: torch.Tensor) -> torch.fx.Node | None:
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _are_alike(first: Any, second: Any, depth: int) -> bool:
    """Return whether two nodes compute the same of the same."""
    if not (isinstance(first, torch.fx.Node) and isinstance(second, torch.fx.Node)):
        return type(first) is type(second) and bool(first == second)
    if first is second:
        return True
    if depth == 0 or first.target is not second.target or first.op != "call_function":
        return False
    schema, tags = getattr(first.target, "_schema", None), getattr(first.target, "tags", ())
    if schema is None or schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        return False
    return (
        first.kwargs == second.kwargs
        and len(first.args) == len(second.args)
        and all(
            _are_alike(one, other, depth - 1)
            for one, other in zip(first.args, second.args, strict=True)
        )
    )


def _nothing_is_written(first: torch.fx.Node, second: torch.fx.Node) -> bool:
    """Return whether no op between two nodes writes to what the first one is computed from."""
    if second < first:
        first, second = second, first
    read, rest = set(), [first]
    while rest:
        one = rest.pop()
        if _root(one) not in read:
            read.add(_root(one))
            rest += one.all_input_nodes
    node = first
    while node is not second:
        if any(_root(one) in read for one in _written(node)):
            return False
        node = node.next
    return True


def _written(node: torch.fx.Node) -> list[torch.fx.Node]:
    schema = getattr(node.target, "_schema", None)
    return node.all_input_nodes if schema is not None and schema.is_mutable else []


def _root(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node that made the memory of a node's result: it may be a view, or written to."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.returns or schema.returns[0].alias_info is None:
            break
        (node, *_) = node.all_input_nodes
    return node
