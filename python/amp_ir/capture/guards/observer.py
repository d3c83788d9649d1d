# SPDX-License-Identifier: Apache-2.0
"""The user's Python code that runs in a capture, and what it may read and write.

A profile hook sees every call. When a function of the user's begins, the observer records the value
of each name in its bytecode on the objects that it holds (arguments, closure, globals, and what
these lead to), before the function can read or change it. That is a superset of the reads that
code names; `getattr` with a computed name and C code that calls back are not seen.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.guards.advancing_objects import Advancing, advancing
from amp_ir.capture.guards.code_reads import CodeReads, reads_of
from amp_ir.capture.guards.places import (
    ABSENT,
    Contents,
    Place,
    cell_value,
    describe_function,
    flat,
    is_number,
    is_plain,
)
from amp_ir.capture.locations import Locator, is_users_file

# A container with more items is compared as a whole; its items are not followed.
_MOST_ITEMS = 256
_MODULE_FILE = torch.nn.Module._call_impl.__code__.co_filename
_CALL, _INIT = torch.nn.Module._call_impl.__code__, torch.nn.Module.__init__.__code__
_INTERNAL = frozenset(vars(torch.nn.Module())) | {"training"}
_LIBRARY, _INSTALLED, _USERS, _RANDOM = range(4)
_RANDOM_FILES = frozenset(
    str(Path(random.__file__).with_name(name)) for name in ("random.py", "secrets.py", "uuid.py")
)
_CLOCKS = frozenset(
    getattr(time, name)
    for name in dir(time)
    if isinstance(getattr(time, name), BuiltinFunctionType) and not name.endswith("sleep")
)
_NOTHING = CodeReads()
_NOW = ("now", "utcnow", "today")
_CONTAINERS = (list, dict, set)
_TORCH_CONTAINERS = (
    torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList,
    torch.nn.ParameterDict,
)  # fmt: skip
# Beyond this, changing the hook costs more than the calls that it avoids.
_PAUSES = sys.version_info < (3, 12)
Name = Callable[[], str]


class Observer:
    """A record of what the user's code may have read and written; use once, with `watching`.

    `places`, `contents` and `modules` are all that was seen, by identity; `tensors` are names of
    the user's tensors, and `caches` the functions with `functools.cache` that ran.
    `replaced(place)` returns what replaces a number while the step runs.
    """

    def __init__(
        self,
        locator: Locator,
        diagnostics: Diagnostics,
        opaque: Iterable[object],
        replaced: Callable[[Place], Any],
    ) -> None:
        self.places: dict[tuple[int, str, Any], Place] = {}
        self.contents: dict[int, Contents] = {}
        self.modules: dict[int, tuple[torch.nn.Module, Name]] = {}
        self.tensors: dict[int, tuple[torch.Tensor, Name]] = {}
        self.arrays: dict[int, tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any], Name]] = {}
        self.caches: dict[int, tuple[Any, int]] = {}
        self.advancing: dict[int, Advancing] = {}
        self.read_values: dict[int, tuple[torch.Tensor, Any, Name]] = {}
        self.numpy_line: tuple[str, int] = ("", 0)
        self.has_drawn = False
        self._locator = locator
        self._diagnostics = diagnostics
        self._replaced = replaced
        self._known: dict[int, tuple[Any, Name]] = {}
        self._opaque = {id(one): one for one in opaque}
        self._functions: dict[int, list[FunctionType]] = {}
        self._kinds: dict[str, int] = {}
        self._looked: set[tuple[int, int]] = set()
        self._made: dict[int, object] = {}
        self._codes: dict[int, CodeReads] = {}
        self._inner: set[CodeType] = set()
        self._hook = self._on_event
        self._is_watching = False

    def add_models(self, models: list[torch.nn.Module]) -> None:
        """Register the models' modules with their paths."""
        for index, model in enumerate(models):
            prefix = f"model{index}" if index else ""
            for path, module in model.named_modules(prefix=prefix):
                name = _of_path(path)
                self._known.setdefault(id(module), (module, name))
                self.modules.setdefault(id(module), (module, name))
                for key, hooks in vars(module).items():
                    if key.endswith("_hooks") and isinstance(hooks, dict):
                        part = _part("a hook", None, name)
                        found = [(hook, part) for hook in hooks.values()]
                        self._reach(_NOTHING, found, is_users=True)

    def add_step(self, step: Any) -> None:
        """Register the step's function, its bound object and its arguments."""
        if not isinstance(step, (FunctionType, MethodType, functools.partial)):
            self._known.setdefault(id(step), (step, lambda: f"the {type(step).__name__}"))
            self._index_class(type(step), frozenset({"__call__"}))
        self._reach(_NOTHING, [(step, lambda: "the step")], is_users=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe every call inside; a profiler of the user's is suspended."""
        before = sys.getprofile()
        self._is_watching = True
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            self._is_watching = False
            sys.setprofile(None)
            enable = getattr(before, "enable", None)
            if enable is not None:
                enable()
            else:
                sys.setprofile(before)

    def pause(self) -> None:
        """Suspend observation while only PyTorch and the capture run."""
        if _PAUSES and self._is_watching:
            sys.setprofile(None)

    def go_on(self) -> None:
        """Resume observation."""
        if _PAUSES and self._is_watching:
            sys.setprofile(self._hook)

    # Events.

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        kind = self._kinds.get(file)
        if kind is None:
            kind = self._kind_of(frame, file)
        if kind == _LIBRARY:
            if file is _MODULE_FILE and event == "call":
                self._on_module(frame)
            return
        if kind == _RANDOM:
            self._on_random_code(frame, event)
        elif event == "call":
            self._on_call(frame, is_users=kind == _USERS)
        elif event == "return":
            self._on_return(frame, argument, is_users=kind == _USERS)
        elif event == "c_call":
            self._on_builtin(frame, argument)

    def _kind_of(self, frame: FrameType, file: str) -> int:
        if file in _RANDOM_FILES:
            kind = _RANDOM
        elif file in ("<stdin>", "<string>") or file.startswith("<ipython"):
            # Typed in or generated: the function's module tells whose it is.
            root = str(frame.f_globals.get("__name__")).partition(".")[0]
            library = root in ("torch", "amp_ir") or root in sys.stdlib_module_names
            return _LIBRARY if library else _USERS
        elif not is_users_file(file):
            kind = _LIBRARY
        else:
            is_installed = "site-packages" in file or "dist-packages" in file
            kind = _INSTALLED if is_installed else _USERS
        self._kinds[file] = kind
        return kind

    def _on_module(self, frame: FrameType) -> None:
        if frame.f_code is _INIT:
            made = frame.f_locals["self"]
            self._made[id(made)] = made
        elif frame.f_code is _CALL:
            module = frame.f_locals["self"]
            if id(module) not in self._made:
                self._on_running(module)

    def _on_running(self, module: torch.nn.Module) -> None:
        """Observe a running module: all plain attributes if it is PyTorch's, else those in code."""
        kind = type(module)
        _, name = self._known.setdefault(id(module), (module, lambda: f"a {kind.__name__}"))
        if (id(_CALL), id(module)) in self._looked:
            return
        self._looked.add((id(_CALL), id(module)))
        self.modules.setdefault(id(module), (module, name))
        self._index_class(kind, frozenset({"forward"}))
        if str(kind.__module__).partition(".")[0] == "torch":
            own = vars(module)
            for key in own.keys() - _INTERNAL:
                if not is_plain(own[key]):
                    continue  # PyTorch's own bookkeeping, such as the list of an LSTM's weights
                self._place(own, "entry", key, _part("attribute", key, name), is_loaded=True)

    def _on_call(self, frame: FrameType, *, is_users: bool) -> None:
        code = frame.f_code
        reads = reads_of(code)
        self._codes.setdefault(id(reads), reads)
        self._inner |= reads.inner
        cached = frame.f_globals.get(code.co_name)
        if isinstance(cached, functools._lru_cache_wrapper):
            self.caches[id(cached)] = cached, -1
        if "random" in reads.attributes and not self.numpy_line[0]:
            if any(one is numpy for one in map(frame.f_globals.get, reads.global_names)):
                self.numpy_line = code.co_filename, reads.lines["random"]
        found = self._held(frame)
        if is_users:
            found += self._globals(frame, reads)
            found += self._cells(frame, reads)
            if reads.attributes & {"environ", "getenv"}:
                found.append((vars(os.environ)["_data"], lambda: "os.environ"))
        self._reach(reads, found, is_users=is_users, code=code)

    def _on_return(self, frame: FrameType, value: Any, *, is_users: bool) -> None:
        found = self._held(frame)
        self._reach(reads_of(frame.f_code), found, is_users=is_users, code=frame.f_code)
        caller = frame.f_back
        known = self._known.get(id(value))
        if caller is not None and known is not None:
            kind = self._kinds.get(caller.f_code.co_filename, _LIBRARY)
            if kind in (_USERS, _INSTALLED):
                self._reach(
                    reads_of(caller.f_code), [known], is_users=kind == _USERS, code=caller.f_code
                )

    def _on_builtin(self, frame: FrameType, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, random.Random):
            self._refuse_draw(f"random.{function.__name__}()")
        elif isinstance(owner, _CONTAINERS):
            contents = self.contents.get(id(owner))
            if contents is not None and not contents.line[0]:
                if not contents.holds() or function.__name__ in _MUTATORS:
                    contents.line = frame.f_code.co_filename, frame.f_lineno
        elif _is_clock(function, owner):
            what = f"{getattr(owner, '__name__', 'time')}.{function.__name__}()"
            self._diagnostics.add(
                f"{what} reads the clock, which a compiled step would do only when it is captured",
                self._locator.here(),
                "Read it outside of the step",
            )

    def _on_random_code(self, frame: FrameType, event: str) -> None:
        caller = frame.f_back
        if event == "call" and caller is not None:
            if self._kinds.get(caller.f_code.co_filename) in (_USERS, _INSTALLED):
                module = Path(frame.f_code.co_filename).stem
                self._refuse_draw(f"{module}.{frame.f_code.co_name}()")

    def _refuse_draw(self, what: str) -> None:
        self.has_drawn = True
        self._diagnostics.add(*draw(what, self._locator.here()))

    def note_read(self, tensor: torch.Tensor) -> None:
        """Record that the step reads the value of a tensor of the user's in Python."""
        if id(tensor) not in self.read_values:
            _, name = self.tensors.get(
                id(tensor), (tensor, lambda: "a tensor outside of the model")
            )
            self.read_values[id(tensor)] = tensor, tensor.tolist(), name

    # What a function holds.

    def _held(self, frame: FrameType) -> list[tuple[Any, Name]]:
        values = frame.f_locals.values()
        known = [self._known.get(id(value)) for value in values]
        found = [one for one in known if one is not None]
        # A module without a known path, such as those that other libraries hold.
        for value in values:
            if isinstance(value, torch.nn.Module) and id(value) not in self._known:
                if id(value) not in self._made:
                    found.append((value, _of_class(value)))
        return found

    def _globals(self, frame: FrameType, reads: CodeReads) -> list[tuple[Any, Name]]:
        owner = frame.f_globals
        found: list[tuple[Any, Name]] = []
        file = Path(frame.f_code.co_filename).name
        names = reads.global_names | reads.global_stores.keys()
        for key in names:
            if key not in owner and key not in reads.global_stores:
                continue  # a builtin

            name = functools.partial(_global_name, key, file)
            if not _is_library(owner.get(key)):
                value = self._touch(owner, "entry", key, name, reads, frame.f_code)
                found.append((value, name))
        return found

    def _cells(self, frame: FrameType, reads: CodeReads) -> list[tuple[Any, Name]]:
        found: list[tuple[Any, Name]] = []
        code = frame.f_code
        if not code.co_freevars:
            return found
        held = frame.f_locals
        for function in self._functions.get(id(code), ()):
            cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
            values = {key: cell_value(cell) for key, cell in cells.items()}
            if any(value is not held.get(key, ABSENT) for key, value in values.items()):
                continue
            for key, cell in cells.items():
                found.append(self._cell(frame, function, key, cell, reads))
        if not found and code not in self._inner:
            # A function without a known path; its closure's contents are observed, not the cell.
            of = functools.partial(str, code.co_name)
            keys = [key for key in code.co_freevars if key in held]
            found += [(held[key], _part("closure variable", key, of)) for key in keys]
        return found

    def _cell(
        self, frame: FrameType, function: FunctionType, key: str, cell: Any, reads: CodeReads
    ) -> tuple[Any, Name]:
        def name() -> str:
            return f"closure variable {key!r} of {describe_function(function)}"

        before = cell_value(cell)
        is_loaded = key in reads.cell_loads and key not in reads.stored_first
        line = frame.f_code.co_filename, reads.cell_stores.get(key, 0)
        value = self._place(cell, "cell", "", name, is_loaded=is_loaded, line=line)
        if value is not before:
            # Before Python 3.13 the frame writes its copy of the locals back after this hook.
            frame.f_locals[key] = value
        return value, name

    # What objects lead to.

    def _reach(
        self,
        reads: CodeReads,
        found: Iterable[tuple[Any, Name]],
        *,
        is_users: bool,
        code: CodeType | None = None,
    ) -> None:
        stack = list(found)
        while stack:
            value, name = stack.pop()
            at = (id(reads), id(value))
            if at in self._looked or id(value) in self._opaque or _is_end(value):
                continue
            if isinstance(value, (torch.Tensor, numpy.ndarray)):
                self._note_values(value, name)
                continue
            self._looked.add(at)
            self._known.setdefault(id(value), (value, name))
            if id(value) not in self.advancing:
                moving = advancing(value, name)
                if moving is not None:
                    self.advancing[id(value)] = moving
            stack += self._members(value, name, reads, code, is_users=is_users)

    def _note_values(self, value: Any, name: Name) -> None:
        if isinstance(value, numpy.ndarray):
            if id(value) not in self.arrays:
                self.arrays[id(value)] = value, value.copy(), name
        elif not isinstance(value, FakeTensor):
            self.tensors.setdefault(id(value), (value, name))

    def _members(
        self, value: Any, name: Name, reads: CodeReads, code: CodeType | None, *, is_users: bool
    ) -> Iterator[tuple[Any, Name]]:
        if isinstance(value, FunctionType):
            yield from self._function(value, name)
        elif isinstance(value, MethodType):
            yield value.__self__, name
            yield value.__func__, name
        elif isinstance(value, functools.partial):
            yield value.func, name
            yield value.args, _part("arguments", None, name)
            yield value.keywords, _part("arguments", None, name)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.caches.setdefault(id(value), (value, value.cache_info().currsize))
            yield value.__wrapped__, name
        elif isinstance(value, (tuple, *_CONTAINERS)):
            yield from self._items(value, name, reads, code)
        if isinstance(value, torch.nn.Module):
            yield from self._submodules(value, name, reads)
        if not isinstance(value, (tuple, list, set, FunctionType, MethodType, Iterator)):
            yield from self._attributes(value, name, reads, code, is_users=is_users)

    def _function(self, function: FunctionType, name: Name) -> Iterator[tuple[Any, Name]]:
        known = self._functions.setdefault(id(function.__code__), [])
        if any(one is function for one in known):
            return
        known.append(function)
        if not is_users_file(function.__code__.co_filename):
            if str(function.__module__).partition(".")[0] == "torch" and not function.__closure__:
                return
        of = functools.partial(describe_function, function)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for value in defaults:
            yield value, _part("a default argument", None, of)
        for key, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=False
        ):
            # The function that a decorator wraps; a cell itself is a place once its function runs.
            value = cell_value(cell)
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                yield value, _part("closure variable", key, of)
        if function.__dict__:
            yield function.__dict__, _part("attributes", None, of)

    def _items(
        self, value: Any, name: Name, reads: CodeReads, code: CodeType | None
    ) -> Iterator[tuple[Any, Name]]:
        if isinstance(value, _CONTAINERS):
            contents = self.contents.get(id(value))
            if contents is None:
                contents = self.contents[id(value)] = Contents(value, name, flat(value))
            if not contents.line[0] and reads.entry_lines and code is not None:
                contents.line = code.co_filename, reads.entry_lines[0]
        if len(value) > _MOST_ITEMS or isinstance(value, set):
            return
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, item in pairs:
            word = "entry" if isinstance(value, dict) else "item"
            part = _part(word, key, name)
            if is_number(item) and not isinstance(value, tuple):
                self._place(value, "entry", key, part, is_loaded=True)
            yield item, part

    def _submodules(
        self, module: torch.nn.Module, name: Name, reads: CodeReads
    ) -> Iterator[tuple[Any, Name]]:
        every = reads.traverses or isinstance(module, _TORCH_CONTAINERS)
        self.modules.setdefault(id(module), (module, name))
        for key, child in module._modules.items():
            if child is not None and (every or key in reads.attributes):
                yield child, self._known.get(id(child), (child, _part("module", key, name)))[1]
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield tensor, _part("attribute", key, name)

    def _attributes(
        self, value: Any, name: Name, reads: CodeReads, code: CodeType | None, *, is_users: bool
    ) -> Iterator[tuple[Any, Name]]:
        own = vars(value) if isinstance(value, ModuleType) else _own_attributes(value)
        touched = reads.touched
        keys = touched & own.keys() if own is not None else set()
        if isinstance(value, torch.nn.Module):
            keys -= _INTERNAL - {"training"}
        if own is not None and not isinstance(value, ModuleType):
            # Attributes that are stored later, read with getattr, or defined in the class: an
            # attribute of the object would take precedence.
            absent = reads.attribute_stores.keys() | reads.optional
            absent |= touched & _names_of_class(type(value)) if is_users else set()
            keys |= absent - own.keys() - _INTERNAL
        for key in keys:
            part = _part("attribute", key, name)
            if own is not None and not _is_library(own.get(key)):
                if not hasattr(inspect.getattr_static(type(value), key, None), "__set__"):
                    yield self._touch(own, "entry", key, part, reads, code), part
        if is_users or own is None:
            yield from self._class_attributes(value, touched, name, reads, code)
        else:
            self._index_class(type(value), touched)

    def _class_attributes(
        self, value: Any, names: set[str], name: Name, reads: CodeReads, code: CodeType | None
    ) -> Iterator[tuple[Any, Name]]:
        for owner in _users_classes(value if isinstance(value, type) else type(value)):
            for key in names & vars(owner).keys():
                found = vars(owner)[key]
                if type(found).__name__ in ("member_descriptor", "getset_descriptor"):
                    part = _part("attribute", key, name)
                    yield self._touch(value, "attribute", key, part, reads, code), part
                    continue
                part = _part("attribute", key, functools.partial(_class_name, owner))
                self._touch(owner, "attribute", key, part, reads, code)
                yield _unwrapped(found), part

    def _index_class(self, kind: type, names: frozenset[str] | set[str]) -> None:
        """Index the functions of a class by their code, to find the closures of those that run."""
        for owner in kind.__mro__:
            if str(owner.__module__).partition(".")[0] in ("torch", "builtins"):
                continue
            for key in names & vars(owner).keys():
                function = _unwrapped(vars(owner)[key])
                while isinstance(function, FunctionType):
                    known = self._functions.setdefault(id(function.__code__), [])
                    if any(one is function for one in known):
                        break
                    known.append(function)
                    function = getattr(function, "__wrapped__", None)

    # Places.

    def _touch(
        self,
        holder: Any,
        kind: str,
        key: Any,
        name: Name,
        reads: CodeReads,
        code: CodeType | None,
    ) -> Any:
        """Record a place that code names; return its value."""
        is_global = isinstance(holder, dict) and "__name__" in holder and "__builtins__" in holder
        loads = reads.global_names | reads.attributes if is_global else reads.attributes
        stores = reads.attribute_stores
        if is_global and key in reads.global_stores:
            stores = reads.global_stores
        is_loaded = key in loads and key not in reads.stored_first
        line = (code.co_filename, stores[key]) if code is not None and key in stores else ("", 0)
        return self._place(holder, kind, key, name, is_loaded=is_loaded, line=line)

    def _place(
        self,
        holder: Any,
        kind: str,
        key: Any,
        name: Name,
        *,
        is_loaded: bool,
        line: tuple[str, int] = ("", 0),
    ) -> Any:
        at = (id(holder), kind, key)
        place = self.places.get(at)
        if place is None:
            place = Place(holder, kind, key, name, ABSENT)
            place.before = value = place.now()
            if isinstance(value, FakeTensor):
                return value
            self.places[at] = place
            if is_number(value):
                other = self._replaced(place)
                if other is not value:
                    place.put(other)
        value = place.now()
        if line[1] and not place.line[1]:
            place.line = line
        if is_loaded and (value is place.before or is_number(place.before)):
            place.is_loaded = True
        return value


_MUTATORS = frozenset(
    {"append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "popitem",
     "add", "discard", "sort", "reverse"}
)  # fmt: skip


def draw(what: str, where: Any) -> tuple[str, Any, str]:
    """Return the diagnostic for a random number of Python's or NumPy's generators."""
    return (
        f"{what} draws a random number in Python, which a compiled step would do only when it is "
        "captured",
        where,
        "Draw it with torch (torch.rand), or outside of the step and pass it as an argument",
    )


def _is_clock(function: Any, owner: Any) -> bool:
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return function.__name__ in _NOW
    return isinstance(function, BuiltinFunctionType) and function in _CLOCKS


def _part(word: str, key: Any, name: Name) -> Name:
    if key is None:
        return lambda: f"{word} of {name()}"
    return lambda: f"{word} {key!r} of {name()}"


def _global_name(key: str, file: str) -> str:
    return f"global {key!r} ({file})"


def _of_path(path: str) -> Name:
    return lambda: f"module {path or '(the model itself)'}"


def _of_class(module: torch.nn.Module) -> Name:
    return lambda: f"a {type(module).__name__}"


def _class_name(owner: type) -> str:
    return f"class {owner.__name__}"


def _unwrapped(found: Any) -> Any:
    """Return the function of a method, property or cached property."""
    for key in ("__func__", "fget", "func"):
        inner = getattr(found, key, None)
        if isinstance(inner, FunctionType):
            return inner
    return found


def _own_attributes(value: Any) -> dict[str, Any] | None:
    try:
        own = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return own if type(own) is dict else None


def _is_end(value: Any) -> bool:
    """Return whether a value is a leaf: nothing in it is followed."""
    return value is None or value is ABSENT or is_plain(value) or _is_library(value)


def _is_library(value: Any) -> bool:
    """Return whether a module is PyTorch's, the standard library's or a builtin: not followed."""
    if isinstance(value, ModuleType):
        root = value.__name__.partition(".")[0]
        return root in ("torch", "amp_ir", "numpy") or root in sys.stdlib_module_names
    if isinstance(value, type):
        return _is_library_class(value)
    if isinstance(value, BuiltinFunctionType):
        return not isinstance(getattr(value, "__self__", None), _CONTAINERS)
    return False


def _users_classes(kind: type) -> list[type]:
    return [owner for owner in kind.__mro__ if not _is_library_class(owner)]


def _names_of_class(kind: type) -> set[str]:
    return {name for owner in _users_classes(kind) for name in vars(owner)}


def _is_library_class(owner: type) -> bool:
    root = str(owner.__module__).partition(".")[0]
    return root in ("torch", "amp_ir", "numpy") or (
        root in sys.stdlib_module_names and root != "__main__"
    )
