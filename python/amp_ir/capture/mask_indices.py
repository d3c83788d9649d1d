# SPDX-License-Identifier: Apache-2.0
"""Indices by a mask that the data decides, and by the places that it selects.

`i = (choice == e).nonzero()[:, 0]` stands for the mask: `x[i]` is x[mask], and `x.index_add_(0, i,
y)` adds rows of y where the mask is set. Of a mask of several axes, as in `k, i =
torch.where(mask)`, x[i] takes one row of x for all places along the other axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.decompositions.packed_sequences import PackedPart
from amp_ir.capture.diagnostics import UnsupportedCall
from amp_ir.capture.selected_places import AllPlaces, Places, UnderOne
from amp_ir.capture.selected_rows import SelectedRows, refuse_rows
from amp_ir.capture.selections import Selection, decides_later

_TENSOR: Any = torch.Tensor
# Above it, rows of one place are added up at once, and not one after the other as in PyTorch.
_MOST_ADDED = 16
_OPTIONS = frozenset({"as_tuple", "dim", "index", "source", "alpha", "mask"})


@attrs.frozen(eq=False)
class _Found:
    """What an index takes: a view f[*extents, *rest] of x, and which of it."""

    view: torch.Tensor
    selection: Selection
    is_under_one: bool
    # Whether the index has a place along each axis of the mask, so that none is taken twice.
    is_whole: bool


def select_by_mask(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Make a call of an index, or of what makes one; NotImplemented where no mask decides it."""
    made = _CALLS.get(func)
    if made is None or not args or not _OPTIONS.issuperset(kwargs):
        return NotImplemented
    return made(*args, **kwargs)


def _places(x: Any, *, as_tuple: bool = False) -> Any:
    if not decides_later(x):
        return NotImplemented
    found = AllPlaces.of(Selection.of(x))
    return found.columns() if as_tuple else found


def _where(*args: Any, **kwargs: Any) -> Any:
    return _places(*args, as_tuple=True) if len(args) == 1 and not kwargs else NotImplemented


def _get(x: Any, index: Any) -> Any:
    if isinstance(x, PackedPart):
        return NotImplemented
    if type(index) is SelectedRows:
        return _looked_up(x, index)
    found = _found(x, index)
    if found is None:
        return NotImplemented
    rows = SelectedRows.taken(found.view, found.selection)
    return UnderOne.of(rows) if found.is_under_one else rows


def _looked_up(table: torch.Tensor, ids: SelectedRows) -> Any:
    """Return rows of a table at selected numbers."""
    if ids.whole.dtype is not torch.int64 or not table.shape[:1].numel():
        return NotImplemented
    zero = torch.zeros((), dtype=torch.int64, device=ids.whole.device)
    at = torch.where(ids.selection.over(ids.whole.shape), ids.whole, zero)
    return SelectedRows.taken(table[at], ids.selection)


def _set(x: Any, index: Any, value: Any) -> Any:
    is_rows, is_tensor = isinstance(value, SelectedRows), isinstance(value, torch.Tensor)
    # PyTorch's op assigns by a mask what is not selected, too; its gradient selects.
    if isinstance(x, PackedPart) or (_holds_mask(index) and not is_rows and not _has_slope(value)):
        return NotImplemented
    found = _found(x, index)
    if found is None:
        return NotImplemented
    view, selection = found.view, found.selection
    rest = view.ndim - selection.ndim
    is_fitting = is_tensor or type(value) in (int, float, bool)
    if is_rows:
        is_fitting = selection.is_alike(value.selection) and value.rest == rest
        value = value.whole
    elif is_tensor:
        while value.ndim > rest and value.shape[0] == 1:
            value = value[0]
        is_fitting = value.ndim <= rest
    if not is_fitting or found.is_under_one or not found.is_whole:
        return refuse_rows(_TENSOR.__setitem__)
    if not is_tensor:
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    _check_dtype(x, value, "assigns {} to {} by a mask", "b[mask]")
    view.copy_(torch.where(selection.over(view.shape), value, view))
    return None


def _has_slope(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()


def _add_at(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    """Add selected rows to those of x at their places."""
    if type(index) is not Places or isinstance(x, PackedPart):
        return NotImplemented
    selection, axis = index.selection, index.axis
    if (
        not isinstance(source, SelectedRows)
        or not selection.is_alike(source.selection)
        or dim not in (0, -x.ndim)
        or type(alpha) is not int
        or alpha != 1
        or (selection.shape[axis], *source.whole.shape[selection.ndim :]) != tuple(x.shape)
    ):
        return refuse_rows(_TENSOR.index_add_)
    _check_dtype(x, source.whole, "adds {} to {} by index_add_", "source")
    x.copy_(_added(x, source.expanded(), selection, axis))
    return x


def _added(x: torch.Tensor, whole: torch.Tensor, selection: Selection, axis: int) -> torch.Tensor:
    """Return x f[n, *rest] with what is selected of f[*mask.shape, *rest] added to its rows."""
    others = [one for one in range(selection.ndim) if one != axis]
    mask = selection.over(whole.shape)
    if not others:
        return torch.where(mask, x + whole, x)
    if selection.shape.numel() // selection.shape[axis] > _MOST_ADDED:
        zero = torch.zeros((), dtype=whole.dtype, device=whole.device)
        return torch.where(mask.any(others), x + torch.where(mask, whole, zero).sum(others), x)
    rows, masks = (one.movedim(axis, 0).flatten(1, len(others)).unbind(1) for one in (whole, mask))
    # One after the other, as in PyTorch, which rounds each sum.
    for row, is_selected in zip(rows, masks, strict=True):
        x = torch.where(is_selected, x + row, x)
    return x


def _out_of_place(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Add to a copy."""
    if isinstance(x, PackedPart) or not any(
        type(one) is Places for one in (*args, *kwargs.values())
    ):
        return NotImplemented
    return _add_at(x.clone(), *args, **kwargs)


def _masked_select(x: Any, mask: Any) -> Any:
    if isinstance(x, PackedPart) or not decides_later(mask) or mask.dtype is not torch.bool:
        return NotImplemented
    if x.shape == mask.shape:
        return _get(x, mask)
    return _get(*torch.broadcast_tensors(x, mask))


def _taken_at(x: Any, dim: int, index: Any) -> Any:
    is_first = type(index) is Places and not isinstance(x, PackedPart) and dim in (0, -x.ndim)
    return _get(x, index) if is_first else NotImplemented


def _put_at(x: Any, dim: int, index: Any, source: Any) -> Any:
    """Copy selected rows to their places."""
    if type(index) is not Places or isinstance(x, PackedPart):
        return NotImplemented
    is_of_rows = isinstance(source, SelectedRows) and dim in (0, -x.ndim)
    if not is_of_rows or source.whole.shape[source.selection.ndim :] != x.shape[1:]:
        return refuse_rows(_TENSOR.index_copy_)
    _set(x, index, source)
    return x


_CALLS: Mapping[Any, Callable[..., Any]] = {
    _TENSOR.__getitem__: _get,
    _TENSOR.__setitem__: _set,
    torch.where: _where,
    **dict.fromkeys((torch.nonzero, _TENSOR.nonzero, torch.argwhere, _TENSOR.argwhere), _places),
    **dict.fromkeys((torch.masked_select, _TENSOR.masked_select), _masked_select),
    _TENSOR.index_add_: _add_at,
    **dict.fromkeys((torch.index_add, _TENSOR.index_add), _out_of_place),
    **dict.fromkeys((torch.index_select, _TENSOR.index_select), _taken_at),
    _TENSOR.index_copy_: _put_at,
}


def _found(x: torch.Tensor, index: Any) -> _Found | None:
    """Return what an index with a mask, or with places, takes; None where it has none.

    None, too, where it takes what has no stand-in.
    """
    parts = index if isinstance(index, tuple) else (index,)
    at = [place for place, one in enumerate(parts) if isinstance(one, torch.Tensor)]
    if not at or at != list(range(at[0], at[-1] + 1)):
        return None
    before, after = parts[: at[0]], parts[at[-1] + 1 :]
    selected = _axes(parts[at[0] : at[-1] + 1])
    is_plain = all(one is None or type(one) is int for one in before) and all(
        one is None or one is Ellipsis or type(one) in (int, slice) for one in after
    )
    if selected is None or not is_plain or before.count(None) > 1:
        return None
    selection, axes = selected
    numbers = tuple(one for one in before if one is not None)
    if len(numbers) + len(axes) > x.ndim:
        return None
    view = x[(*numbers, *[slice(None)] * len(axes), *after)] if numbers or after else x
    if view.shape[: len(axes)] != tuple(selection.shape[axis] for axis in axes):
        return None
    if axes != sorted(axes):
        order = sorted(range(len(axes)), key=axes.__getitem__)
        view = view.permute(*order, *range(len(axes), view.ndim))
    for axis in range(selection.ndim):
        if axis not in axes:
            view = view.unsqueeze(axis)
    return _Found(view, selection, None in before, len(axes) == selection.ndim)


def _axes(indices: tuple[Any, ...]) -> tuple[Selection, list[int]] | None:
    """Return the selection by a mask or by places, and of which axes of the mask they are."""
    first = indices[0]
    if len(indices) == 1 and decides_later(first) and first.dtype is torch.bool:
        return Selection.of(first), list(range(first.ndim))
    axes = [one.axis for one in indices if type(one) is Places]
    is_distinct = len(axes) == len(indices) == len(set(axes))
    if not is_distinct or not all(first.selection.is_alike(one.selection) for one in indices):
        return None
    return first.selection, axes


def _holds_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(type(one) is FakeTensor for one in parts)


def _check_dtype(x: torch.Tensor, value: torch.Tensor, what: str, source: str) -> None:
    if x.dtype == value.dtype:
        return
    names = (str(one).removeprefix("torch.") for one in (value.dtype, x.dtype))
    raise UnsupportedCall(
        f"{what.format(*names)}, which PyTorch refuses too", f"Cast it: {source}.to({x.dtype})"
    )
