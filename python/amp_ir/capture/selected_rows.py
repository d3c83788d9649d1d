# SPDX-License-Identifier: Apache-2.0
"""`x[mask]` of a mask that the data decides, as far as its uses have a shape that does not.

`a[m] = 2 * b[m]` is a choice between the elements of two tensors, and `loss[m].mean()` a quotient
of sums. What a mask selects is kept as the whole tensor and the mask: arithmetic is done on all
elements, and what leaves chooses the selected ones, so that no others have a gradient, NaN or not.
Layers compute each row by itself, those that are not selected of ones (row_calls.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from amp_ir.capture.decompositions.ctc import ctc_loss, padded_targets
from amp_ir.capture.decompositions.packed_sequences import PackedPart
from amp_ir.capture.diagnostics import UnsupportedCall
from amp_ir.capture.row_calls import ELEMENTWISE, call_by_row, inner_axis, inner_index, is_filled
from amp_ir.capture.selections import Selection

_GET = torch.Tensor.__getitem__
_READS = frozenset({"__bool__", "__int__", "__float__", "__complex__", "__index__", "__len__"})
_IN_PLACE = frozenset("iadd isub imul itruediv ipow".split())
_LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip
_TENSOR: Any = torch.Tensor
_KINDS = tuple(
    getattr(_TENSOR, name).__get__ for name in ("dtype", "device", "requires_grad", "is_cuda")
)
_SHAPE, _NDIM = _TENSOR.shape.__get__, _TENSOR.ndim.__get__
_OLD_OPTIONS = frozenset({"reduce", "size_average"})
# In the place of what is not selected: few functions, and derivatives, are infinite or NaN there.
_FILLER = 1
_ADVICE = (
    "What computes each row, or element, by itself works: arithmetic, activations, Linear, "
    "LayerNorm, dropout, softmax along a row; so do assigning by the same mask, sums, means and "
    "losses. For all else compute on all rows, and choose by torch.where(mask, a, b)"
)
_LOOP_ADVICE = (
    "Loop over all, for e in range(n): a selection of no rows changes nothing, and what is "
    "computed of it has gradients of 0"
)
_COUNT_ADVICE = (
    "The number is mask.sum(), a tensor. A selection of no rows needs no if: without it, what is "
    "computed of no rows has gradients of 0"
)


class SelectedRows(PackedPart):
    """Stands for x[mask], f[count, *rest]: `whole` f[*extents, *rest] and the selection.

    An extent is that of the mask, or 1 where all along this axis of the mask are equal.
    """

    part = "what a mask selects, x[mask]"
    whole: torch.Tensor
    selection: Selection

    @classmethod
    def of(cls, whole: torch.Tensor, selection: Selection) -> SelectedRows:
        """Return the stand-in of these values."""
        made: SelectedRows = cls.stand_in(cls, whole.dtype, whole.device)
        made.whole, made.selection = whole, selection
        return made

    @classmethod
    def taken(cls, x: torch.Tensor, selection: Selection) -> SelectedRows:
        """Return what is selected of x f[*extents, *rest], a copy."""
        return cls.of(_filled(x, selection, _FILLER), selection)

    @property
    def rest(self) -> int:
        """Return the number of axes of a row."""
        return self.whole.ndim - self.selection.ndim

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the elements and the mask."""
        return self.whole, self.selection.kept

    def expanded(self) -> torch.Tensor:
        """Return the elements f[*mask.shape, *rest]."""
        return self.whole.expand(*self.selection.shape, *self.whole.shape[self.selection.ndim :])

    def answer_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute what has a shape that the mask does not decide, or is selected by it, too."""
        # PyTorch passes on options that were left out.
        options = {key: value for key, value in kwargs.items() if value is not None}
        answer = self._kind(func, args)
        if answer is NotImplemented and func.__name__ not in _READS:
            answer = self._computed(func, func.__name__.strip("_"), args, options)
        return refuse_rows(func) if answer is NotImplemented else answer

    def _kind(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Answer for what is known of the tensor without its count."""
        if func in _KINDS:
            return func(self.whole)
        if func in (_TENSOR.dim, _NDIM):
            return 1 + self.rest
        if func == _SHAPE:
            return _Shape(self)
        if func is _TENSOR.size and len(args) == 2:
            return self.extent(args[1])
        return NotImplemented

    def extent(self, axis: Any) -> Any:
        """Return an extent of a row; that of the count is refused."""
        inner = inner_axis(axis, self.rest)
        return refuse_rows(_TENSOR.size) if inner is None else self.whole.shape[inner]

    def _computed(
        self, func: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        if name in ELEMENTWISE:
            return self._elementwise(func, name, args, options)
        if func in _LOSSES:
            return self._loss(func, args, options)
        if func in (F.cross_entropy, F.nll_loss):
            return self._class_loss(func, args, options)
        if func is F.ctc_loss:
            return self._ctc_loss(*args, **options)
        if name == "cat":
            return self._joined(*args, **options)
        if not args or args[0] is not self or any(map(_is_part, (*args[1:], *options.values()))):
            return NotImplemented
        if name in ("sum", "mean") and (len(args) == 1 or args[1:] == (0,)):
            return self._over_rows(name, args, options)
        if name in ("dropout", "native_dropout"):
            return self._dropped(func, args, options)
        if func is _GET:
            index = inner_index(args[1], self.rest, self.selection.ndim)
            return NotImplemented if index is None else self._with(self.whole[index])
        return self._by_row(func, name, args[1:], options)

    def _with(self, whole: torch.Tensor) -> SelectedRows:
        return SelectedRows.of(whole, self.selection)

    def _by_row(self, func: Any, name: str, others: tuple[Any, ...], options: Any) -> Any:
        x = self.whole
        if is_filled(name):
            x = _filled(x, self.selection, _FILLER if x.is_floating_point() else 0)
        out = call_by_row(func, name, self.rest, (x, *others), options)
        if out is NotImplemented:
            return out
        if is_filled(name):
            out = _filled(out, self.selection, _FILLER)
        if not isinstance(out, tuple | list):
            return self._with(out)
        return type(out)([self._with(one) for one in out])

    def _elementwise(
        self, func: Any, name: str, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        of_rows = [one for one in args if isinstance(one, SelectedRows)]
        # Of another rank, axes would meet others than they do in PyTorch.
        if any(
            not self.selection.is_alike(one.selection) or one.rest != self.rest for one in of_rows
        ):
            return NotImplemented
        shape = torch.broadcast_shapes(*(one.whole.shape for one in of_rows))
        is_in_place = name in _IN_PLACE or (name + "_" == func.__name__)
        if any(isinstance(one, torch.Tensor) for one in options.values()) or (
            is_in_place and (args[0] is not self or shape != self.whole.shape)
        ):
            return NotImplemented
        operands = []
        for one in args:
            if isinstance(one, SelectedRows):
                one = one.whole
            elif isinstance(one, torch.Tensor):
                if one.ndim > self.rest:
                    return NotImplemented
                if one.requires_grad:
                    # Its gradient adds up what flows into selected elements.
                    one = torch.where(self.selection.over(shape), one, one.detach())
            operands.append(one)
        out = func(*operands, **options)
        return self if is_in_place else self._with(out)

    def _loss(self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        if len(args) != 2 or not _OLD_OPTIONS.isdisjoint(options):
            return NotImplemented
        # Some losses refuse values, which those that are not selected may have by now.
        args = tuple(
            SelectedRows.taken(one.whole, one.selection) if isinstance(one, SelectedRows) else one
            for one in args
        )
        reduction = options.get("reduction", "mean")
        each = self._elementwise(func, "", args, {**options, "reduction": "none"})
        if each is NotImplemented or reduction == "none":
            return each
        return each._sum() if reduction == "sum" else each._mean()

    def _class_loss(self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Compute the loss of all rows, of which those that are not selected are ignored."""
        if len(args) != 2 or not all(isinstance(one, SelectedRows) for one in args):
            return NotImplemented
        logits, labels = args
        if (
            not logits.selection.is_alike(labels.selection)
            or (logits.rest, labels.rest) != (1, 0)
            or labels.whole.dtype != torch.int64
            or not _OLD_OPTIONS.isdisjoint(options)
        ):
            return NotImplemented
        shape, kept = self.selection.shape, self.selection.kept
        number = options.get("ignore_index", -100)
        ignored = torch.full((), number, device=labels.whole.device)
        of_rows = torch.where(kept, labels.whole, ignored).flatten()
        loss = func(logits.expanded().flatten(0, len(shape) - 1), of_rows, **options)
        if options.get("reduction") != "none":
            return loss
        return self._with(loss.unflatten(0, shape))

    def _ctc_loss(
        self, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Compute the loss of targets that are selected one after the other."""
        others = (log_probs, input_lengths, target_lengths)
        if targets is not self or self.rest or any(map(_is_part, others)):
            return NotImplemented
        rows = padded_targets(self.expanded(), self.selection.kept, target_lengths)
        return ctc_loss(log_probs, rows, input_lengths, target_lengths, *rest, **options)

    def _joined(self, parts: Any, dim: Any = 0) -> Any:
        """Join rows along one of their own axes."""
        axis = inner_axis(dim, self.rest)
        if axis is None or any(
            not isinstance(one, SelectedRows)
            or not self.selection.is_alike(one.selection)
            or one.rest != self.rest
            for one in parts
        ):
            return NotImplemented
        return self._with(torch.cat([one.expanded() for one in parts], axis))

    def _dropped(self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Drop elements of each selected row by numbers of its own."""
        if self.whole.shape == self.expanded().shape:
            x = self.whole
        elif options.get("inplace") or args[3:] == (True,):
            return NotImplemented
        else:
            x = self.expanded()
        out = func(x, *args[1:], **options)
        return (self._with(out[0]), None) if isinstance(out, tuple) else self._with(out)

    def _over_rows(self, name: str, args: tuple[Any, ...], options: Any) -> Any:
        """Add up all elements, or those of all rows."""
        if len(args) == 1 and not options:
            return self._sum() if name == "sum" else self._mean()
        given = {**options, **({"dim": args[1]} if len(args) > 1 else {})}
        if type(given.get("dim")) is not int or given["dim"] != 0 or len(given) > 1:
            return self._by_row(getattr(torch, name), name, args[1:], options)
        axes = tuple(range(self.selection.ndim))
        return self._sum(dim=axes) if name == "sum" else self._mean(dim=axes)

    def _sum(self, **options: Any) -> torch.Tensor:
        whole = self.expanded()
        zero = torch.zeros((), dtype=whole.dtype, device=whole.device)
        return torch.where(self.selection.over(whole.shape), whole, zero).sum(**options)

    def _mean(self, **options: Any) -> Any:
        if not self.whole.is_floating_point():
            return NotImplemented
        dtype = torch.promote_types(self.whole.dtype, torch.float32)
        of_each = 1 if options else math.prod(self.whole.shape[self.selection.ndim :])
        count = self.selection.kept.sum() * of_each
        return (self._sum(dtype=dtype, **options) / count).to(self.whole.dtype)


class _Shape:
    """The shape [count, *rest]: extents of rows are numbers."""

    def __init__(self, rows: SelectedRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return 1 + self._rows.rest

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return torch.Size([self[one] for one in range(len(self))[at]])
        return self._rows.extent(at)

    def __iter__(self) -> Any:
        return refuse_rows(_TENSOR.size)


def refuse_rows(func: Any) -> Any:
    """Refuse a call that reads what a mask selects."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = func.__self__.__name__
    counts = dict.fromkeys(("size", "numel", "nelement", "shape", "__len__"), _COUNT_ADVICE)
    advice = {**counts, "unbind": _LOOP_ADVICE}.get(name, _ADVICE)
    raise UnsupportedCall(
        f"calls {name} on what a mask selects, x[mask], whose number of rows the data decide",
        f"A compiled step has fixed shapes. {advice}",
    )


def _filled(x: torch.Tensor, selection: Selection, filler: int) -> torch.Tensor:
    """Return x with a number in the place of what is not selected, which has no gradient then."""
    number = torch.full((), filler, dtype=x.dtype, device=x.device)
    return torch.where(selection.over(x.shape), x, number)


def _is_part(value: object) -> bool:
    return isinstance(value, PackedPart)
