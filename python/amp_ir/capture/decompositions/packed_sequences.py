# SPDX-License-Identifier: Apache-2.0
"""Packed sequences during a capture: padded rows beside their lengths, which stay data.

PyTorch packs the rows of all sequences one after the other, so that shapes depend on the lengths.
Here `pack_padded_sequence` keeps the padded tensor, recurrent layers run over all of its steps
(recurrent_layers.py), and `pad_packed_sequence` fills what is past the end of each sequence. The
tensors of the user's PackedSequence are stand-ins, which only PyTorch's own functions may read: all
else is an error. Sequences stay in the order in which they are given, sorted or not.

What PyTorch checks on the host is checked by the step: `amp_ir.checked_lengths`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_ir.capture.decompositions.checked_lengths import require_lengths
from amp_ir.capture.diagnostics import UnsupportedCall


class _Reversed(torch.autograd.Function):
    """Take each step from `places` int64[t, n, 1]; a second time gives the steps back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x.gather(0, places.expand_as(x))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        return grad.gather(0, places.expand_as(grad)), None


class Padding:
    """Which of t steps are past the end of each of n sequences; `lengths` is int64[n]."""

    def __init__(self, steps: int, lengths: torch.Tensor, device: torch.device) -> None:
        self._lengths = lengths.to(device)
        self._step = torch.arange(steps, device=device).unsqueeze(1)
        self._last = steps - 1

    @functools.cached_property
    def _is_past(self) -> torch.Tensor:
        return self._step >= self._lengths

    @functools.cached_property
    def _places(self) -> torch.Tensor:
        places = torch.where(self._is_past, self._step, self._lengths - 1 - self._step)
        # Lengths are checked by `checked_lengths`; within these bounds the gather needs no check.
        return places.clamp(0, self._last).unsqueeze(-1)

    def is_past(self, x: torch.Tensor) -> torch.Tensor:
        """Return a mask that broadcasts over x [t, n, ...]."""
        return self._is_past.reshape(*self._is_past.shape, *[1] * (x.dim() - 2))

    def reversed(self, x: torch.Tensor) -> torch.Tensor:
        """Reverse x f[t, n, ...] within the length of each sequence."""
        result: torch.Tensor = _Reversed.apply(x, self._places)
        return result

    def at_end(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last step of each sequence: f[t, n, h] -> f[n, h]."""
        is_last = (self._step == self._lengths - 1).unsqueeze(-1)
        # A sum of one number and zeros.
        return torch.where(is_last, x, 0.0).sum(0)


_TENSOR: Any = torch.Tensor
_DTYPE, _DEVICE = _TENSOR.dtype.__get__, _TENSOR.device.__get__
_ADVICE = (
    "Give it to recurrent layers and pad_packed_sequence alone; compute on what that returns, with "
    "total_length= and a mask of the lengths"
)


class PackedPart(torch.Tensor):
    """One tensor of a PackedSequence, as far as PyTorch's own functions read it."""

    part = ""

    @staticmethod
    def stand_in(cls: type[PackedPart], dtype: torch.dtype, device: Any) -> Any:
        """Return one without elements."""
        return torch.Tensor._make_wrapper_subclass(cls, (0,), dtype=dtype, device=device)

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the trace that a part which a mask or a place selects is of."""
        return ()

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return what `func(*args)` is; NotImplemented where that depends on the lengths."""
        return NotImplemented

    def answer_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a call is, whose options no answer depends on."""
        return self.answer(func, args)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer for PyTorch's own functions and refuse all others."""
        (part, *_) = (one for one in tree_leaves((args, kwargs)) if isinstance(one, PackedPart))
        result = part.answer_call(func, args, kwargs or {})
        if result is NotImplemented:
            raise UnsupportedCall(
                f"{getattr(func, '__name__', func)} reads {part.part} of a PackedSequence, whose "
                "elements and shape depend on the lengths",
                _ADVICE,
            )
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse what comes here past the answers above."""
        return cls.__torch_function__(func, types, args, kwargs)


class PackedRows(PackedPart):
    """Stands for `data`: padded rows [t, n, ...], and the lengths int64[n] of the user."""

    part = "data"
    rows: torch.Tensor
    lengths: torch.Tensor
    padding: Padding

    @classmethod
    def of(cls, rows: torch.Tensor, lengths: torch.Tensor, padding: Padding) -> PackedRows:
        """Return the stand-in of these rows."""
        made: PackedRows = cls.stand_in(cls, rows.dtype, rows.device)
        made.rows, made.lengths, made.padding = rows, lengths, padding
        return made

    def with_rows(self, rows: torch.Tensor) -> PackedRows:
        """Return other rows of the same lengths."""
        return PackedRows.of(rows, self.lengths, self.padding)

    def past_end_is_0(self) -> torch.Tensor:
        """Return the rows with 0 instead of the padding, which may hold anything, even NaN."""
        return self.rows.masked_fill(self.padding.is_past(self.rows), 0.0)

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Answer for what a recurrent layer asks of its input."""
        if func in (_DTYPE, _DEVICE):
            return func(self.rows)
        if func == torch.Tensor.dim:
            return self.rows.dim() - 1
        if func == torch.Tensor.size and args[1:] == (-1,):
            return self.rows.shape[-1]
        return NotImplemented


class _LongestLength:
    """The number of steps of the longest sequence, which only a running step knows.

    PyTorch asks whether it is larger than `total_length`; the step checks that (`pad`).
    """

    def __gt__(self, other: object) -> bool:
        return False


class _BatchSizes(PackedPart):
    """Stands for `batch_sizes`: at the first step all of the n sequences are there."""

    part = "batch_sizes"
    count: int

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Answer for what recurrent layers and pad_packed_sequence ask."""
        if func == _DEVICE:
            return torch.device("cpu")
        if func == torch.Tensor.__getitem__ and args[1:] == (0,):
            return self.count
        if func == torch.Tensor.size and args[1:] == (0,):
            return _LongestLength()
        return NotImplemented


class _Order(PackedPart):
    """Stands for `sorted_indices` and its inverse: sequences stay as they are given."""

    part = "sorted_indices"

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Answer for what puts sequences in an order and back."""
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            return self
        if func in (torch.Tensor.index_select, torch.Tensor.__getitem__) and args[-1] is self:
            return args[0]
        return NotImplemented


def invert_permutation(permutation: Any) -> Any:
    """Return the inverse of an order; for what is not a stand-in, by PyTorch's own function."""
    return permutation if isinstance(permutation, _Order) else _invert_permutation(permutation)


_invert_permutation = torch.nn.utils.rnn.invert_permutation


class PackingFunctions:
    """What torch.nn.utils.rnn calls to pack and to pad, instead of `torch` and `torch._VF`."""

    def __init__(self) -> None:
        self._in_any_order: torch.Tensor | None = None

    def sort(self, lengths: torch.Tensor, *, descending: bool) -> tuple[torch.Tensor, _Order]:
        """Leave the lengths in their order (enforce_sorted=False)."""
        assert descending, "pack_padded_sequence puts the longest sequence first"
        self._in_any_order = lengths
        return lengths, PackedPart.stand_in(_Order, torch.int64, lengths.device)

    def pack(
        self, padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool  # noqa: FBT001
    ) -> tuple[PackedRows, _BatchSizes]:  # fmt: skip
        """Pack padded [t, n, ...], or [n, t, ...]."""
        rows = padded.transpose(0, 1) if batch_first else padded
        steps, count = rows.shape[:2]
        if lengths.device.type != "cpu" or lengths.shape != (count,):
            raise RuntimeError(
                f"'lengths' argument should be a 1D CPU int64 tensor with one number for each of "
                f"{count} sequences, but got shape {tuple(lengths.shape)} on {lengths.device}"
            )
        checked = require_lengths(
            lengths, lengths, 1, steps,
            f"pack_padded_sequence takes lengths from 1 to {steps}, the steps of its input",
        )  # fmt: skip
        if lengths is not self._in_any_order and count > 1:
            checked = require_lengths(
                checked, lengths[:-1] - lengths[1:], 0, steps,
                "pack_padded_sequence takes lengths in decreasing order, or enforce_sorted=False: "
                "a length less the next one must be 0 or more",
            )  # fmt: skip
        self._in_any_order = None
        sizes: _BatchSizes = PackedPart.stand_in(_BatchSizes, torch.int64, "cpu")
        sizes.count = count
        return PackedRows.of(rows, checked, Padding(steps, checked, rows.device)), sizes


def pad(
    data: PackedRows,
    _batch_sizes: _BatchSizes,
    batch_first: bool,  # noqa: FBT001 - ATen's own signature
    padding_value: float,
    total_length: int | _LongestLength,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows, [t, n, ...] or [n, t, ...], and the lengths int64[n]."""
    rows, lengths = data.rows, data.lengths
    steps = rows.shape[0]
    if isinstance(total_length, _LongestLength):
        lengths = require_lengths(
            lengths, lengths.max(), steps, steps,
            "pad_packed_sequence makes as many steps as the longest sequence has, and a compiled "
            f"step has fixed shapes: pass total_length={steps}, or lengths of which the largest "
            f"is {steps}",
        )  # fmt: skip
    elif total_length < steps:
        lengths = require_lengths(
            lengths, lengths, 1, total_length,
            f"pad_packed_sequence takes lengths up to its total_length, {total_length}",
        )  # fmt: skip
        rows, steps = rows[:total_length], total_length
    is_past = Padding(steps, lengths, rows.device).is_past(rows)
    rows = rows.masked_fill(is_past, padding_value)
    if not isinstance(total_length, _LongestLength) and total_length > steps:
        more = rows.new_full((total_length - steps, *rows.shape[1:]), padding_value)
        rows = torch.cat([rows, more])
    return rows.transpose(0, 1) if batch_first else rows, lengths


class Forwarding:
    """A module whose functions are others for one thread."""

    def __init__(self, module: Any, functions: dict[str, Callable[..., Any]]) -> None:
        self._module = module
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
