# SPDX-License-Identifier: Apache-2.0
"""The user's Python code that runs in a capture; `observed_objects` has what it may read and write.

A profile hook sees every call. When a function of the user's begins, the observer records the value
of each name in its bytecode on the objects that it holds (arguments, closure, globals, and what
these lead to), before the function can read or change it. That is a superset of the reads that
code names; `getattr` with a computed name and C code that calls back are not seen.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context, ContextVar
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.guards import outside_calls
from amp_ir.capture.guards.asked_values import asked_of_library, asked_of_process
from amp_ir.capture.guards.code_reads import CodeReads, line_of_entry, reads_of
from amp_ir.capture.guards.identities import Identities
from amp_ir.capture.guards.library_objects import moves_a_stream, uses_a_queue
from amp_ir.capture.guards.observed_objects import INTERNAL, Name, ObservedObjects, part_name
from amp_ir.capture.guards.places import (
    ABSENT,
    CONTAINERS,
    Place,
    cell_value,
    describe_function,
    is_plain,
)
from amp_ir.capture.guards.users_objects import is_library
from amp_ir.capture.locations import Locator, is_users_file, is_users_own
from amp_ir.ir.location import Location

_MODULE_FILE = torch.nn.Module._call_impl.__code__.co_filename
_CALL, _INIT = torch.nn.Module._call_impl.__code__, torch.nn.Module.__init__.__code__
_LIBRARY, _INSTALLED, _USERS, _RANDOM, _FILES, _STREAMS = range(6)
_HAVE_ADDRESSES = (torch.Tensor, torch.UntypedStorage)
_NOTHING = CodeReads()
# Beyond this, changing the hook costs more than the calls that it avoids.
_PAUSES = sys.version_info < (3, 12)


class Observer:
    """A record of what the user's code may have read and written; use once, with `watching`.

    `objects` are those that it saw, and what they lead to; `read_values` the tensors whose values
    the step read in Python, `numpy_line` the first line that names NumPy's random numbers.
    """

    def __init__(
        self,
        locator: Locator,
        diagnostics: Diagnostics,
        opaque: Iterable[object],
        replaced: Callable[[Place], Any],
        identities: Identities,
    ) -> None:
        self.objects = ObservedObjects(opaque, replaced, identities)
        self._identities = identities
        self.read_values: dict[int, tuple[torch.Tensor, torch.Tensor, Name]] = {}
        self.readings = self.objects.readings
        self.numpy_line: tuple[str, int] = ("", 0)
        self.has_drawn = False
        self._locator = locator
        self._diagnostics = diagnostics
        self._kinds: dict[str, int] = {}
        # Files of which no event is observed: those of libraries, but for modules.
        self._unobserved: set[str] = set()
        self._made: dict[int, object] = {}
        self._codes: dict[int, CodeReads] = {}
        self._users_names: set[str] = set()
        self._users_codes: dict[CodeType, None] = {}
        self._inner: set[CodeType] = set()
        self._variables: dict[ContextVar[Any], list[Location]] = {}
        self._values: dict[ContextVar[Any], Any] = {}
        self._hook = self._made_hook()
        self._is_watching = False

    def users_code_names(self, attributes: frozenset[str]) -> bool:
        """Return whether code of the user's that ran names one of these attributes."""
        return not attributes.isdisjoint(self._users_names)

    def stores_entry_at(self, key: str) -> Location:
        """Return where code of the user's that ran stores an entry of this key."""
        for code in self._users_codes:
            line = line_of_entry(code, key)
            if line:
                return Location(file=code.co_filename, line=line)
        return Location()

    def add_models(self, models: list[torch.nn.Module]) -> None:
        """Register the models' modules with their paths."""
        for index, model in enumerate(models):
            self.objects.modes.add(model)
            prefix = f"model{index}" if index else ""
            for path, module in model.named_modules(prefix=prefix):
                name = _of_path(path)
                self.objects.known.setdefault(id(module), (module, name))
                self.objects.modules.setdefault(id(module), (module, name))
                for key, hooks in vars(module).items():
                    if key.endswith("_hooks") and isinstance(hooks, dict):
                        part = part_name("a hook", None, name)
                        found = [(hook, part) for hook in hooks.values()]
                        self.objects.reach(_NOTHING, found, is_users=True)

    def has_made(self, module: torch.nn.Module) -> bool:
        """Return whether the step has made a module."""
        return id(module) in self._made

    def add_step(self, step: Any) -> None:
        """Register the step's function, its bound object and its arguments."""
        if not isinstance(step, (FunctionType, MethodType, functools.partial)):
            self.objects.known.setdefault(id(step), (step, lambda: f"the {type(step).__name__}"))
            self.objects.index_class(type(step), frozenset({"__call__"}))
        self.objects.reach(_NOTHING, [(step, lambda: "the step")], is_users=True)

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

    def _made_hook(self) -> Callable[[FrameType, str, Any], None]:
        """Return the profile hook, which a capture calls some 50 000 times, mostly for nothing."""
        unobserved, on_event = self._unobserved, self._on_event

        def hook(frame: FrameType, event: str, argument: Any) -> None:
            if frame.f_code.co_filename not in unobserved:
                on_event(frame, event, argument)

        return hook

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        kind = self._kinds.get(file)
        if kind is None:
            kind = self._kind_of(frame, file)
            if kind == _LIBRARY and file is not _MODULE_FILE:
                self._unobserved.add(file)
        if kind == _LIBRARY:
            if file is _MODULE_FILE and event == "call":
                self._on_module(frame)
            return
        if gc.callbacks and _is_of_collector(frame):
            return
        if kind in (_RANDOM, _FILES, _STREAMS):
            self._on_outside_code(frame, event, kind)
        elif event == "call":
            self._on_call(frame, is_users=kind == _USERS)
        elif event == "return":
            self._on_return(frame, argument, is_users=kind == _USERS)
        elif event == "c_call":
            self._on_builtin(frame, argument)

    def _kind_of(self, frame: FrameType, file: str) -> int:
        if file in outside_calls.RANDOM_FILES:
            kind = _RANDOM
        elif outside_calls.is_of_files(file):
            kind = _FILES
        elif file in outside_calls.STREAM_FILES:
            kind = _STREAMS
        elif file in ("<stdin>", "<string>") or file.startswith("<ipython"):
            # Typed in or generated: the function's module tells whose it is.
            root = str(frame.f_globals.get("__name__")).partition(".")[0]
            library = root in ("torch", "amp_ir") or root in sys.stdlib_module_names
            return _LIBRARY if library else _USERS
        elif not is_users_file(file):
            kind = _LIBRARY
        else:
            kind = _USERS if is_users_own(file) else _INSTALLED
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
        _, name = self.objects.known.setdefault(id(module), (module, lambda: f"a {kind.__name__}"))
        if (id(_CALL), id(module)) in self.objects.looked:
            return
        self.objects.looked.add((id(_CALL), id(module)))
        self.objects.modules.setdefault(id(module), (module, name))
        self.objects.index_class(kind, frozenset({"forward"}))
        if str(kind.__module__).partition(".")[0] == "torch":
            own = vars(module)
            for key in own.keys() - INTERNAL:
                if not is_plain(own[key]):
                    continue  # PyTorch's own bookkeeping, such as the list of an LSTM's weights
                part = part_name("attribute", key, name)
                self.objects.place(own, "entry", key, part, is_loaded=True)

    def _on_call(self, frame: FrameType, *, is_users: bool) -> None:
        code = frame.f_code
        reads = reads_of(code)
        self._codes.setdefault(id(reads), reads)
        self._inner |= reads.inner
        cached = frame.f_globals.get(code.co_name)
        if isinstance(cached, functools._lru_cache_wrapper):
            self.objects.caches[id(cached)] = cached, -1
        self._identities.give(frame.f_globals, reads.global_names)
        if "random" in reads.attributes and not self.numpy_line[0]:
            if any(one is numpy for one in map(frame.f_globals.get, reads.global_names)):
                self.numpy_line = code.co_filename, reads.lines["random"]
        found = self._held(frame)
        if is_users:
            self._users_names |= reads.attributes
            if code not in self._users_codes:
                for words, read in asked_of_process(reads.attributes | reads.global_names):
                    self.readings.add(words, functools.partial(str, words), read)
            self._users_codes[code] = None
            found += self._globals(frame, reads)
            found += self._cells(frame, reads)
            if reads.attributes & {"environ", "getenv"}:
                found.append((vars(os.environ)["_data"], lambda: "os.environ"))
        self.objects.reach(reads, found, is_users=is_users, code=code)

    def _on_return(self, frame: FrameType, value: Any, *, is_users: bool) -> None:
        found = self._held(frame)
        self.objects.reach(reads_of(frame.f_code), found, is_users=is_users, code=frame.f_code)
        caller = frame.f_back
        known = self.objects.known.get(id(value))
        if caller is not None and known is not None:
            kind = self._kind_at(caller)
            if kind in (_USERS, _INSTALLED):
                self.objects.reach(
                    reads_of(caller.f_code), [known], is_users=kind == _USERS, code=caller.f_code
                )

    def _on_builtin(self, frame: FrameType, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, random.Random):
            self._refuse_draw(f"random.{function.__name__}()")
        elif isinstance(owner, CONTAINERS):
            contents = self.objects.contents.get(id(owner))
            if contents is not None and not contents.line[0]:
                if not contents.holds() or function.__name__ in _MUTATORS:
                    contents.line = frame.f_code.co_filename, frame.f_lineno
        elif isinstance(owner, _HAVE_ADDRESSES) and function.__name__ == "data_ptr":
            self._diagnostics.add(*outside_calls.address(self._locator.here()))
        elif outside_calls.is_clock(function, owner):
            at, here = self._locator.called_at(), self._locator.here()
            self._diagnostics.add(*outside_calls.clock(function, owner, at, here))
        elif self._kind_at(frame) == _USERS:
            self._on_users_builtin(function, owner)

    def _on_users_builtin(self, function: Any, owner: Any) -> None:
        if isinstance(owner, ContextVar) and function.__name__ in ("set", "reset"):
            self._on_variable(function.__name__, owner)
        elif isinstance(owner, Context) and function.__name__ in ("run", "get"):
            if id(owner) in self.objects.known:
                self._diagnostics.add(*outside_calls.context(function, self._locator.here()))
        elif isinstance(owner, (torch.Generator, ContextVar)):
            if function.__name__ in ("get", "initial_seed"):
                words = functools.partial(str, f"{function.__name__}() of a {type(owner).__name__}")
                self.readings.add((id(owner), words()), words, functools.partial(_call, function))
        elif moves_a_stream(function, owner) or uses_a_queue(function, owner):
            self._refuse_stream(function.__name__, owner)
        elif outside_calls.opens_files(function):
            self._diagnostics.add(*outside_calls.file(function.__name__, self._locator.here()))

    def _on_variable(self, name: str, variable: ContextVar[Any]) -> None:
        """Remember what a step sets, until it resets that."""
        lines = self._variables.setdefault(variable, [])
        if name == "set":
            if not lines:
                self._values[variable] = variable.get(ABSENT)
            lines.append(self._locator.here())
        elif lines:
            lines.pop()

    def report_variables(self, diagnostics: Diagnostics) -> None:
        """Report context variables that the step sets and leaves so."""
        for variable, lines in self._variables.items():
            if lines:
                diagnostics.add(*outside_calls.variable(variable, lines[0]))

    def restore_variables(self) -> None:
        """Set the context variables that the step left as they were, where they had a value."""
        for variable, lines in self._variables.items():
            if lines and self._values[variable] is not ABSENT:
                variable.set(self._values[variable])
            lines.clear()

    def _kind_at(self, frame: FrameType | None) -> int:
        return _LIBRARY if frame is None else self._kinds.get(frame.f_code.co_filename, _LIBRARY)

    def _on_outside_code(self, frame: FrameType, event: str, kind: int) -> None:
        caller, code = self._kind_at(frame.f_back), frame.f_code
        if event != "call":
            return
        if kind == _RANDOM and caller in (_USERS, _INSTALLED):
            self._refuse_draw(f"{Path(code.co_filename).stem}.{code.co_name}()")
        elif kind == _FILES and caller == _USERS and outside_calls.looks_at_files(code):
            self._diagnostics.add(*outside_calls.file(code.co_name, self._locator.here()))
        elif kind == _STREAMS and caller == _USERS and outside_calls.moves_a_stream(code):
            self._refuse_stream(code.co_name, frame.f_locals.get("self"))

    def _refuse_stream(self, name: str, owner: object) -> None:
        """Refuse the use of a stream or a queue, unless the step has made it."""
        if id(owner) in self.objects.known:
            self.has_drawn = True
            self._diagnostics.add(*outside_calls.stream(name, owner, self._locator.here()))

    def _refuse_draw(self, what: str) -> None:
        self.has_drawn = True
        self._diagnostics.add(*outside_calls.draw(what, self._locator.here()))

    def note_read(self, tensor: torch.Tensor, of_state: str = "") -> None:
        """Record that the step depends on the value of a tensor of the user's, as a guard.

        `of_state` is its name where it is of the state.
        """
        if id(tensor) not in self.read_values:
            _, name = self.objects.tensors.get(
                id(tensor), (tensor, lambda: of_state or "a tensor outside of the model")
            )
            with _disable_current_modes():
                value = tensor.detach().clone()
            self.read_values[id(tensor)] = tensor, value, name

    def _held(self, frame: FrameType) -> list[tuple[Any, Name]]:
        values = frame.f_locals.values()
        known = [self.objects.known.get(id(value)) for value in values]
        found = [one for one in known if one is not None]
        # A module without a known path, such as those that other libraries hold.
        for value in values:
            if isinstance(value, torch.nn.Module) and id(value) not in self.objects.known:
                if id(value) not in self._made:
                    found.append((value, _of_class(value)))
        return found

    def _globals(self, frame: FrameType, reads: CodeReads) -> list[tuple[Any, Name]]:
        owner = frame.f_globals
        found: list[tuple[Any, Name]] = []
        file = Path(frame.f_code.co_filename).name
        names = reads.global_names | reads.global_stores.keys()
        for key in names:
            is_builtin = key not in owner or self._identities.is_ours(owner[key])
            if is_builtin and key not in reads.global_stores:
                continue

            name = functools.partial(_global_name, key, file)
            held = owner.get(key)
            if held is sys.modules:
                found += self._modules(reads)
                continue
            value = self.objects.touch(owner, "entry", key, name, reads, frame.f_code)
            if not is_library(held):
                found.append((value, name))
            elif isinstance(held, ModuleType):
                if held is sys and "modules" in reads.attributes:
                    found += self._modules(reads)
                for words, read in asked_of_library(held, reads.attributes):
                    self.readings.add(words, functools.partial(str, words), read)
        return found

    def _modules(self, reads: CodeReads) -> list[tuple[Any, Name]]:
        """Guard which modules that code names are loaded; return those that are."""
        found: list[tuple[Any, Name]] = []
        for key in reads.strings:
            read = functools.partial(sys.modules.get, key)
            name = functools.partial(str, f"entry {key!r} of sys.modules")
            self.readings.add(("sys.modules", key), name, read)
            if (module := read()) is not None:
                found.append((module, name))
        return found

    def _cells(self, frame: FrameType, reads: CodeReads) -> list[tuple[Any, Name]]:
        found: list[tuple[Any, Name]] = []
        code = frame.f_code
        if not code.co_freevars:
            return found
        held = frame.f_locals
        for function in self.objects.functions.get(id(code), ()):
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
            found += [(held[key], part_name("closure variable", key, of)) for key in keys]
        return found

    def _cell(
        self, frame: FrameType, function: FunctionType, key: str, cell: Any, reads: CodeReads
    ) -> tuple[Any, Name]:
        def name() -> str:
            return f"closure variable {key!r} of {describe_function(function)}"

        before = cell_value(cell)
        is_loaded = key in reads.cell_loads and key not in reads.stored_first
        line = frame.f_code.co_filename, reads.cell_stores.get(key, 0)
        value = self.objects.place(cell, "cell", "", name, is_loaded=is_loaded, line=line)
        if value is not before:
            # Before Python 3.13 the frame writes its copy of the locals back after this hook.
            frame.f_locals[key] = value
        return value, name


_MUTATORS = frozenset(
    {"append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "popitem",
     "add", "discard", "sort", "reverse", "appendleft", "extendleft", "popleft", "rotate"}
)  # fmt: skip


def _call(function: Any) -> Any:
    try:
        return function()
    except LookupError:  # of a context variable that has no value
        return None


def _is_of_collector(frame: FrameType) -> bool:
    """Return whether Python's garbage collection called a function, which the step did not."""
    return any(getattr(one, "__code__", None) is frame.f_code for one in gc.callbacks)


def _global_name(key: str, file: str) -> str:
    return f"global {key!r} ({file})"


def _of_path(path: str) -> Name:
    return lambda: f"module {path or '(the model itself)'}"


def _of_class(module: torch.nn.Module) -> Name:
    return lambda: f"a {type(module).__name__}"
