# SPDX-License-Identifier: Apache-2.0
"""The import of TVM, in half of its time; importing this file imports it.

TVM 0.27 looks up a type and some hundred ops that this build lacks, and catches the errors. The
first error of TVM's C++ in a process reads the symbols of all libraries that are loaded, for its
backtrace: 0.6 s beside PyTorch's. So these errors are raised in Python while TVM is imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tvm_ffi
from tvm_ffi import core, registry

from amp_ir.host.paused_garbage_collection import paused_garbage_collection


@contextlib.contextmanager
def _errors_in_python() -> Iterator[None]:
    """Raise what lookups of types and ops raise before C++ does."""
    find_type, init = core._object_type_key_to_index, tvm_ffi.init_ffi_api

    def find_known_type(type_key: str) -> int | None:
        return find_type(type_key) if type_key in registry.get_registered_type_keys() else None

    def init_with_quick_ops(namespace: str, target_module_name: str | None = None) -> None:
        init(namespace, target_module_name)
        if namespace == "ir":
            restores.enter_context(_quick_ops(sys.modules[target_module_name or namespace]))

    with contextlib.ExitStack() as restores:
        restores.callback(setattr, core, "_object_type_key_to_index", find_type)
        restores.callback(setattr, tvm_ffi, "init_ffi_api", init)
        core._object_type_key_to_index = find_known_type
        tvm_ffi.init_ffi_api = init_with_quick_ops
        yield


@contextlib.contextmanager
def _quick_ops(api: Any) -> Iterator[None]:
    """Let TVM's functions for ops, in its module `api`, fail in Python."""
    register: Callable[[str, str], None] = api.RegisterOp
    get_op: Callable[[str], Any] = api.GetOp
    set_attribute: Callable[[str, str, Any, int], None] = api.RegisterOpAttr
    known: set[str] = set()

    def is_known(name: str) -> bool:
        if name not in known and len(names := api.ListOpNames()) > len(known):
            known.update(names)
        return name in known

    def register_known_op(name: str, description: str) -> None:
        register(name, description)
        known.add(name)

    def get_known_op(name: str) -> Any:
        if not is_known(name):
            raise AttributeError(f"Operator {name} is not registered")
        return get_op(name)

    def set_new_attribute(name: str, key: str, value: Any, level: int) -> None:
        if isinstance(value, str) and is_known(name) and api.OpGetAttr(get_op(name), key) == value:
            raise ValueError(f"attribute {key} of operator {name} is this already")
        set_attribute(name, key, value, level)  # registers the op, too
        known.add(name)

    replaced = api.RegisterOp, api.GetOp, api.RegisterOpAttr
    api.RegisterOp, api.GetOp, api.RegisterOpAttr = (
        register_known_op,
        get_known_op,
        set_new_attribute,
    )
    try:
        yield
    finally:
        api.RegisterOp, api.GetOp, api.RegisterOpAttr = replaced


if "tvm" not in sys.modules:
    with paused_garbage_collection(), _errors_in_python():
        import tvm  # noqa: F401
