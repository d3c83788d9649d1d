# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of the places that a mask of the data selects, and of what they take beside None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from amp_ir.capture.decompositions.packed_sequences import PackedPart
from amp_ir.capture.diagnostics import UnsupportedCall
from amp_ir.capture.row_calls import ELEMENTWISE
from amp_ir.capture.selected_rows import SelectedRows, refuse_rows
from amp_ir.capture.selections import Selection

_TENSOR: Any = torch.Tensor
_KINDS = (_TENSOR.dtype.__get__, _TENSOR.device.__get__)


class Places(SelectedRows):
    """Stands for torch.where(mask)[axis], int64[count]."""

    part = "the places that a mask selects"
    axis: int

    @classmethod
    def along(cls, axis: int, selection: Selection) -> Places:
        """Return the places along one axis of the mask."""
        shape = [1] * selection.ndim
        shape[axis] = selection.shape[axis]
        made: Any = cls.of(
            torch.arange(shape[axis], device=selection.kept.device).view(shape), selection
        )
        made.axis = axis
        return made

    def answer_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Answer with numbers; nothing may change them, nor see a part of them."""
        name = func.__name__
        is_moved = name == "to" and args[0] is self and not kwargs
        if is_moved and all(isinstance(one, torch.device) for one in args[1:]):
            return self
        if args[0] is self and name in ("view", "reshape", "flatten", "ravel", "long", "detach"):
            if args[1:] in ((), (-1,), ((-1,),), ([-1],)):
                return self
        is_written = name in ("to", "contiguous") or (name.endswith("_") and name[:2] != "__")
        is_new = name.strip("_") in ELEMENTWISE - {"iadd", "isub", "imul", "itruediv", "ipow"}
        if func in _KINDS or name in ("sum", "dim", "size") or (is_new and not is_written):
            return super().answer_call(func, args, kwargs)
        return refuse_rows(func)


class AllPlaces(PackedPart):
    """Stands for mask.nonzero(), int64[count, axes]."""

    part = "the places that a mask selects"
    selection: Selection

    @classmethod
    def of(cls, selection: Selection) -> AllPlaces:
        """Return the stand-in of all places of a mask."""
        made: AllPlaces = cls.stand_in(cls, torch.int64, selection.kept.device)
        made.selection = selection
        return made

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the mask."""
        return (self.selection.kept,)

    def columns(self) -> tuple[Places, ...]:
        """Return the places along each axis."""
        return tuple(Places.along(one, self.selection) for one in range(self.selection.ndim))

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Answer for what takes a column."""
        if func in _KINDS:
            return func(self.selection.kept.long())
        if func is _TENSOR.dim:
            return 2
        name, given = func.__name__, args[1:]
        if name == "unbind" and given in ((1,), (-1,)):
            return self.columns()
        if name == "__getitem__" and isinstance(given[0], tuple) and len(given[0]) == 2:
            rows, column = given[0]
            if rows in (slice(None), Ellipsis) and type(column) is int:
                return self.columns()[column]
        if name == "squeeze" and not given:
            raise UnsupportedCall(
                "calls squeeze() on mask.nonzero(), which drops the axis of a single place, too",
                "Write mask.nonzero().squeeze(1), or torch.where(mask)",
            )
        is_column = (name == "squeeze" and given in ((1,), (-1,))) or (
            name in ("flatten", "ravel", "view", "reshape") and given in ((), (-1,), ((-1,),))
        )
        if is_column and self.selection.ndim == 1:
            return self.columns()[0]
        return refuse_rows(func)


class UnderOne(PackedPart):
    """Stands for x[None, places], f[1, count, *rest]."""

    part = "what a mask selects, x[None, places]"
    rows: SelectedRows

    @classmethod
    def of(cls, rows: SelectedRows) -> UnderOne:
        """Return the stand-in of rows below one more axis."""
        made: UnderOne = cls.stand_in(cls, rows.dtype, rows.device)
        made.rows = rows
        return made

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the elements and the mask."""
        return self.rows.held()

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Answer for what drops the first axis."""
        if func in _KINDS:
            return func(self.rows.whole)
        name, given = func.__name__, args[1:]
        if name in ("squeeze", "__getitem__") and given == (0,):
            return self.rows
        if name in ("view", "reshape"):
            return self.rows.answer_call(func, (self.rows, *given), {})
        return refuse_rows(func)
