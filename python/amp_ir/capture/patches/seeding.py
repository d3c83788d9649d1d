# SPDX-License-Identifier: Apache-2.0
"""Whether a step seeds PyTorch's generators, or puts their state back, before it draws.

A compiled step draws by an algorithm of its own, other numbers at each call and at each op. A step
that seeds wants the same numbers again: at each call, or twice in one (a reversible layer, a second
forward pass with the dropout of the first). While it is traced, tensors are fake, and generators
draw nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from amp_ir.capture.patches.restores import Restores, restoring
from amp_ir.capture.patches.thread_patches import patch_function

SEEDED_ADVICE = (
    "Leave the seeding out, or draw before the step and pass the tensor in the batch. To use the "
    "same numbers twice, draw them once, as torch.rand(...) or a dropout of ones, and use that "
    "tensor twice"
)

_SEEDS = ("manual_seed", "manual_seed_all")
_PUTS = ("set_rng_state", "set_rng_state_all")
_READS = ("get_rng_state", "get_rng_state_all")
_OWNERS = (torch, torch.random, torch.cuda, torch.cuda.random)


class Seeding:
    """What a traced step does with the generators that it draws from by default."""

    def __init__(self) -> None:
        self._draws = 0
        self._seeded_by = ""
        self._read: dict[int, tuple[Any, int, str]] = {}
        self._state = _state()

    @classmethod
    @contextlib.contextmanager
    def watched(cls) -> Iterator[Seeding]:
        """See what this thread does to the generators."""
        with restoring() as restores:
            seeding = cls()
            seeding._patch(restores)
            yield seeding

    def _patch(self, restores: Restores) -> None:
        wraps = {**dict.fromkeys(_SEEDS, self._seeds), **dict.fromkeys(_PUTS, self._puts)}
        wraps |= {**dict.fromkeys(_READS, self._reads), "seed": self._renews}
        for owner in _OWNERS:
            for name, wrap in wraps.items():
                if hasattr(owner, name):
                    plain = getattr(owner, name)
                    patch_function(restores, owner, name, functools.wraps(plain)(wrap(plain)))

    def before(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Count an op that draws; return by what the step has seeded, "" where it has not."""
        if not _draws(func, args, kwargs):
            return ""
        self._draws += 1
        if not self._seeded_by and _state() != self._state:
            return "manual_seed of torch.default_generator"
        return self._seeded_by

    def _seeds(self, seed: Callable[..., Any]) -> Callable[..., Any]:
        def seeds(*args: Any, **kwargs: Any) -> Any:
            generator = seed(*args, **kwargs)
            self._seeded_by = f"torch.{seed.__name__}"
            return generator

        return seeds

    def _renews(self, seed: Callable[..., Any]) -> Callable[..., Any]:
        """Allow a seed that is another one at each call."""

        def renews(*args: Any, **kwargs: Any) -> Any:
            result = seed(*args, **kwargs)
            self._state, self._seeded_by = _state(), ""
            return result

        return renews

    def _reads(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def reads(*args: Any, **kwargs: Any) -> Any:
            state = read(*args, **kwargs)
            self._read[id(state)] = state, self._draws, self._seeded_by
            return state

        return reads

    def _puts(self, put: Callable[..., Any]) -> Callable[..., Any]:
        """Allow a state that is put back before anything was drawn."""

        def puts(new_state: Any, *args: Any, **kwargs: Any) -> Any:
            put(new_state, *args, **kwargs)
            _, draws, seeded_by = self._read.get(id(new_state), (None, -1, ""))
            is_same = draws == self._draws
            self._seeded_by = seeded_by if is_same else f"torch.{put.__name__}"

        return puts


def _state() -> bytes:
    """Return the state of the CPU's generator, without an op of a tensor that would be traced."""
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an op draws random numbers: not where its dropout is off."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = func._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= {**dict(zip(given, args, strict=False)), **kwargs}
    is_off = given.get("dropout_p") == 0 or given.get("train") is False
    return not is_off and given.get("training") is not False
