# SPDX-License-Identifier: Apache-2.0
"""What the user's code asks the process or a tensor for, and no object that it holds has.

Code that names a function below may have called it: what it returns is guarded. Settings that
change what any step computes are in `ambient`, whether a step asks for them or not.
"""

from __future__ import annotations

import decimal
import functools
import inspect
import locale
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy
import torch

Read = Callable[[], Any]
_MOST_DEEP = 4


def _thread() -> Any:
    return threading.current_thread().name, threading.get_ident()


def _locale() -> Any:
    return locale.setlocale(locale.LC_ALL)


def _decimals() -> Any:
    context = decimal.getcontext()
    return context.prec, context.rounding


def _numpy_errors() -> Any:
    return tuple(numpy.geterr().values())


_CUDA: Any = torch.backends.cuda
# By the names that ask: (name in a message, function that returns the current value).
_OF_PROCESS: dict[str, tuple[str, Read]] = {
    "initial_seed": ("the seed of torch", torch.initial_seed),
    "get_num_threads": ("torch.get_num_threads()", torch.get_num_threads),
    "is_deterministic_algorithms_warn_only_enabled": (
        "torch.is_deterministic_algorithms_warn_only_enabled()",
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    "get_deterministic_debug_mode": (
        "torch.get_deterministic_debug_mode()",
        torch.get_deterministic_debug_mode,
    ),
    "is_warn_always_enabled": ("torch.is_warn_always_enabled()", torch.is_warn_always_enabled),
    **{
        name: (f"torch.backends.cuda.{name}()", getattr(_CUDA, name))
        for name in (
            "flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled",
            "cudnn_sdp_enabled",
        )
    },
    **dict.fromkeys(("current_thread", "get_ident"), ("the thread of the call", _thread)),
    "active_count": ("threading.active_count()", threading.active_count),
    **dict.fromkeys(("getpid", "getppid"), ("the process", os.getpid)),
    **dict.fromkeys(("getcwd", "cwd"), ("the current folder", os.getcwd)),
    **dict.fromkeys(
        ("getlocale", "localeconv", "setlocale", "getpreferredencoding"), ("the locale", _locale)
    ),
    "getrecursionlimit": ("sys.getrecursionlimit()", sys.getrecursionlimit),
    **dict.fromkeys(("getcontext", "localcontext"), ("the context of decimal", _decimals)),
    **dict.fromkeys(("geterr", "errstate"), ("numpy.geterr()", _numpy_errors)),
}  # fmt: skip
_SHAPE = ("shape", "size", "numel", "nelement", "ndim", "dim", "len", "nbytes")
# By the attributes and methods that ask a tensor: (name in a message, what is asked).
_OF_TENSOR: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "requires_grad": ("requires_grad", lambda one: one.requires_grad),
    "is_leaf": ("is_leaf", lambda one: one.is_leaf),
    # Not which one: that of a model that another step trains is another one at each call.
    "grad": ("the gradient", lambda one: "set" if one.is_leaf and one.grad is not None else "None"),
    **dict.fromkeys(_SHAPE, ("the shape", lambda one: tuple(one.shape))),
    **dict.fromkeys(("dtype", "is_floating_point"), ("the dtype", lambda one: one.dtype)),
    **dict.fromkeys(("device", "is_cuda", "get_device"), ("the device", lambda one: one.device)),
    **dict.fromkeys(("stride", "is_contiguous"), ("the strides", lambda one: one.stride())),
    "is_shared": ("is_shared()", lambda one: one.is_shared()),
}


def asked_of_process(names: Iterable[str]) -> Iterator[tuple[str, Read]]:
    """Return what code asks that names these: names in a message, and functions that read it."""
    for name in _OF_PROCESS.keys() & names:
        yield _OF_PROCESS[name]


def asked_of_tensor(tensor: torch.Tensor, names: Iterable[str]) -> Iterator[tuple[str, Read]]:
    """Return what code asks of a tensor that names these attributes and methods."""
    for name in _OF_TENSOR.keys() & names:
        word, read = _OF_TENSOR[name]
        yield word, functools.partial(read, tensor)


def asked_of_library(
    module: Any, names: frozenset[str] | set[str], depth: int = 0
) -> Iterator[tuple[str, Read]]:
    """Return the settings that a library's module keeps and code names, as `sys.argv`.

    They are in modules of modules, too: `torch.backends.cudnn.benchmark`.
    """
    of = getattr(module, "__name__", type(module).__name__)
    for name in sorted(names):
        if name.isupper() or name.startswith("__"):
            continue  # a constant
        held = inspect.getattr_static(module, name, None)
        if isinstance(held, ModuleType) or type(held).__module__.startswith("torch.backends"):
            if depth < _MOST_DEEP and not isinstance(held, torch.backends.ContextProp):
                yield from asked_of_library(held, names, depth + 1)
                continue
        read = functools.partial(_setting, module, name)
        is_kept = type(held) in (bool, int, str, list)
        is_computed = isinstance(held, (property, torch.backends.ContextProp)) or (
            held is None and type(module).__module__ == "torch.backends.cuda"
        )
        if is_kept or (is_computed and read() is not None):
            yield f"{of}.{name}", read


def _setting(module: Any, name: str) -> Any:
    try:
        value = getattr(module, name, None)
    except RuntimeError:  # of one that this build does not have
        return None
    return tuple(value) if isinstance(value, list) else value
