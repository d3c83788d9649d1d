# SPDX-License-Identifier: Apache-2.0
"""The user's objects that code in a capture may have read and written."""

from __future__ import annotations

import collections
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from amp_ir.capture.guards.advancing_objects import Advancing, advancing
from amp_ir.capture.guards.asked_values import asked_of_tensor
from amp_ir.capture.guards.code_reads import CodeReads, with_names
from amp_ir.capture.guards.identities import Identities
from amp_ir.capture.guards.library_objects import (
    class_of_proxy,
    held_by_special_methods,
    kept_by_methods,
    leads_to,
    names_read_by,
)
from amp_ir.capture.guards.module_modes import KnownModes
from amp_ir.capture.guards.places import (
    ABSENT,
    CONTAINERS,
    Contents,
    Place,
    cell_value,
    describe_function,
    flat,
    in_words,
    is_number,
    is_plain,
)
from amp_ir.capture.guards.readings import Readings
from amp_ir.capture.guards.stand_ins import StandIns
from amp_ir.capture.guards.unnamed_attributes import UnnamedAttributes
from amp_ir.capture.guards.users_objects import (
    is_end,
    is_users_object,
    names_of_class,
    own_attributes,
    unwrapped,
    users_classes,
)
from amp_ir.capture.locations import is_users_file, is_users_own
from amp_ir.capture.patches.thread_patches import original_of

# A container with more items is compared as a whole; its items are not followed.
_MOST_ITEMS = 256
INTERNAL = frozenset(vars(torch.nn.Module())) | {"training"}
_TORCH_CONTAINERS = (
    torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList,
    torch.nn.ParameterDict,
)  # fmt: skip
# With these, code reads attributes that it does not name.
_ALL = frozenset({"vars", "__dict__"})
_OF_EVERY_CLASS = frozenset(vars(type("_", (), {})))
# Their classes are fixed, stood in for, or guarded with the modules.
_OWN_CLASS = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, ModuleType, type)
_PARTS = {
    "__code__": "the code",
    "__defaults__": "the defaults",
    "__kwdefaults__": "the defaults by keyword",
}
Name = Callable[[], str]


class ObservedObjects:
    """Places, containers, modules and tensors by identity, with their names.

    `places`, `contents` and `modules` are all that was seen; `tensors` are names of the user's
    tensors, and `caches` the functions with `functools.cache` that ran. `known` has the names of
    objects, `functions` those of each code, and `looked` the code that was matched with an object.
    `instances` are objects of the user's classes, whose `classes` could be set.
    `stand_ins` are in the places and containers while the step runs.
    `replaced(place)` returns what replaces a number while the step runs.
    """

    def __init__(
        self,
        opaque: Iterable[object],
        replaced: Callable[[Place], Any],
        identities: Identities,
    ) -> None:
        self.places: dict[tuple[int, str, Any], Place] = {}
        self.contents: dict[int, Contents] = {}
        self.modules: dict[int, tuple[torch.nn.Module, Name]] = {}
        self.modes = KnownModes()
        self.stand_ins = StandIns(identities)
        self.unnamed = UnnamedAttributes()
        self.tensors: dict[int, tuple[torch.Tensor, Name]] = {}
        self.arrays: dict[int, tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any], Name]] = {}
        self.caches: dict[int, tuple[Any, int]] = {}
        self.advancing: dict[int, Advancing] = {}
        # What distributions had before the step: `probs` and `logits` compute each other.
        self.lazy: dict[int, tuple[dict[str, Any], frozenset[str]]] = {}
        self.readings = Readings()
        self.known: dict[int, tuple[Any, Name]] = {}
        self.functions: dict[int, list[FunctionType]] = {}
        self.instances: dict[int, tuple[Any, Name]] = {}
        self.classes: dict[int, type] = {}
        self.looked: set[tuple[int, int]] = set()
        # By the ids of reads, which the cache of `reads_of` or an entry before holds.
        self._names: dict[int, CodeReads] = {}
        self._every: dict[int, CodeReads] = {}
        self._opaque = {id(one): one for one in opaque}
        self._replaced = replaced

    def reach(
        self,
        reads: CodeReads,
        found: Iterable[tuple[Any, Name]],
        *,
        is_users: bool,
        code: CodeType | None = None,
    ) -> None:
        """Follow objects that code holds along the names in it, and record what it meets.

        `is_users` says that the code is the user's: its reads of class attributes count too.
        """
        roots = list(found)
        reads = self._with_known_names(reads)
        stack = list(roots)
        while stack:
            value, name = stack.pop()
            names = names_read_by(value)
            if not names <= reads.attributes:
                self._names[id(reads)] = reads = with_names(reads, names)
                stack += [(value, name), *roots]
                continue
            at = (id(reads), id(value))
            if at in self.looked or id(value) in self._opaque or is_end(value):
                continue
            if isinstance(value, (torch.Tensor, numpy.ndarray)):
                self._note_values(value, name, reads)
                if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                    self.known.setdefault(id(value), (value, name))
                    stack += self._attributes(value, name, reads, code, is_users=False)
                continue
            self.looked.add(at)
            self.known.setdefault(id(value), (value, name))
            if id(value) not in self.advancing:
                moving = advancing(value, name)
                if moving is not None:
                    self.advancing[id(value)] = moving
            stack += self._members(value, name, reads, code, is_users=is_users)

    def _with_known_names(self, reads: CodeReads) -> CodeReads:
        """Return reads with the names that objects read which their code has called."""
        while (more := self._names.get(id(reads))) is not None:
            reads = more
        return reads

    def _note_values(self, value: Any, name: Name, reads: CodeReads) -> None:
        if isinstance(value, numpy.ndarray):
            if id(value) not in self.arrays:
                self.arrays[id(value)] = value, value.copy(), name
        elif not isinstance(value, FakeTensor):
            self.tensors.setdefault(id(value), (value, name))
            if self.stand_ins.of(value) is value:
                self._note_asked(value, name, reads.attributes | (reads.global_names & {"len"}))

    def _note_asked(self, tensor: torch.Tensor, name: Name, names: set[str]) -> None:
        """Guard what code asks of a tensor that is in none of the models, but for its values."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for word, read in asked_of_tensor(tensor, names):
                self.readings.add((id(tensor), word), part_name(word, None, name), read)

    def _members(
        self, value: Any, name: Name, reads: CodeReads, code: CodeType | None, *, is_users: bool
    ) -> Iterator[tuple[Any, Name]]:
        if isinstance(value, FunctionType):
            yield from self._function(value, name, reads)
        elif isinstance(value, MethodType):
            yield value.__self__, name
            yield value.__func__, name
        elif isinstance(value, functools.partial):
            self.stand_ins.put_arguments(value)
            yield value.func, name
            yield value.args, part_name("arguments", None, name)
            yield value.keywords, part_name("arguments", None, name)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.caches.setdefault(id(value), (value, value.cache_info().currsize))
            yield value.__wrapped__, name
        elif isinstance(value, (tuple, *CONTAINERS)):
            yield from self._items(value, name, reads, code)
        elif isinstance(value, memoryview):
            yield value.obj, name
        elif (target := leads_to(value)) is not None:
            yield target, name
        else:
            yield from self._kept_in_library(value, name, reads, code)
        # One that the step makes has none yet when its `__init__` begins.
        if isinstance(value, torch.nn.Module) and "_modules" in vars(value):
            yield from self._submodules(value, name, reads)
        if not isinstance(value, (tuple, list, set, FunctionType, MethodType, Iterator)):
            yield from self._attributes(value, name, reads, code, is_users=is_users)

    def _proxy_of_class(
        self, proxy: MappingProxyType[str, Any], name: Name, code: CodeType | None
    ) -> Iterator[tuple[Any, Name]]:
        """Return what a class holds, all of which code reads by keys that nothing names."""
        kind = class_of_proxy(proxy)
        if kind is not None and users_classes(kind)[:1] == [kind]:
            keys = functools.partial(tuple, proxy)
            self.readings.add((id(kind), "keys"), part_name("the names", None, name), keys)
            every = CodeReads(attributes=set(proxy), global_names={"vars"})
            self._every[id(proxy)] = every  # so that its id stays its own
            yield from self._class_attributes(kind, set(proxy), name, every, code)

    def _kept_in_library(
        self, value: Any, name: Name, reads: CodeReads, code: CodeType | None
    ) -> Iterator[tuple[Any, Name]]:
        """Return what methods of a library's object read and write."""
        if isinstance(value, MappingProxyType):
            yield from self._proxy_of_class(value, name, code)
            return
        if isinstance(value, threading.local):  # each thread has attributes of its own
            for key in reads.touched:
                part = part_name("attribute", key, name)
                yield self.touch(value, "attribute", key, part, reads, code), part
            return
        if isinstance(value, torch.distributions.Distribution):
            self.lazy.setdefault(id(value), (vars(value), frozenset(vars(value))))
        held = held_by_special_methods(value)
        for key in {held} if held else kept_by_methods(value, reads.attributes):
            part = part_name("attribute", key, name)
            yield self.place(vars(value), "entry", key, part, is_loaded=True), part

    def _function(
        self, function: FunctionType, name: Name, reads: CodeReads
    ) -> Iterator[tuple[Any, Name]]:
        self._note_parts(function)
        if reads.attribute_stores and is_users_own(function.__code__.co_filename):
            of = functools.partial(describe_function, function)
            yield function.__dict__, part_name("attributes", None, of)
        known = self.functions.setdefault(id(function.__code__), [])
        if any(one is function for one in known):
            return
        known.append(function)
        if not is_users_file(function.__code__.co_filename):
            if str(function.__module__).partition(".")[0] == "torch" and not function.__closure__:
                return
        of = functools.partial(describe_function, function)
        for value in function.__defaults__ or ():
            yield value, part_name("a default argument", None, of)
        if function.__kwdefaults__:
            yield function.__kwdefaults__, part_name(_PARTS["__kwdefaults__"], None, of)
        for key, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=False
        ):
            # The function that a decorator wraps; a cell itself is a place once its function runs.
            value = cell_value(cell)
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                yield value, part_name("closure variable", key, of)
        yield from self._kept_by_function(function, of)

    @staticmethod
    def _kept_by_function(function: FunctionType, of: Name) -> Iterator[tuple[Any, Name]]:
        if function is os.getenv:
            yield vars(os.environ)["_data"], lambda: "os.environ"
        registry = vars(function).get("registry")
        if isinstance(registry, MappingProxyType):
            # Of functools.singledispatch, beside a table that each call may fill.
            yield registry, part_name("functions", None, of)
        elif function.__dict__:
            yield function.__dict__, part_name("attributes", None, of)

    def _note_parts(self, function: FunctionType) -> None:
        """Record what can be replaced of a function, as a reload of its file in a notebook does."""
        if is_users_own(function.__code__.co_filename):
            of = functools.partial(describe_function, function)
            for key, word in _PARTS.items():
                if getattr(function, key) is not None:
                    part = part_name(word, None, of)
                    self.place(function, "attribute", key, part, is_loaded=True)

    def _items(
        self, value: Any, name: Name, reads: CodeReads, code: CodeType | None
    ) -> Iterator[tuple[Any, Name]]:
        contents = None
        if isinstance(value, CONTAINERS):
            contents = self.contents.get(id(value))
            if contents is None:
                contents = self.contents[id(value)] = Contents(value, name, flat(value))
                contents.put_stand_ins(self.stand_ins.of)
            if not contents.line[0] and reads.entry_lines and code is not None:
                contents.line = code.co_filename, reads.entry_lines[0]
        if len(value) > _MOST_ITEMS or isinstance(value, set):
            return
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        takes_any = isinstance(value, (list, collections.deque, dict))
        before = {} if contents is None else contents.by_key()
        for held_key, item in pairs:
            key = held_key if contents is None else contents.before_stand_in(held_key)
            word = "entry" if isinstance(value, dict) else "item"
            part = part_name(word, key, name)
            # One that the step has put there goes when the contents are put back.
            # A weak reference to a tensor finds no entry of its stand-in.
            is_found = key is held_key or not isinstance(key, weakref.ref)
            if takes_any and is_number(item) and is_found and before.get(key, ABSENT) is item:
                self.place(value, "entry", key, part, is_loaded=True)
            yield item, part

    def _submodules(
        self, module: torch.nn.Module, name: Name, reads: CodeReads
    ) -> Iterator[tuple[Any, Name]]:
        every = reads.traverses or isinstance(module, _TORCH_CONTAINERS)
        self.modules.setdefault(id(module), (module, name))
        self.modes.add(module)
        for key, child in module._modules.items():
            if child is not None and (every or key in reads.attributes):
                yield child, self.known.get(id(child), (child, part_name("module", key, name)))[1]
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield tensor, part_name("attribute", key, name)

    def _attributes(
        self, value: Any, name: Name, reads: CodeReads, code: CodeType | None, *, is_users: bool
    ) -> Iterator[tuple[Any, Name]]:
        own = vars(value) if isinstance(value, ModuleType) else own_attributes(value)
        if own is not None and users_classes(type(value)) and not isinstance(value, _OWN_CLASS):
            self.instances.setdefault(id(value), (value, name))
            self.classes.setdefault(id(value), type(value))
        if own is not None:
            if is_users:
                self.unnamed.keep(value, own, name, reads)
                if _reads_all(reads) and _is_looked_through(value):
                    yield own, part_name("the attributes", None, name)
            for key in _keys_of(value, own, reads, is_users=is_users):
                if not hasattr(inspect.getattr_static(type(value), key, None), "__set__"):
                    part = part_name("attribute", key, name)
                    yield self.touch(own, "entry", key, part, reads, code), part
        if is_users or own is None:
            yield from self._class_attributes(value, reads.touched, name, reads, code)
        else:
            self.index_class(type(value), reads.touched)

    def _class_attributes(
        self, value: Any, names: set[str], name: Name, reads: CodeReads, code: CodeType | None
    ) -> Iterator[tuple[Any, Name]]:
        owners = users_classes(value if isinstance(value, type) else type(value))
        if isinstance(value, type):
            owners += users_classes(type(value))  # a metaclass, whose attributes a class has, too
        reads_all = isinstance(value, type) and _reads_all(reads)
        if reads_all:
            names = names.union(*map(vars, owners))
        names = names - _OF_EVERY_CLASS
        for k, owner in enumerate(owners):
            for key in names & vars(owner).keys():
                for nearer in owners[:k]:  # one that is given the attribute takes precedence
                    if key not in vars(nearer):
                        part = part_name("attribute", key, functools.partial(_class_name, nearer))
                        self.touch(nearer, "own", key, part, reads, code)
                found = vars(owner)[key]
                if type(found).__name__ in ("member_descriptor", "getset_descriptor"):
                    part = part_name("attribute", key, name)
                    yield self.touch(value, "attribute", key, part, reads, code), part
                    continue
                part = part_name("attribute", key, functools.partial(_class_name, owner))
                # What the class holds: a classmethod gives another function each time.
                self.touch(owner, "own", key, part, reads, code)
                if reads_all and is_plain(found):
                    self.place(owner, "own", key, part, is_loaded=True)
                yield unwrapped(found), part
                if isinstance(found, functools.singledispatchmethod):
                    yield found.dispatcher, part

    def index_class(self, kind: type, names: frozenset[str] | set[str]) -> None:
        """Index the functions of a class by their code, to find the closures of those that run."""
        for owner in kind.__mro__:
            if str(owner.__module__).partition(".")[0] in ("torch", "builtins"):
                continue
            for key in names & vars(owner).keys():
                function = unwrapped(vars(owner)[key])
                while isinstance(function, FunctionType):
                    known = self.functions.setdefault(id(function.__code__), [])
                    if any(one is function for one in known):
                        break
                    known.append(function)
                    self._note_parts(function)
                    function = getattr(function, "__wrapped__", None)

    def touch(
        self,
        holder: Any,
        kind: str,
        key: Any,
        name: Name,
        reads: CodeReads,
        code: CodeType | None,
    ) -> Any:
        """Record a place that code names; return its value."""
        is_global = isinstance(holder, dict) and "__builtins__" in holder
        loads = reads.global_names | reads.attributes if is_global else reads.attributes
        stores = reads.attribute_stores
        if is_global and key in reads.global_stores:
            stores = reads.global_stores
        is_loaded = key in loads and key not in reads.stored_first
        line = (code.co_filename, stores[key]) if code is not None and key in stores else ("", 0)
        return self.place(holder, kind, key, name, is_loaded=is_loaded, line=line)

    def place(
        self,
        holder: Any,
        kind: str,
        key: Any,
        name: Name,
        *,
        is_loaded: bool,
        line: tuple[str, int] = ("", 0),
    ) -> Any:
        """Record a place; return its value. `line` is that of a store, if there is one."""
        at = (id(holder), kind, key)
        place = self.places.get(at)
        if place is None:
            place = Place(holder, kind, key, name, ABSENT)
            # What the capture put there goes with it.
            place.before = original_of(value := place.now())
            if isinstance(value, FakeTensor):
                tensor = self.stand_ins.tensor_of(value)
                if tensor is None:
                    return value
                # A tensor of the state, whose fake the capture has put there.
                place.before, place.stand_in = tensor, value
            if (mode := self.modes.before(place)) is not None:
                place.before = mode  # PyTorch's train() and eval() set it unseen
            self.places[at] = place
            other = self.stand_ins.of(value)
            if other is not value:
                place.put_stand_in(other)
            elif is_number(value):
                other = self._replaced(place)
                if other is not value:
                    place.put(other)
                    place.symbol = other
        value = place.now()
        if line[1] and not place.line[1]:
            place.line = line
        if is_loaded and (original_of(value) is place.before or value is place.symbol):
            place.is_loaded = True
        held = place.held()
        return held if held is place.stand_in else value


def _reads_all(reads: CodeReads) -> bool:
    return bool((reads.attributes | reads.global_names) & _ALL)


def _is_looked_through(value: Any) -> bool:
    """Return whether `vars` of an object counts as a whole; of others only what is named does."""
    return not isinstance(value, _OWN_CLASS) and is_users_object(value)


def _keys_of(value: Any, own: dict[str, Any], reads: CodeReads, *, is_users: bool) -> set[str]:
    """Return the attributes of an object, present and absent, that code may read or write."""
    touched = reads.touched
    keys = touched & own.keys()
    is_module = isinstance(value, torch.nn.Module)
    if is_module:
        keys -= INTERNAL - {"training"}
    if not isinstance(value, ModuleType):
        # Attributes that are stored later, read with getattr, or defined in the class: an
        # attribute of the object would take precedence.
        absent = reads.attribute_stores.keys() | reads.optional
        if is_users:
            of_class = names_of_class(type(value))
            absent |= touched if "__getattr__" in of_class else touched & of_class
        keys |= absent - own.keys() - (INTERNAL if is_module else frozenset())
    return keys


def part_name(word: str, key: Any, name: Name) -> Name:
    """Return the name of a part of an object, as "entry 'lr' of global 'options' (train.py)"."""
    if key is None:
        return lambda: f"{word} of {name()}"
    return lambda: f"{word} {in_words(key)} of {name()}"


def _class_name(owner: type) -> str:
    return f"class {owner.__name__}"
