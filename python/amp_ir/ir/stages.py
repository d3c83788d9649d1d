# SPDX-License-Identifier: Apache-2.0
"""The stages that a step has passed: what each made of the program, and how long it took."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import attrs


@attrs.frozen(eq=False)
class Stage:
    """A stage that has run.

    `program` is what it left: a torch.fx graph after "capture", a tvm.IRModule after every other
    stage up to "loops", a PlannedStep after "memory". `before` is what it was given; None for the
    stage that begins.
    """

    name: str
    seconds: float
    before: Any
    program: Any


OnStage: TypeAlias = Callable[[Stage], None]


@attrs.define
class Running:
    """A stage that runs; it ends with `program` set to what it made."""

    program: Any = None


@attrs.define
class StageWatch:
    """The stage that runs, for who shows it from another thread: its name, and how many began."""

    name: str = "begins"
    count: int = 0


_watch: contextvars.ContextVar[StageWatch | None] = contextvars.ContextVar(
    "amp_ir_stage_watch", default=None
)


def watched() -> StageWatch | None:
    """Return the watch that is told of this thread's stages."""
    return _watch.get()


@contextlib.contextmanager
def watching(watch: StageWatch) -> Iterator[None]:
    """Tell `watch` the stages inside of the block."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


@contextlib.contextmanager
def stage(name: str, before: Any, on_stage: OnStage | None) -> Iterator[Running]:
    """Run a stage, and hand `on_stage` its record; nothing is handed over where it raises."""
    running, watch = Running(), _watch.get()
    if watch is not None:
        watch.name, watch.count = name, watch.count + 1
    started = time.perf_counter()
    yield running
    if on_stage is not None:
        on_stage(Stage(name, time.perf_counter() - started, before, running.program))


def each(*callbacks: OnStage | None) -> OnStage:
    """Return a callback that calls those of `callbacks` that there are, in order."""

    def call(record: Stage) -> None:
        for one in callbacks:
            if one is not None:
                one(record)

    return call


def seconds_by_stage(seconds: dict[str, float]) -> OnStage:
    """Return a callback that adds the seconds of each stage up under its name."""

    def add(record: Stage) -> None:
        seconds[record.name] = seconds.get(record.name, 0.0) + record.seconds

    return add
