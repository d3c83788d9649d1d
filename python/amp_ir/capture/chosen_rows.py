# SPDX-License-Identifier: Apache-2.0
"""`x[k]` where `k` is an integer tensor without axes, such as the position of a queue.

PyTorch reads the number and makes a view. A compiled step looks the row up, at each use. So it does
for several such tensors: `counts[label, guess] += 1`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.constant_values import constant_value
from amp_ir.capture.decompositions.packed_sequences import PackedPart
from amp_ir.capture.diagnostics import UnsupportedCall

_SET = torch.Tensor.__setitem__
_IN_PLACE = frozenset({
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
})  # fmt: skip
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


class ChosenRow(PackedPart):
    """Stands for x[k], in PyTorch a view: read where it is used, and written where it is changed.

    `viewed` is x with what stands beside k in the index; `axes` are those of such tensors in it.
    """

    part = "x[k], where k is a tensor without axes,"
    viewed: torch.Tensor
    axes: tuple[int, ...]
    places: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls, viewed: torch.Tensor, axes: tuple[int, ...], places: tuple[torch.Tensor, ...]
    ) -> ChosenRow:
        """Return the row at `places`, int[] for each axis, as they are now."""
        made: ChosenRow = cls.stand_in(cls, viewed.dtype, viewed.device)
        made.viewed, made.axes = viewed, axes
        made.places = tuple(one.reshape(1).long().clone() for one in places)
        return made

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return x."""
        return (self.viewed,)

    def read(self) -> torch.Tensor:
        """Return a copy of the elements that x has now."""
        view, index, axis = _indexed(self.viewed, self.axes, self.places)
        return view[index].squeeze(axis)

    def write(self, row: torch.Tensor) -> None:
        """Put elements into x."""
        view, index, axis = _indexed(self.viewed, self.axes, self.places)
        view[index] = row.unsqueeze(axis)

    def answer_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a call that reads rows in its arguments, or changes this one."""
        return call_with_rows(func, args, kwargs, lambda *given: given[0](*given[1], **given[2]))


def as_tensors(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a torch.autograd.Function, whose graph begins at real tensors.

    Rows are copies; other parts refuse the call, as all that they do not know.
    """
    for one in args:
        if isinstance(one, PackedPart) and type(one) is not ChosenRow:
            torch.overrides.handle_torch_function(function.forward, (one,), one)
    return tuple(one.read() if type(one) is ChosenRow else one for one in args)


def _indexed(
    viewed: torch.Tensor, axes: tuple[int, ...], places: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, Any, int]:
    """Return a view, its index that takes one element along the axes, and where that is."""
    if len(axes) == 1:
        return viewed, (*[slice(None)] * axes[0], *places), axes[0]
    return viewed.movedim(axes, tuple(range(len(axes)))), places, 0


_Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def call_with_rows(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: _Call) -> Any:
    """Make a call on copies of the rows among its arguments; one that it changes is written back.

    Raises:
        UnsupportedCall: it returns a view of a row, which would be one of the copy.
    """
    rows = [one for one in pytree.tree_leaves((args, kwargs)) if type(one) is ChosenRow]
    target = args[0] if args and args[0] is rows[0] else None
    if func is torch.Tensor.detach and target is not None:
        return ChosenRow.of(target.viewed.detach(), target.axes, target.places)
    name = getattr(func, "__name__", "")
    is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.startswith("__"))
    if name == "__set__" or (is_in_place and args and not isinstance(args[0], torch.Tensor)):
        raise _refusal("is given", rows[0])
    copies: list[torch.Tensor] = []

    def read(one: Any) -> Any:
        if not isinstance(one, ChosenRow):
            return one
        copies.append(one.read())
        return copies[-1]

    read_args, read_kwargs = pytree.tree_map(read, (args, dict(kwargs)))
    out = call(func, read_args, read_kwargs)
    if target is not None and is_in_place:
        target.write(read_args[0])
        return None if out is None else target
    memories = {one.untyped_storage()._cdata for one in copies}
    for one in pytree.tree_leaves(out):
        one = one.viewed if isinstance(one, ChosenRow) else one
        is_plain = isinstance(one, torch.Tensor) and not isinstance(one, PackedPart)
        if is_plain and one.untyped_storage()._cdata in memories:
            raise _refusal("views", rows[0])
    return out


def _refusal(what: str, row: ChosenRow) -> UnsupportedCall:
    axis = row.axes[0]
    copy = f"x.index_select({axis}, k.reshape(1)).squeeze({axis})"
    return UnsupportedCall(
        f"{what} x[k], where k is a tensor without axes, which is a view that the number in k "
        "decides",
        f"Take a copy: {copy if len(row.axes) == 1 else 'x[i, k].clone()'}",
    )


def chosen(args: tuple[Any, ...]) -> ChosenRow | None:
    """Return the row that x[k] reads by such an index; None where it does not."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    found = _found(args)
    return None if found is None else ChosenRow.of(*found)


def assigned(func: Any, args: tuple[Any, ...]) -> bool:
    """Assign where a call assigns by such an index, and return whether it does."""
    if func is not _SET or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    found = _found(args)
    if found is None:
        return False
    row = ChosenRow.of(*found)
    value = args[2]
    if isinstance(value, torch.Tensor):
        shape = [n for axis, n in enumerate(row.viewed.shape) if axis not in row.axes]
        while value.ndim > len(shape) and value.shape[0] == 1:
            value = value[0]
        row.write(value.expand(shape).to(row.viewed.dtype))
    else:
        view, index, _ = _indexed(row.viewed, row.axes, row.places)
        view[index] = value
    return True


_Chosen = tuple[torch.Tensor, tuple[int, ...], tuple[torch.Tensor, ...]]


def _found(args: tuple[Any, ...]) -> _Chosen | None:
    """Return x without such indices, their axes, and they; None where an index has none."""
    x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    places = _places_of_tensors(index)
    if not places:
        return None
    viewed = x[tuple(slice(None) if at in places else one for at, one in enumerate(index))]
    axes = tuple(_axis(index, at, x.ndim) for at in places)
    return viewed, axes, tuple(index[at] for at in places)


def _places_of_tensors(index: tuple[Any, ...]) -> list[int]:
    """Return where an index has tensors, if all are numbers and one does not exist yet; else []."""
    places = [at for at, one in enumerate(index) if isinstance(one, FakeTensor)]
    rest = [one for one in index if not isinstance(one, FakeTensor)]
    tensors = [index[at] for at in places]
    is_plain = all(
        one is None or (isinstance(one, (int, slice, EllipsisType)) and not isinstance(one, bool))
        for one in rest
    )
    if not is_plain or any(one.ndim or one.dtype not in _INTEGERS for one in tensors):
        return []
    return [] if all(constant_value(one) is not None for one in tensors) else places


def _axis(index: tuple[Any, ...], at: int, ndim: int) -> int:
    """Return the axis of the result that a slice in the tensor's place would make."""
    taken = sum(1 for one in index if one is not None and one is not Ellipsis)
    return sum(
        ndim - taken if one is Ellipsis else 0 if isinstance(one, int) else 1 for one in index[:at]
    )
