# SPDX-License-Identifier: Apache-2.0
"""`x[k]` where `k` is an integer tensor without axes, such as the position of a queue.

PyTorch reads the number and makes a view. A compiled step looks the row up, at each use.
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

    `viewed` is x with what stands beside k in the index; `axis` is that of k in it.
    """

    part = "x[k], where k is a tensor without axes,"
    viewed: torch.Tensor
    axis: int
    place: torch.Tensor

    @classmethod
    def of(cls, viewed: torch.Tensor, axis: int, place: torch.Tensor) -> ChosenRow:
        """Return the row at `place` int[], as that is now."""
        made: ChosenRow = cls.stand_in(cls, viewed.dtype, viewed.device)
        made.viewed, made.axis, made.place = viewed, axis, _copy(place)
        return made

    def read(self) -> torch.Tensor:
        """Return a copy of the elements that x has now."""
        return self.viewed[_index(self.axis, self.place)].squeeze(self.axis)

    def write(self, row: torch.Tensor) -> None:
        """Put elements into x."""
        self.viewed[_index(self.axis, self.place)] = row.unsqueeze(self.axis)

    def answer_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a call that reads rows in its arguments, or changes this one."""
        return call_with_rows(func, args, kwargs, lambda *given: given[0](*given[1], **given[2]))


def _copy(place: torch.Tensor) -> torch.Tensor:
    """Return the place as it is now: PyTorch reads the number, and the step may move k on."""
    return place.reshape(1).long().clone()


def _index(axis: int, place: torch.Tensor) -> Any:
    return (*[slice(None)] * axis, place)


_Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def call_with_rows(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: _Call) -> Any:
    """Make a call on copies of the rows among its arguments; one that it changes is written back.

    Raises:
        UnsupportedCall: it returns a view of a row, which would be one of the copy.
    """
    rows = [one for one in pytree.tree_leaves((args, kwargs)) if type(one) is ChosenRow]
    target = args[0] if args and args[0] is rows[0] else None
    if func is torch.Tensor.detach and target is not None:
        return ChosenRow.of(target.viewed.detach(), target.axis, target.place)
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
    return UnsupportedCall(
        f"{what} x[k], where k is a tensor without axes, which is a view that the number in k "
        "decides",
        f"Take a copy: x.index_select({row.axis}, k.reshape(1)).squeeze({row.axis})",
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
    viewed, axis, place = found
    value = args[2]
    if isinstance(value, torch.Tensor):
        shape = (*viewed.shape[:axis], *viewed.shape[axis + 1 :])
        while value.ndim > len(shape) and value.shape[0] == 1:
            value = value[0]
        value = value.expand(shape).unsqueeze(axis).to(viewed.dtype)
    viewed[_index(axis, _copy(place))] = value
    return True


def _found(args: tuple[Any, ...]) -> tuple[torch.Tensor, int, torch.Tensor] | None:
    """Return x without the index k, the axis of k, and k; None where no index is such a tensor."""
    x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    at = _place_of_tensor(index)
    if at is None:
        return None
    viewed = x[(*index[:at], slice(None), *index[at + 1 :])]
    return viewed, _axis(index, at, x.ndim), index[at]


def _place_of_tensor(index: tuple[Any, ...]) -> int | None:
    """Return where an index has its one tensor, whose number does not exist yet; else None."""
    places = [at for at, one in enumerate(index) if isinstance(one, FakeTensor)]
    rest = [one for one in index if not isinstance(one, FakeTensor)]
    is_plain = all(
        one is None or (isinstance(one, (int, slice, EllipsisType)) and not isinstance(one, bool))
        for one in rest
    )
    if len(places) != 1 or not is_plain:
        return None
    one = index[places[0]]
    if one.ndim or one.dtype not in _INTEGERS or constant_value(one) is not None:
        return None
    return places[0]


def _axis(index: tuple[Any, ...], at: int, ndim: int) -> int:
    """Return the axis of the result that a slice in the tensor's place would make."""
    taken = sum(1 for one in index if one is not None and one is not Ellipsis)
    return sum(
        ndim - taken if one is Ellipsis else 0 if isinstance(one, int) else 1 for one in index[:at]
    )
