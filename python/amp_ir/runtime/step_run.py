# SPDX-License-Identifier: Apache-2.0
"""One run of a step's `main` as a transaction: a failed call rolls back or marks the state as torn.

A run that succeeds costs no check: native code saves the little state that is written early, and
counts library calls; that count and the plan tell which call failed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import torch
import tvm
import tvm_ffi

from amp_ir.dialect.collectives import WAIT_SYMBOL
from amp_ir.distributed.process_group import RESTART
from amp_ir.errors import StepFailedError, StepOutOfMemoryError
from amp_ir.host import native
from amp_ir.host.full_float32 import full_float32
from amp_ir.host.memory_limit import ADVICE, asked_nbytes, is_out_of_memory
from amp_ir.ir import external_call
from amp_ir.ir.collective_call import SYMBOLS as COLLECTIVES
from amp_ir.ir.memory_plan import MemoryPlan, PlannedCall
from amp_ir.runtime import torn_state

T = TypeVar("T")

# The libraries whose functions are counted as they begin and end (src/kernels/step/call_count.h).
_COUNTED = (
    "amp_ir.onednn.", "amp_ir.torch.", "amp_ir.torch_cuda.", "amp_ir.cublaslt.", "amp_ir.loop.",
)  # fmt: skip
_LIBRARY = "amp_ir."
# Those that may compute in PyTorch: a loop calls what its body does.
_BY_PYTORCH = ("amp_ir.torch.", "amp_ir.loop.")
_IN_PYTHON = frozenset({external_call.SYMBOL}) | COLLECTIVES
# What a function of Python's raises inside of `main` comes out as its own class where that is
# known, and as a RuntimeError where not: an interruption must stay one.
tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)
# Told apart from the run before it where an interruption comes before a run begins.
_tickets = itertools.count()


@attrs.frozen
class _Progress:
    """A thread's last run: library calls begun and ended, and whether all of it was done."""

    ticket: int
    is_finished: int
    begun: int
    ended: int


class StepRun:
    """Calls of `main`; a failure is a StepFailedError, and the state intact or marked as torn.

    `written` returns the tensors that the step writes, for the marks, by their position among the
    inputs.
    """

    def __init__(
        self,
        main: Callable[..., Any],
        plan: MemoryPlan,
        written: Callable[[], dict[int, torch.Tensor]],
    ) -> None:
        self._main = main
        self._plan = plan
        self._written = written
        self._run = native.function("amp_ir.step.run")
        by_pytorch = any(call.symbol.startswith(_BY_PYTORCH) for call in plan.calls)
        self._precision = full_float32 if by_pytorch else contextlib.nullcontext
        kept = torch.empty(max(plan.writes.kept_nbytes, 1), dtype=torch.uint8)
        self._kept = tvm.runtime.from_dlpack(kept)
        # The arena comes before the inputs.
        self._positions = tvm_ffi.Shape(tuple(k + 1 for k in plan.writes.kept))

    def __call__(self, arguments: Sequence[Any], finish: Callable[[], T]) -> T:
        """Call main(*arguments) and return `finish()`, which must be safe to call again.

        Raises:
            StepFailedError: a call failed. An exception that is not an Exception, such as
                KeyboardInterrupt, passes through: if `main` was done by then, `finish` is, too.
        """
        ticket = next(_tickets)
        external_call.begin_run()
        try:
            with self._precision():
                self._run(ticket, self._main, self._kept, self._positions, *arguments)
            return finish()
        except BaseException as error:
            self._recover(ticket, error, arguments, finish)
            raise

    def _recover(
        self,
        ticket: int,
        error: BaseException,
        arguments: Sequence[Any],
        finish: Callable[[], object],
    ) -> None:
        """Leave the state intact or marked.

        Raises:
            StepFailedError: for an Exception out of `main`.
        """
        progress = _Progress(*native.function("amp_ir.step.progress")())
        if progress.ticket != ticket:
            return
        if progress.is_finished:
            if not isinstance(error, Exception):
                finish()
            return
        failed = external_call.failed_call()
        if failed is not None:
            # As the op raised it: the virtual machine's is a copy.
            first = last = self._external_calls()[failed[0]]
            error = failed[1]
        else:
            first, last = self._failed_calls(progress)
        first_write = self._plan.writes.first_call
        # A wait that fails has copied nothing yet, and none does before all are done.
        is_torn = last > first_write if self._is_wait(last) else last >= first_write
        if self._plan.writes.kept:
            restore = native.function("amp_ir.step.restore")
            restore(self._kept, self._positions, *arguments)
        self.fail(error, first, last, is_torn=is_torn)

    def _is_wait(self, call: int) -> bool:
        return self._plan.calls[call].symbol == WAIT_SYMBOL

    def fail_as_a_whole(self, error: Exception) -> None:
        """Fail as `fail` does, where the failed call is unknown.

        Raises:
            StepFailedError: always.
        """
        self.fail(error, 0, len(self._plan.calls) - 1, is_torn=True)

    def fail(self, error: BaseException, first: int, last: int, *, is_torn: bool) -> None:
        """Mark the state if it is torn.

        Raises:
            StepFailedError: for an Exception, raised between calls `first` and `last`.
        """
        calls = self._plan.calls[first : last + 1]
        if is_torn:
            kept = set(self._plan.writes.kept)
            torn = [tensor for k, tensor in self._written().items() if k not in kept]
            torn_state.mark(torn, f"{self._place(first, last)} failed: {_words(error)}")
        if not isinstance(error, Exception):
            return
        message = f"{self._place(first, last)} failed: {_words(error)}. {self._outcome(is_torn)}"
        named: dict[str, Any] = {"call": calls[0].name if len(calls) == 1 else ""}
        named["location"] = next(iter(calls[0].locations), None) if len(calls) == 1 else None
        if is_out_of_memory(error):
            message += f". Where memory is short: {ADVICE}"
            nbytes = asked_nbytes(error)
            raise StepOutOfMemoryError(message, is_torn=is_torn, nbytes=nbytes, **named) from error
        raise StepFailedError(message, is_torn=is_torn, **named) from error

    def _external_calls(self) -> list[int]:
        """Return the positions of the calls that Python makes: PyTorch's ops, and collectives."""
        calls = enumerate(self._plan.calls)
        return [k for k, call in calls if call.symbol in _IN_PYTHON]

    def _failed_calls(self, progress: _Progress) -> tuple[int, int]:
        """Return the first and the last call of the plan that may be the one that failed.

        It is one where a library's function failed. Kernels are not counted, so a failed one is
        between two library calls.
        """
        calls = self._plan.calls
        external = set(self._external_calls())
        libraries = [
            k
            for k, call in enumerate(calls)
            if call.symbol.startswith(_LIBRARY) and k not in external
        ]
        end = len(calls) - 1
        if any(not calls[k].symbol.startswith(_COUNTED) for k in libraries):
            return 0, end
        if progress.begun > progress.ended:
            return libraries[progress.ended], libraries[progress.ended]
        first = libraries[progress.ended - 1] + 1 if progress.ended else 0
        last = libraries[progress.ended] if progress.ended < len(libraries) else end
        return min(first, last), last

    def _outcome(self, is_torn: bool) -> str:  # noqa: FBT001 (one of two texts)
        if is_torn:
            return (
                "Some of the state has the values of after the step already, so it is torn, and "
                f"steps on it are refused until it is loaded: {torn_state.REMEDY}"
            )
        kept = (
            "Nothing has changed: model, optimizer, scaler and random state are as before the step"
        )
        if any(call.symbol in COLLECTIVES for call in self._plan.calls):
            return f"{kept}, but the ranks cannot go on together: {RESTART}"
        return f"{kept}, which may be called again"

    def _place(self, first: int, last: int) -> str:
        calls = self._plan.calls[first : last + 1]
        count = len(self._plan.calls)
        if len(calls) == 1:
            return f"call {first + 1} of {count} of the step, {_described(calls[0])},"
        named = dict.fromkeys(_described(call) for call in calls)
        shown = "; ".join(list(named)[:4]) + ("; ..." if len(named) > 4 else "")
        return f"one of the calls {first + 1} to {last + 1} of {count} of the step ({shown})"


def _described(call: PlannedCall) -> str:
    ops = ", ".join(call.ops[:3]) + (", ..." if len(call.ops) > 3 else "")
    where = f" in {call.locations[0]}" if call.locations else ""
    return f"{call.name} ({ops}){where}"


def _words(error: BaseException) -> str:
    """Return the library's message, without the trace that may follow it."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
