# SPDX-License-Identifier: Apache-2.0
"""The types of tensors as the user's code sees them while a step is captured, as in PyTorch.

`HANDLERS[type(x)]`, `type(p) is torch.nn.Parameter`, `x.__class__` and what dispatches on those, as
`functools.singledispatch` does, have to find what they find in PyTorch, and every tensor of a
capture is of a type of its own. Code that names `type` gets another in its place, and a base class
answers `__class__`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.patches.restores import Restores
from amp_ir.capture.patches.thread_patches import ThisThread


def type_that_asks(kind_of: Callable[[Any], type]) -> Any:
    """Return what stands for Python's `type`: of one argument `kind_of` it, all else as that."""

    class OfType(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not made:
                return super().__call__(*args, **kwargs)
            if len(args) != 1 or kwargs:
                return type(*args, **kwargs)
            kind = kind_of(args[0])
            return made if kind is type or kind is OfType else kind

        def __instancecheck__(cls, instance: object) -> bool:
            return (
                isinstance(instance, type) if cls is made else super().__instancecheck__(instance)
            )

        def __subclasscheck__(cls, subclass: type) -> bool:
            return (
                issubclass(subclass, type) if cls is made else super().__subclasscheck__(subclass)
            )

        def __eq__(cls, other: object) -> bool:
            return other is cls or (cls is made and other is type)

        def __hash__(cls) -> int:
            return hash(type) if cls is made else super().__hash__()

        def __repr__(cls) -> str:
            return repr(type) if cls is made else super().__repr__()

    made: Any = OfType("type", (type,), {"__class_getitem__": classmethod(types.GenericAlias)})
    return made


def let_fakes_tell(restores: Restores, kind_of: Callable[[Any], type]) -> None:
    """Let `__class__` of a fake be `kind_of` it in this thread until `restores` run."""
    this_thread = ThisThread.marked()

    class Telling:
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            return kind_of(self) if this_thread.is_here else type(self)

    # `FakeTensor.__class__ = ...` would be of the class itself.
    before = FakeTensor.__bases__
    restores.add(functools.partial(setattr, FakeTensor, "__bases__", before))
    FakeTensor.__bases__ = (Telling, *before)


def kind_unless_known(value: Any) -> type:
    """Return the type in PyTorch of a tensor of a capture that stands for none of the user's."""
    kind = type(value)
    if kind is FakeTensor:
        return torch.nn.Parameter if getattr(value, "_is_param", False) else torch.Tensor
    is_ours = issubclass(kind, torch.Tensor) and kind.__module__.startswith("amp_ir.")
    return torch.Tensor if is_ours else kind
