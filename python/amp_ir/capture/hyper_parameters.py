# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters of optimizers: read from `param_groups` at every call, never frozen.

A float in a param group (lr, weight_decay, betas, ...) is an input of the step. Every other entry
(flags, integers, None) is frozen into the graph and guarded.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import attrs
import torch

from amp_ir.capture.later_number import LaterNumber, math_of_numbers
from amp_ir.capture.patches.restores import restoring
from amp_ir.capture.patches.thread_patches import patch_function
from amp_ir.capture.symbolic_float import FloatTape, SymbolicFloat
from amp_ir.errors import StateError

# Flags that choose an implementation, not a result: only the plain loop can be traced.
_FOLLOWED_BY_MATH = ("sqrt", "exp", "log", "pow")
IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable")


@attrs.frozen
class HyperParameter:
    """One float of one param group; `item` is its position when the entry is a tuple (betas)."""

    name: str
    optimizer: torch.optim.Optimizer = attrs.field(eq=False)
    group: int
    key: str
    item: int | None = None

    def is_gone(self) -> bool:
        """Return whether its group lacks the entry, as after `load_state_dict` of one without.

        An entry that the optimizer has no default for, the user's own, is gone when it holds no
        number, too.
        """
        groups = self.optimizer.param_groups
        if self.group >= len(groups):
            return False
        is_missing = self.key not in groups[self.group]
        return is_missing or (self.key not in self.optimizer.defaults and self._number() is None)

    def value(self) -> float:
        """Return the current value.

        Raises:
            StateError: the entry is gone, or is no longer a number.
        """
        number = self._number()
        if number is None:
            entry = self._entry()
            where = f"param_groups[{self.group}][{self.key!r}]"
            raise StateError(
                f"{self.name} is an input of the compiled step, but {where} is now {entry!r}; "
                "expected a number. Restore it, or capture the step again"
            )
        return number

    def _entry(self) -> Any:
        groups = self.optimizer.param_groups
        entry = groups[self.group].get(self.key) if self.group < len(groups) else None
        if self.item is not None and isinstance(entry, (tuple, list)):
            return entry[self.item] if self.item < len(entry) else None
        return entry

    def _number(self) -> float | None:
        entry = self._entry()
        return float(entry) if _is_number(entry) else None


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype.is_floating_point
    return isinstance(value, (float, int)) and not isinstance(value, bool)


def _is_input(key: str, value: object) -> bool:
    """Return whether an entry is an input: floats, and a learning rate even if it is an integer."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return _is_number(value) and (not isinstance(value, int) or key == "lr")


def find_hyper_parameters(optimizers: list[torch.optim.Optimizer]) -> list[HyperParameter]:
    """Return every float of every param group, in order; of a group of two optimizers once."""
    found = []
    seen: set[int] = set()
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            if id(group) in seen:
                continue
            seen.add(id(group))
            for key, value in group.items():
                name = f"optimizer{index}.group{number}.{key}"
                if _is_input(key, value):
                    found.append(HyperParameter(name, optimizer, number, key))
                elif key != "params" and isinstance(value, (tuple, list)):
                    found += [
                        HyperParameter(f"{name}.{item}", optimizer, number, key, item)
                        for item, entry in enumerate(value)
                        if _is_input(key, entry)
                    ]
    return found


def put_values(inputs: list[HyperParameter], values: Sequence[float]) -> Callable[[], list[str]]:
    """Put symbolic floats or other values into the param groups; choose the plain implementation.

    Returns:
        a function that names the entries which the step has overwritten since.
    """
    put: dict[tuple[int, int, str], tuple[dict[str, Any], Any]] = {}
    for hyper, value in zip(inputs, values, strict=True):
        group = hyper.optimizer.param_groups[hyper.group]
        if hyper.item is None:
            group[hyper.key] = value
        else:
            entries = list(group[hyper.key])
            entries[hyper.item] = value
            group[hyper.key] = tuple(entries)
        put[id(hyper.optimizer), hyper.group, hyper.key] = group, group[hyper.key]
    for optimizer in {id(h.optimizer): h.optimizer for h in inputs}.values():
        for group in optimizer.param_groups:
            group.update({flag: False for flag in IMPLEMENTATION_FLAGS if flag in group})

    def overwritten() -> list[str]:
        return [key for (_, _, key), (group, own) in put.items() if group.get(key) is not own]

    return overwritten


@functools.lru_cache(maxsize=1)
def _readers_of_counters(_count: int, _latest: str) -> list[ModuleType]:
    """Return PyTorch's modules of optimizers; to find them among thousands takes a millisecond."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch.optim.") and hasattr(module, "_get_value")
    ]


@contextlib.contextmanager
def symbolic_arithmetic(tape: FloatTape, read: Callable[[torch.Tensor], int]) -> Iterator[None]:
    """Let optimizers see step counters, and results of `math`'s functions, as symbolic floats.

    `read(tensor)` makes a 0-d tensor an output of the graph as float64, and returns its position.
    """

    def get_value(x: Any) -> Any:
        return tape.tensor(read(x)) if isinstance(x, torch.Tensor) else x

    with restoring() as restores:
        for module in _readers_of_counters(len(sys.modules), next(reversed(sys.modules))):
            patch_function(restores, module, "_get_value", get_value)
        for name, plain in list(vars(math).items()):
            if callable(plain) and not name.startswith("_"):
                patch_function(restores, math, name, _of_symbols(name, plain, tape))
        yield


def _of_symbols(name: str, plain: Callable[..., Any], tape: FloatTape) -> Callable[..., Any]:
    """Return a function of `math` that follows symbolic floats, or rejects them."""

    def function(*values: Any, **named: Any) -> Any:
        if any(isinstance(value, LaterNumber) for value in values):
            found = math_of_numbers(name, values)
            return plain(*values, **named) if found is NotImplemented else found
        if not any(isinstance(value, SymbolicFloat) for value in values):
            return plain(*values, **named)
        if name == "log" and len(values) > 1:
            return tape.derive("div", *(tape.derive("log", value) for value in values))
        if name in _FOLLOWED_BY_MATH:
            return tape.derive(name, *values)
        tape.reject_function(name)
        return plain(*values, **named)

    return function
