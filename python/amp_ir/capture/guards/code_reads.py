# SPDX-License-Identifier: Apache-2.0
"""The names in a function's bytecode: the attributes, globals and entries that it may access."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType
from typing import Any

import attrs

from amp_ir.capture.guards.loaded_first import loaded_first

# By the kind of their argument and not one by one, since each version of Python has others. A name
# that is neither is a local one of a class body, or an import.
_NAMED = frozenset(dis.opname[code] for code in dis.hasname)
_OF_CELLS = frozenset(dis.opname[code] for code in dis.hasfree)
_STORES = ("STORE_", "DELETE_")
_ATTRIBUTE_STORES = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_GLOBAL_STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_CELL_STORES = frozenset(name for name in _OF_CELLS if name.startswith(_STORES))
_LOADS = frozenset(name for name in _NAMED if name.startswith("LOAD_"))
_ATTRIBUTE_LOADS = frozenset(name for name in _LOADS if name.endswith(("_ATTR", "_METHOD")))
_GLOBAL_LOADS = _LOADS - _ATTRIBUTE_LOADS
_ATTRIBUTE_LOADS |= {"IMPORT_FROM"}
# Those that make or pass on a cell read nothing in it.
_CELL_LOADS = _OF_CELLS - _CELL_STORES - {"MAKE_CELL", "LOAD_CLOSURE", "COPY_FREE_VARS"}
_ENTRY_STORES = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"})
# With these, code reaches attributes whose names are strings, or modules that it does not name.
_BY_STRING = frozenset({"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"})
_OF_DICTIONARIES = frozenset({"vars", "__dict__"})
# With these it may store under a name that no bytecode has.
_UNNAMED_STORES = frozenset(
    {"setattr", "delattr", "__setattr__", "__delattr__", "vars", "__dict__"}
)
# What code names that goes on where an attribute is not there.
_CAUGHT = frozenset({"AttributeError", "Exception", "BaseException"})
_TRAVERSALS = frozenset(
    {"children", "named_children", "modules", "named_modules", "get_submodule", *_BY_STRING}
)


@attrs.define
class CodeReads:
    """Names by how the code uses them, those of functions defined inside included.

    The values of the `*_stores` are the lines of the first store. `stored_first` are the attributes
    and globals that are stored on every way to a load of them in the same code. `stores_unnamed`
    says that it may store attributes under computed names. `optional` are attributes that it does
    without where they are not there.
    """

    attributes: set[str] = attrs.Factory(set)
    attribute_stores: dict[str, int] = attrs.Factory(dict)
    global_names: set[str] = attrs.Factory(set)
    global_stores: dict[str, int] = attrs.Factory(dict)
    cell_loads: set[str] = attrs.Factory(set)
    cell_stores: dict[str, int] = attrs.Factory(dict)
    stored_first: set[str] = attrs.Factory(set)
    lines: dict[str, int] = attrs.Factory(dict)
    entry_lines: list[int] = attrs.Factory(list)
    optional: frozenset[str] = frozenset()
    strings: frozenset[str] = frozenset()
    traverses: bool = False
    stores_unnamed: bool = False
    inner: frozenset[CodeType] = frozenset()

    @property
    def touched(self) -> set[str]:
        """Return attributes that are loaded or stored."""
        return self.attributes | self.attribute_stores.keys()


@functools.lru_cache(maxsize=4096)
def reads_of(code: CodeType) -> CodeReads:
    """Return the names in the code, and in the functions defined in it."""
    found = CodeReads()
    inner: set[CodeType] = set()
    strings: set[str] = set()
    _add(found, code, inner, strings)
    found.inner = frozenset(inner)
    found.strings = frozenset(strings)
    names = found.global_names | found.attributes
    found.traverses = bool(names & _TRAVERSALS)
    found.stores_unnamed = bool(names & _UNNAMED_STORES)
    if names & (_BY_STRING | _OF_DICTIONARIES):
        found.optional = frozenset(strings)
        found.attributes |= strings
        found.stored_first -= strings
    if "globals" in names:
        found.global_names |= strings
        found.stored_first -= strings
    if found.global_names & _CAUGHT:
        found.optional |= found.attributes
    return found


def with_names(reads: CodeReads, names: frozenset[str]) -> CodeReads:
    """Return reads that read these attributes, too, and do without those that are not there."""
    return attrs.evolve(
        reads,
        attributes=reads.attributes | names,
        optional=reads.optional | names,
        stored_first=reads.stored_first - names,
    )


def line_of_entry(code: CodeType, key: str) -> int:
    """Return the line that stores an entry and names this key, 0 where none does."""
    loads: set[int] = set()
    for name, argument, line in _instructions(code):
        if isinstance(argument, str) and argument == key and "CONST" in name:
            loads.add(line)
        elif name in _ENTRY_STORES and line in loads:
            return line
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return next(filter(None, (line_of_entry(one, key) for one in inner)), 0)


def _add(
    found: CodeReads,
    code: CodeType,
    inner: set[CodeType],
    strings: set[str],
    *,
    is_inner: bool = False,
) -> None:
    kinds = {
        "attribute": (found.attributes, _ATTRIBUTE_STORES),
        "global": (found.global_names, _GLOBAL_STORES),
        "cell": (found.cell_loads, _CELL_STORES),
    }
    loaded_outside = {kind: loads.copy() for kind, (loads, _) in kinds.items()}
    stored: set[tuple[str, str]] = set()
    for name, argument, line in _instructions(code):
        _add_one(found, name, argument, line)
        stored |= {(kind, argument) for kind, (_, stores) in kinds.items() if name in stores}
    if is_inner:  # others of the same closure may load it before
        stored = {(kind, name) for kind, name in stored if kind != "cell"}
    of_inner = {
        ("cell", name)
        for one in code.co_consts
        if isinstance(one, CodeType)
        for name in one.co_freevars
    }
    if stored & of_inner or any(name in kinds[kind][0] for kind, name in stored):
        stored -= loaded_first(code)
    found.stored_first |= {name for kind, name in stored if name not in loaded_outside[kind]}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner.add(constant)
            _add(found, constant, inner, strings, is_inner=True)
        elif isinstance(constant, str):
            # An attrgetter's may have dots, as the names of modules have.
            parts = constant.split(".")
            if all(part.isidentifier() for part in parts):
                strings |= {constant, *parts}


def _add_one(found: CodeReads, name: str, argument: Any, line: int) -> None:
    if name in _ENTRY_STORES:
        found.entry_lines.append(line)
    elif name in _ATTRIBUTE_LOADS:
        found.attributes.add(argument)
        found.lines.setdefault(argument, line)
    elif name in _GLOBAL_LOADS:
        found.global_names.add(argument)
        found.lines.setdefault(argument, line)
    elif name in _CELL_LOADS:
        found.cell_loads.add(argument)
    else:
        for opcodes, stores in (
            (_ATTRIBUTE_STORES, found.attribute_stores),
            (_GLOBAL_STORES, found.global_stores),
            (_CELL_STORES, found.cell_stores),
        ):
            if name in opcodes:
                stores.setdefault(argument, line)


def _instructions(code: CodeType) -> Iterator[tuple[str, Any, int]]:
    """Return (opcode, argument, line) of each instruction."""
    starts = dict(dis.findlinestarts(code))
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        yield instruction.opname, instruction.argval, line
