# SPDX-License-Identifier: Apache-2.0
"""The import of TVM, whoever asks for it: after PyTorch, in half of the time, ready for threads.

TVM 0.27 looks up a type and some hundred ops that this build lacks, and catches the errors. The
first error of TVM's C++ in a process reads the symbols of all libraries that are loaded, for its
backtrace: 0.6 s beside PyTorch's. So these errors are raised in Python while TVM is imported.

`import amp_ir` does not import TVM. It puts a finder before Python's, which changes how the module
`tvm` is executed, and takes itself away when it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from amp_ir.host.paused_garbage_collection import paused_garbage_collection


@contextlib.contextmanager
def _errors_in_python() -> Iterator[None]:
    """Raise what lookups of types and ops raise before C++ does."""
    import tvm_ffi
    from tvm_ffi import core, registry

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


class _TvmFinder(importlib.abc.MetaPathFinder):
    """Finds `tvm` as the other finders do, and has it executed by `_execute`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of `tvm`; None for any other module, and where there is no TVM."""
        if fullname != "tvm":
            return None
        others = [one for one in sys.meta_path if one is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((one for one in specs if one is not None), None)
        if spec is not None and spec.loader is not None:
            # On the loader of this import alone, which then is as it was.
            execute = functools.partial(_execute, spec.loader, self)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _execute(loader: Any, finder: _TvmFinder, module: ModuleType) -> None:
    """Execute the module `tvm`, between what has to come before and after it."""
    # Torch comes first: TVM and our libraries use the OpenMP runtime that it brings (native.py).
    import amp_ir.host.torch_version  # noqa: F401

    del loader.exec_module
    with paused_garbage_collection(), _errors_in_python():
        loader.exec_module(module)
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
    _prepare_for_threads()


def _prepare_for_threads() -> None:
    import amp_ir.host.tvm_threads  # noqa: F401


def on_import() -> None:
    """Do the above when TVM is imported; where it is already, only what can be done afterwards."""
    if "tvm" in sys.modules:
        _prepare_for_threads()
    elif not any(isinstance(one, _TvmFinder) for one in sys.meta_path):
        sys.meta_path.insert(0, _TvmFinder())
