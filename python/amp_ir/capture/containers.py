# SPDX-License-Identifier: Apache-2.0
"""Containers of a call's arguments and results: those that PyTorch's pytree knows, and objects.

Objects are dataclasses, attrs classes, `BatchEncoding` and other `UserDict`s, subclasses of dict,
and instances of the user's plain classes. A `Record` stands for one while it is flattened, and
unflattening makes an object of the same class again. PyTorch's own registry gets no class of the
user's, so that nothing changes elsewhere.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree

from amp_ir.host.held_values import slots_of

_MOST_DEEP = 32  # an object that holds itself is a leaf, which is refused
_ATOMS = (int, float, complex, str, bytes, type(None), torch.Tensor)
_NO_CONTAINERS = ("torch", "builtins", "amp_ir")
_OWN_KINDS: Any = (object.__new__, dict.__new__)
# Lists of objects that need the tokenizer's own library; no compiled step can use them.
_LEFT_OUT = {"BatchEncoding": "_encodings"}


@attrs.frozen
class _Shape:
    """All of an object but its values: its class, the keys of its items, and its attributes."""

    kind: type
    keys: tuple[Any, ...]
    attributes: tuple[str, ...]


@attrs.frozen(eq=False)
class Record:
    """An object as a pytree node; `values` are those of its items, then of its attributes."""

    shape: _Shape
    values: list[Any]


def _flatten_record(record: Record) -> tuple[list[Any], _Shape]:
    return record.values, record.shape


def _flatten_record_with_keys(record: Record) -> tuple[list[Any], _Shape]:
    shape = record.shape
    keys = [*map(pytree.MappingKey, shape.keys), *map(pytree.GetAttrKey, shape.attributes)]
    return list(zip(keys, record.values, strict=True)), shape


def _rebuild(values: Any, shape: _Shape) -> Any:
    """Return an object of the class with these values; its `__init__` does not run."""
    rest = iter(values)
    items = {key: next(rest) for key in shape.keys}
    kind: Any = shape.kind
    made = kind.__new__(kind)
    if isinstance(made, dict):
        dict.update(made, items)
    elif isinstance(made, collections.UserDict):
        object.__setattr__(made, "data", items)
    for name in shape.attributes:
        object.__setattr__(made, name, next(rest))
    return made


pytree.register_pytree_node(
    Record,
    _flatten_record,
    _rebuild,
    flatten_with_keys_fn=_flatten_record_with_keys,
    serialized_type_name="amp_ir.capture.containers.Record",
)


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return what `pytree.tree_flatten` does, with the values of objects as leaves too."""
    leaves, spec = pytree.tree_flatten(value)
    if not any(map(_is_object, leaves)):
        return leaves, spec
    return pytree.tree_flatten(_boxed(value, 0))


def flatten_with_path(value: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the path and the value of each leaf of `flatten`."""
    found: list[tuple[tuple[Any, ...], Any]] = pytree.tree_flatten_with_path(_boxed(value, 0))[0]
    return found


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of `flatten`."""
    return flatten(value)[0]


def record_of(value: Any) -> Record | None:
    """Return the record of an object that is a container; None for any other value."""
    if not _is_object(value):
        return None
    items, left_out = _items_of(value), _LEFT_OUT.get(type(value).__name__)
    attributes = dict(_attributes_of(value))
    if left_out in attributes:
        attributes[left_out] = None
    if isinstance(value, collections.UserDict):
        attributes.pop("data", None)
    shape = _Shape(type(value), tuple(items), tuple(attributes))
    return Record(shape, [*items.values(), *attributes.values()])


def _boxed(value: Any, depth: int) -> Any:
    """Return a value with a Record for each object in it."""
    if depth > _MOST_DEEP:
        return value

    def box(leaf: Any) -> Any:
        record = record_of(leaf)
        if record is None:
            return leaf
        return attrs.evolve(record, values=[_boxed(one, depth + 1) for one in record.values])

    return pytree.tree_map(box, value)


def _is_object(value: Any) -> bool:
    """Return whether a leaf of PyTorch's pytree is an object that holds values."""
    kind = type(value)
    if isinstance(value, (*_ATOMS, type, torch.nn.Module)) or callable(value):
        return False
    if isinstance(value, (types.SimpleNamespace, collections.UserDict)):
        return True
    if kind.__new__ not in _OWN_KINDS or kind.__module__.partition(".")[0] in _NO_CONTAINERS:
        return False
    # A class that pickles itself holds what its attributes do not show.
    is_plain = all(getattr(kind, n) is getattr(object, n) for n in ("__reduce__", "__reduce_ex__"))
    return is_plain and (hasattr(value, "__dict__") or any(map(slots_of, kind.__mro__)))


def _items_of(value: Any) -> dict[Any, Any]:
    if isinstance(value, collections.UserDict):
        return dict(value.data)
    return dict(value) if isinstance(value, dict) else {}


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Return the attributes of the object itself: those in slots, then its `__dict__`."""
    for owner in type(value).__mro__:
        yield from (
            (name, getattr(value, name)) for name in slots_of(owner) if hasattr(value, name)
        )
    yield from getattr(value, "__dict__", {}).items()
