# SPDX-License-Identifier: Apache-2.0
"""The random generators that a step may use while it is traced, restored afterwards.

Other threads may draw from the same generators meanwhile, and would draw the same numbers again
after a restore. So the capture restores a generator only where no other thread runs, or where the
step is known to have changed it: while tensors are fake, PyTorch's generators draw nothing, and
only seeding changes them. `random`'s and NumPy's otherwise keep the state that the step left.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from amp_ir.capture.patches.restores import Restores
from amp_ir.capture.patches.thread_patches import patch_function

_SEEDING = (
    "manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all",
)  # fmt: skip


def keep_generators(restores: Restores) -> None:
    """Restore the generators when `restores` run."""
    # A trace imports it, and it then replaces torch.manual_seed permanently.
    import torch._dynamo

    seeded: list[None] = []
    of_torch, of_others = _of_torch(), _of_others()

    def restore() -> None:
        is_alone = _is_alone()
        for put_back in of_torch if is_alone or seeded else []:
            put_back()
        for put_back in of_others if is_alone else []:
            put_back()

    restores.add(restore)
    for owner in (torch, torch.random, torch.cuda, torch.cuda.random):
        for name in _SEEDING:
            if hasattr(owner, name):
                patch_function(restores, owner, name, _noted(getattr(owner, name), seeded))


def _is_alone() -> bool:
    """Return whether no other thread may have drawn.

    Ours, which compile, do not, nor does that of PyTorch's progress bars.
    """
    here, known = threading.current_thread(), ("amp_ir ", "tqdm_monitor")
    return all(one is here or one.name.startswith(known) for one in threading.enumerate())


def _noted(seed: Callable[..., Any], seeded: list[None]) -> Callable[..., Any]:
    """Return a function that seeds a generator, and records that it did."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        seeded.append(None)
        return seed(*args, **kwargs)

    return noted


def _of_torch() -> list[Callable[[], object]]:
    restores = [functools.partial(torch.set_rng_state, torch.get_rng_state())]
    if torch.cuda.is_initialized():
        states = torch.cuda.get_rng_state_all()
        restores.append(functools.partial(torch.cuda.set_rng_state_all, states))
    return [*restores]


def _of_others() -> list[Callable[[], object]]:
    restores: list[Callable[[], object]] = [functools.partial(random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        restores.append(functools.partial(numpy.random.set_state, numpy.random.get_state()))
    return restores
