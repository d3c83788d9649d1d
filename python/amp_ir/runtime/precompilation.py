# SPDX-License-Identifier: Apache-2.0
"""Programs for batches that were announced, compiled in the background while others run.

A capture runs the user's step on the user's objects, so it happens in the thread that calls the
step, between two runs: one a call, of calls that found their program. Its guards are then those of
a step whose optimizer has its state. All after it, which takes most of the time and touches none
of these objects, happens in a thread; one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import attrs

from amp_ir.host.background_task import BackgroundTask
from amp_ir.ir.step_module import StepHooks
from amp_ir.runtime.step import CompiledStep
from amp_ir.runtime.step_variants import Signature, StepVariants, log

S = TypeVar("S", bound=Signature)


@attrs.frozen
class Captured(Generic[S]):
    """A captured step, and the function that compiles it."""

    signature: S
    guards: StepHooks
    compile: Callable[[], CompiledStep]


@attrs.frozen
class _Running(Generic[S]):
    position: int
    captured: Captured[S]
    task: BackgroundTask[tuple[CompiledStep, float]]
    capture_seconds: float


class Precompilation(Generic[S]):
    """The announced batches of one step. Its methods are called under the step's lock.

    A failure never ends a step that does not need the program: it is one warning, and a call with
    such a batch compiles as if it had not been announced, and raises what that raises.

    Args:
        announced: the signature and the arguments of each batch.
        capture: captures and casts the step for them.
        in_thread: whether programs are compiled in a thread. One for a GPU is not: its memory
            cannot be allocated while a step is recorded as a graph.
    """

    def __init__(
        self,
        announced: Sequence[tuple[S, tuple[object, ...]]],
        capture: Callable[[S, tuple[object, ...]], Captured[S]],
        variants: StepVariants[S],
        name: str,
        *,
        in_thread: bool,
    ) -> None:
        self._waiting = list(enumerate(announced))
        self._in_thread = in_thread
        self._capture = capture
        self._variants = variants
        self._name = name
        self._running: _Running[S] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return not self._waiting and self._running is None

    def advance(self) -> None:
        """Keep the program that is ready, and begin with the next batch if none is being made."""
        if self._running is not None and self._running.task.is_done:
            self._finish()
        while self._running is None and self._waiting:
            position, (signature, batch) = self._waiting[0]
            if self._variants.find_only(signature) is None:
                self._begin(position, signature, batch)
            # Behind the capture: after Ctrl-C in it, the next call begins again.
            del self._waiting[0]

    def wait_for(self, signature: S) -> bool:
        """Wait if a program that fits a call is being made; return whether it is there now."""
        running = self._running
        if running is None or running.captured.signature.key != signature.key:
            return False
        guards = running.captured.guards
        guards.take_numbers(signature.plain)
        if not running.captured.signature.fits(signature) or guards.recompile_reason():
            return False
        running.task.wait()
        return self._finish()

    def _begin(self, position: int, signature: S, batch: tuple[object, ...]) -> None:
        started = time.perf_counter()
        try:
            captured = self._capture(signature, batch)
        except Exception as error:  # whatever the user's step raises
            self._warn(position, error)
            return

        def compiled() -> tuple[CompiledStep, float]:
            began = time.perf_counter()
            return captured.compile(), time.perf_counter() - began

        seconds = time.perf_counter() - started
        task = BackgroundTask(compiled, f"compiles {self._name}", in_thread=self._in_thread)
        self._running = _Running(position, captured, task, seconds)

    def _finish(self) -> bool:
        """Keep the program that was made; return whether there is one."""
        running, self._running = self._running, None
        assert running is not None
        try:
            program, seconds = running.task.result()
        except ChildProcessError:
            return False  # a fork: the call that needs it compiles it
        except Exception as error:
            self._warn(running.position, error)
            return False
        captured = running.captured
        seconds += running.capture_seconds
        self._variants.add_in_background(captured.signature, captured.guards, program, seconds)
        return True

    def _warn(self, position: int, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning(
            "precompile[%d] of the jitted step %s could not be compiled in the background: %s. A "
            "call with such a batch compiles it then, and raises this error if it comes again",
            *(position, self._name, reason),
        )
