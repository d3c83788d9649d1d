# SPDX-License-Identifier: Apache-2.0
"""The location of a traced op in the user's program: module path, phase, source line.

Forward: the modules being called and the innermost source line outside of torch and amp_ir.
Backward: autograd numbers its nodes; an op of the backward pass has the location of the forward op
that made the node. Optimizer: everything inside `Optimizer.step` and gradient clipping.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import attrs
import torch

from amp_ir.ir.location import META_KEY, Location, Phase, current_precision

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(__file__).parent.parent) + "/"
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + "/"
_CLIPPING = str(Path(torch.__file__).parent / "nn" / "utils" / "clip_grad.py")
_INSTALLED = ("site-packages", "dist-packages")
_is_users: dict[str, bool] = {}


def is_users_file(name: str) -> bool:
    """Return whether a source file belongs to the user (or to their model library)."""
    known = _is_users.get(name)
    if known is None:
        library = name.startswith(_STANDARD_LIBRARY) and "site-packages" not in name
        known = not (library or name.startswith((_TORCH, _OURS, "<")))
        _is_users[name] = known
    return known


def is_users_own(name: str) -> bool:
    """Return whether a source file is the user's, and not of an installed package."""
    return is_users_file(name) and not any(one in name for one in _INSTALLED)


def innermost_line(frame: FrameType | None) -> tuple[str, int, bool]:
    """Return file and line of the user's innermost frame, and whether torch clips there."""
    is_clipping = False
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users_file(name):
            return name, frame.f_lineno, is_clipping
        is_clipping = is_clipping or name == _CLIPPING
        frame = frame.f_back
    return "", 0, is_clipping


def line_of_error(trace: TracebackType | None) -> tuple[str, int]:
    """Return file and line of the user's innermost frame in a traceback; ("", 0) if none."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(trace)]
    users = [(name, number) for name, number in lines if is_users_file(name)]
    return users[-1] if users else ("", 0)


class Locator:
    """A tracker of the location of the op being traced."""

    def __init__(self, models: list[torch.nn.Module]) -> None:
        self._paths = module_paths(models)
        self._modules: list[str] = []
        self._failed_module: str | None = None
        self._in_optimizer = 0
        self._given: Location | None = None
        self._by_sequence: dict[int, Location] = {}
        self._last_backward = Location(phase="backward")
        self._interned: dict[Location, Location] = {}

    @property
    def module(self) -> str:
        """The path of the module being called."""
        return self._modules[-1] if self._modules else ""

    @contextlib.contextmanager
    def optimizing(self) -> Iterator[None]:
        """Assign everything traced inside to the optimizer phase."""
        self._in_optimizer += 1
        try:
            yield
        finally:
            self._in_optimizer -= 1

    def leaves_optimizer(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose ops are no part of the optimizer that calls it."""

        def outside(*args: Any, **kwargs: Any) -> Any:
            before, self._in_optimizer = self._in_optimizer, 0
            try:
                return function(*args, **kwargs)
            finally:
                self._in_optimizer = before

        return outside

    @contextlib.contextmanager
    def at(self, location: Location) -> Iterator[None]:
        """Assign everything traced inside to a location."""
        before, self._given = self._given, location
        try:
            yield
        finally:
            self._given = before

    def path_of(self, module: torch.nn.Module) -> str:
        """Return the path of a module of the step."""
        return self._paths.get(id(module), "")

    def wrap_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `torch.nn.Module.__call__` that tracks the module being called."""

        def tracked(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._modules.append(self._paths.get(id(module), self.module))
            try:
                return call(module, *args, **kwargs)
            except Exception:
                self._failed_module = self._failed_module or self.module
                raise
            finally:
                self._modules.pop()

        return tracked

    def here(self) -> Location:
        """Return the location of the op being dispatched."""
        if self._given is not None:
            return self._interned.setdefault(self._given, self._given)
        node = torch._C._current_autograd_node()
        if node is not None and not self._in_optimizer:
            location = self._of_backward(node)
        else:
            location = self._of_frame(sys._getframe(1))
        self._by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, location)  # type: ignore[attr-defined]
        return location

    def called_at(self) -> str:
        """Return where the user's program calls a package outside of any module, as a clause."""
        frame: FrameType | None = sys._getframe(1)
        name, _, _ = innermost_line(frame)
        if self._modules or is_users_own(name):
            return ""
        while frame is not None and not is_users_own(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        return f" (called at {frame.f_code.co_filename}:{frame.f_lineno})"

    def of_error(self, error: BaseException) -> Location:
        """Return the location of an error that the user's step raised."""
        file, line = line_of_error(error.__traceback__)
        module = self._failed_module or self.module
        return Location(module, self._phase(is_clipping=False), file, line)

    def _of_frame(self, frame: FrameType | None) -> Location:
        file, line, is_clipping = innermost_line(frame)
        phase = self._phase(is_clipping=is_clipping)
        location = Location(self.module, phase, file, line, precision=current_precision())
        return self._interned.setdefault(location, location)

    def _phase(self, *, is_clipping: bool) -> Phase:
        return "optimizer" if self._in_optimizer or is_clipping else "forward"

    def _of_backward(self, node: Any) -> Location:
        """Return the location of the node's forward op; for accumulation the last known one."""
        forward = self._by_sequence.get(node._sequence_nr())
        if forward is not None:
            location = attrs.evolve(forward, phase="backward")
            self._last_backward = self._interned.setdefault(location, location)
        return self._last_backward


def module_paths(models: list[torch.nn.Module]) -> dict[int, str]:
    """Return the path of every module by its id; the second and later models are "model1", ..."""
    paths: dict[int, str] = {}
    for index, model in enumerate(models):
        prefix = f"model{index}" if index else ""
        for name, module in model.named_modules(prefix=prefix):
            paths.setdefault(id(module), name)
    return paths


class NodeMarker:
    """A writer of locations on the nodes that a graph gained since the last mark."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._root = graph._root
        self._last = self._root.prev

    def mark(self, location: Location) -> None:
        """Mark every new node that has no location yet."""
        node = self._last.next
        while node is not self._root:
            node.meta.setdefault(META_KEY, location)
            self._last, node = node, node.next
