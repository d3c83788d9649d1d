# SPDX-License-Identifier: Apache-2.0
"""What objects of the standard library, and some of PyTorch's, lead to and keep.

Their methods are library code, in which the observer does not look: `queue.put(x)` appends to a
deque, `event.is_set()` reads a flag, `scheduler.state_dict()` a list.
"""

from __future__ import annotations

import collections
import configparser
import csv
import functools
import gc
import io
import operator
import os
import queue
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakIdKeyDictionary

from amp_ir.capture.guards.advancing_objects import is_output
from amp_ir.capture.guards.places import CONTAINERS, is_plain
from amp_ir.capture.guards.users_objects import own_attributes

# Their special methods, which no attribute names, read it.
_HOLDS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((collections.ChainMap,), "maps"),
    ((configparser.RawConfigParser,), "_sections"),
    ((type(os.environ),), "_data"),
    (
        (
            collections.UserDict, collections.UserList, weakref.WeakKeyDictionary,
            weakref.WeakValueDictionary, weakref.WeakSet, WeakIdKeyDictionary,
        ),
        "data",
    ),
)  # fmt: skip
_EMPTY: dict[Any, Any] = {}
_ORDERED: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_VIEWS: tuple[type, ...] = (
    types.MappingProxyType,
    *(type(view) for view in (_EMPTY.keys(), _EMPTY.values(), _EMPTY.items())),
    *(type(view) for view in (_ORDERED.keys(), _ORDERED.values(), _ORDERED.items())),
)
_BY_NAME = (getattr, hasattr, setattr, delattr)
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
# They keep what changes without a meaning for the step, or nothing.
_OTHERS = frozenset(
    {"logging", "contextlib", "typing", "abc", "types", "enum", "random", "builtins"}
)
_STREAM_METHODS = frozenset(
    {"write", "writelines", "read", "readline", "readlines", "read1", "readinto", "seek",
     "truncate"}
)  # fmt: skip
_QUEUE_METHODS = frozenset({"put", "put_nowait", "get", "get_nowait"})
# Their methods, and functions such as `kl_divergence`, read all that they keep.
_KEEP_ALL = (torch.distributions.Distribution, torch.distributions.Transform)
_CSV_WRITER = type(csv.writer(io.StringIO()))


def held_by_special_methods(value: object) -> str:
    """Return the attribute that the special methods of a library's object read; "" for none."""
    return next((key for kinds, key in _HOLDS if isinstance(value, kinds)), "")


def leads_to(value: Any) -> Any:
    """Return the object that a view, a weak reference or a bound method is of; None for others."""
    if isinstance(value, _BOUND):
        return value.__self__ if isinstance(value.__self__, CONTAINERS) else None
    if isinstance(value, weakref.ref):
        return value()
    if isinstance(value, _VIEWS):
        (mapping,) = gc.get_referents(value)
        # Of a class, whose attributes are places of their own.
        return None if "__module__" in mapping else mapping
    return None


def class_of_proxy(proxy: types.MappingProxyType[str, Any]) -> type | None:
    """Return the class whose `__dict__` a proxy is; None where there is none."""
    (mapping,) = gc.get_referents(proxy)
    kinds, known = [object], {object}
    while kinds:
        kind = kinds.pop()
        if any(one is mapping for one in gc.get_referents(vars(kind))):
            return kind
        inner = set(type.__subclasses__(kind)) - known
        known |= inner
        kinds += inner
    return None


def names_read_by(value: Any) -> frozenset[str]:
    """Return the attributes that an object of `operator`, or a partial `getattr`, reads."""
    names: Any = ()
    if isinstance(value, operator.attrgetter):
        names = [part for path in value.__reduce__()[1] for part in str(path).split(".")]
    elif isinstance(value, operator.methodcaller):
        # With arguments by keyword it is told apart by a partial.
        reduced: Any = value.__reduce__()
        made_by, arguments = reduced[:2]
        names = made_by.args[:1] if isinstance(made_by, functools.partial) else arguments[:1]
    elif isinstance(value, functools.partial) and value.func in _BY_NAME:
        names = [one for one in value.args if isinstance(one, str)]
    return frozenset(names)


def kept_by_methods(value: Any, names: set[str]) -> Mapping[str, Any]:
    """Return what a library's object keeps that its methods of these names may read or write."""
    own = own_attributes(value) or {}
    if isinstance(value, _KEEP_ALL):
        return own
    if isinstance(value, LRScheduler):
        # A capture follows the one (`patches/last_rates.py`), and refuses the other.
        names = names - {"get_last_lr", "step"}
    if isinstance(value, torch.nn.Module) or not _has_method(type(value), names):
        return {}
    return {k: v for k, v in own.items() if is_plain(v) or isinstance(v, (tuple, *CONTAINERS))}


def _has_method(kind: type, names: set[str]) -> bool:
    return any(
        isinstance(vars(owner)[name], (types.FunctionType, property))
        for owner in _library_classes(kind)
        for name in names & vars(owner).keys()
    )


def _library_classes(kind: type) -> Iterator[type]:
    for owner in kind.__mro__:
        root = str(owner.__module__).partition(".")[0]
        is_standard = root in sys.stdlib_module_names and root not in (*_OTHERS, "__main__")
        if is_standard or owner.__module__ == "torch.optim.lr_scheduler":
            yield owner


def moves_a_stream(function: Any, owner: object) -> bool:
    """Return whether a builtin reads or writes a stream, but for the output of the process."""
    if isinstance(owner, _CSV_WRITER):
        return True
    is_stream = isinstance(owner, io.IOBase) and not is_output(owner)
    return is_stream and function.__name__ in _STREAM_METHODS


def uses_a_queue(function: Any, owner: object) -> bool:
    """Return whether a builtin puts into a queue or takes from one."""
    return isinstance(owner, queue.SimpleQueue) and function.__name__ in _QUEUE_METHODS
