# SPDX-License-Identifier: Apache-2.0
"""Guards on what runs around an optimizer's step: its hooks, and methods put in their place."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from amp_ir.capture.guards.modules import HookCount
from amp_ir.capture.guards.objects import Tier
from amp_ir.capture.patches.thread_patches import original_of

# `torch.optim` deletes the attribute of this name.
_MODULE = sys.modules["torch.optim.optimizer"]
_HOOKS = {
    "_optimizer_step_pre_hooks": "step pre-hooks",
    "_optimizer_step_post_hooks": "step post-hooks",
}
_GLOBAL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_METHODS = ("step", "zero_grad")


class GuardedOptimizerMethods:
    """The hooks and the replaced methods of optimizers, as they are when this is made.

    What a scheduler of learning rates puts around `step` only notes that it was called.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._before = self._now()
        self._refresh()

    def tier(self) -> Tier:
        """Return these guards as a tier."""
        return Tier(self._hold, self._changes, self._refresh)

    def _refresh(self) -> None:
        self._count = HookCount()
        self._methods = [
            (vars(one), type(one), name, _method(one, name))
            for one in self._optimizers
            for name in _METHODS
        ]
        self._may_go = any(any(hooks.values()) for hooks, _ in self._before)

    def _hold(self) -> bool:
        # A new hook is counted; one that goes is not.
        return (
            self._count.holds()
            and all(
                original_of(held.get(name) or getattr(kind, name)) is method
                for held, kind, name, method in self._methods
            )
            and not (self._may_go and self._now() != self._before)
        )

    def _now(self) -> list[tuple[dict[str, tuple[int, ...]], dict[str, Any]]]:
        of_all = tuple(hook for name in _GLOBAL for hook in _ids(getattr(_MODULE, name, {})))
        found = []
        for one in self._optimizers:
            own = {words: _ids(getattr(one, name, {})) for name, words in _HOOKS.items()}
            methods = {name: _users(one, name) for name in _METHODS}
            found.append(({**own, "step hooks, of all optimizers": of_all}, methods))
        return found

    def _changes(self) -> Iterator[str]:
        pairs = zip(self._now(), self._before, strict=True)
        for k, ((hooks, methods), (old_hooks, old_methods)) in enumerate(pairs):
            for words, now in hooks.items():
                if now != old_hooks[words]:
                    counts = f"{len(old_hooks[words])} then, {len(now)} now"
                    yield f"optimizer {k} has other {words}: {counts}"
            for name, method in methods.items():
                if method is not old_methods[name]:
                    yield f"{name} of optimizer {k} was replaced"


def _ids(hooks: Any) -> tuple[int, ...]:
    # The compiled step's own hooks, as those of split state, change nothing that was captured.
    return tuple(id(one) for one in hooks.values() if not _is_ours(one))


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("amp_ir.")


def _method(optimizer: torch.optim.Optimizer, name: str) -> Any:
    # While another thread captures, functions that tell the threads apart are in their places.
    return original_of(vars(optimizer).get(name) or getattr(type(optimizer), name))


def _users(optimizer: torch.optim.Optimizer, name: str) -> Any:
    method = _method(optimizer, name)
    is_schedulers = getattr(method, "_wrapped_by_lr_sched", False)
    return original_of(getattr(type(optimizer), name)) if is_schedulers else method
