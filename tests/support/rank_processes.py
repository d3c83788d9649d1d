# SPDX-License-Identifier: Apache-2.0
"""Processes that are the ranks of one gloo group; each runs a function and answers."""

from __future__ import annotations

import functools
import multiprocessing
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import amp_ir
from data_parallel import WORKLOADS, Training

T = TypeVar("T")
FORK = multiprocessing.get_context("fork")
# What of_child returns for a process that ended without an answer.
DIED = "the process died"


def of_child(function: Callable[[], Any], seconds: float = 25, *, may_die: bool = False) -> Any:
    """What a function returns in a forked process; a hang is a failure."""
    receiver, sender = FORK.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send((function(), ""))
        except BaseException:
            sender.send((None, traceback.format_exc()))

    child = FORK.Process(target=run)
    child.start()
    sender.close()
    try:
        assert receiver.poll(seconds), "the forked process hangs"
        try:
            value, error = receiver.recv()
        except EOFError:
            assert may_die, "the forked process died"
            return DIED
        assert not error, error
        return value
    finally:
        child.join(5)
        if child.is_alive():
            child.kill()
            child.join()


@functools.cache
def _compile_once() -> None:
    """Compile and run steps in this process, once, so that no rank's compilation is its first.

    A first one imports, reads tables and fills caches for 2 s, and each rank would do so again.
    """
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)  # as each rank has; a fork has no other thread of OpenMP's
    try:
        for make, batch in (WORKLOADS[name] for name in ("mlp", "gpt2", "resnet")):
            one: Training = make(lambda model: model)
            amp_ir.jit(one.step, model=one.models, optimizer=one.optimizers)(*batch())
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


def ranks(
    program: Callable[[int], T],
    folder: Path,
    count: int = 2,
    *,
    seconds: float = 120,
    timeout_seconds: float = 20,
    may_die: bool = False,
) -> list[T]:
    """What each of `count` gloo processes answers: `program(rank)`.

    `seconds` is how long they may take; `timeout_seconds` is the group's timeout.
    """
    _compile_once()

    def of_rank(number: int) -> T:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), count)
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=timeout)
        told = program(number)
        if dist.is_initialized():
            dist.destroy_process_group()
        return told

    with ThreadPoolExecutor(count) as pool:
        run = functools.partial(of_child, seconds=seconds, may_die=may_die)
        return list(pool.map(lambda k: run(functools.partial(of_rank, k)), range(count)))
