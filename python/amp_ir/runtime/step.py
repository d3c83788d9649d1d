# SPDX-License-Identifier: Apache-2.0
"""CompiledStep: a training step that runs on the user's own tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from amp_ir.errors import CopyError, StateError
from amp_ir.host.forked_threads import use_threads_that_exist
from amp_ir.ir.dispatch_log import DispatchNote
from amp_ir.ir.memory_plan import MemoryPlan
from amp_ir.ir.nbytes_text import mebibytes
from amp_ir.ir.step_log import StepLog, StepRecord
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.runtime import torn_state
from amp_ir.runtime.program import Program


@attrs.frozen
class CompileReport:
    """Results of compiling: seconds per stage, kernels, and the memory plan.

    A step from the compile cache has the one stage "cache", one that was put there "store" at last.
    That of a jitted step has "capture", "padding" where that is proven, and "autocast" before them.
    `dispatched` says which library each heavy op went to, and why not to a better one. `options`
    are those of the compilation, by their names.
    """

    seconds: dict[str, float]
    kernel_count: int
    plan: MemoryPlan
    dispatched: tuple[DispatchNote, ...] = ()
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def summary(self) -> str:
        """Return kernels, calls of PyTorch's own ops, peak and seconds, in one line."""
        external = sum(one.calls for one in self.dispatched if one.is_external)
        parts = [
            f"{self.kernel_count} kernels",
            *([f"{external} external call{'s' if external > 1 else ''}"] if external else []),
            f"peak {mebibytes(self.plan.peak_bytes)}",
            f"compiled in {sum(self.seconds.values()):.1f} s",
        ]
        return ", ".join(parts)

    def __str__(self) -> str:
        """Return the summary, the seconds of each stage, and where each heavy op went."""
        notes = [f"  {note}" for note in self.dispatched]
        return "\n".join([self.summary(), f"seconds: {stages_text(self.seconds)}", *notes])


def stages_text(seconds: Mapping[str, float]) -> str:
    """Return the seconds of each stage, in one line."""
    return ", ".join(f"{name} {one:.2f}" for name, one in seconds.items())


NO_COPY = (
    "a compiled step cannot be copied or pickled: it is machine code of this process, and works on "
    "the tensors of its own model and optimizer. Copy these, copy.deepcopy((model, optimizer)), or "
    "save them, amp_ir.save_checkpoint; then compile a step that uses the copies"
)


class CompiledStep:
    """A compiled training step, called as the user's step; updates model and optimizer in place.

    Between calls the model and the optimizer are ordinary PyTorch objects: `state_dict()`,
    `torch.save`, evaluation and learning-rate schedulers see the current values. Not reentrant:
    calls from several threads run one after the other.
    """

    def __init__(
        self,
        module: StepModule,
        program: Program,
        report: CompileReport,
        text_after: Callable[[str], str],
        find_overflow: Callable[[list[torch.Tensor]], Any],
    ) -> None:
        self.module = module
        self.report = report
        self._text_after = text_after
        self._find_overflow = find_overflow
        self._program = program
        self._is_installed = False
        inputs = module.signature.inputs
        self._scaler_inputs = [one.name for one in inputs if one.role is Role.SCALER_STATE]

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Run one step on `batch` and return what the captured step returns.

        Arguments that the example batch of the capture has by position may also be given by the
        names that they have in the step.

        Raises:
            ArgumentError: the batch does not fit what was captured; nothing has changed.
            IndexOutOfRangeError: an index is outside of the axis that it reads or writes; nothing
                has changed. On a GPU a later call raises it, or `synchronise`.
            StateError: model or optimizer changed in a way that needs a new capture.
            StepFailedError: a call of the step failed, or an earlier failure left the state torn;
                the message says whether anything has changed.
            OutOfMemoryError: there is no memory for the step; see there, too.
        """
        exchange = self._program.exchange
        if exchange is None:
            return self._call(batch, named)
        with exchange.telling_ranks():
            return self._call(batch, named)

    def _call(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        use_threads_that_exist()
        tensors = self.module.signature.flatten_batch(batch, named)
        self._program.check_inputs(tensors)
        change = self.module.hooks.recompile_reason()
        if change:
            raise StateError(
                f"the step is no longer as it was captured: {change}. Call amp_ir.trace_step and "
                "amp_ir.compile again, or use amp_ir.jit, which does"
            )
        result = self._run(tensors)
        self.module.hooks.follow_changes(batch, named)
        return result

    def ir(self, stage: str) -> str:
        """Return the step's program after a stage of the compiler as text, a line a value.

        Stages: "amp" (as autocast left it), "checks", "decompose", "dispatch", "loops" (kernels,
        with the ops that each computes), "memory" (with offsets in bytes). The step is lowered
        once more for it; nothing is run.

        Raises:
            OptionError: there is no such stage.
        """
        return self._text_after(stage)

    def find_overflow(self, *batch: Any, **named: Any) -> Any:
        """Say where the step on `batch` makes its first infinity or NaN, as an `Overflow`.

        The step is replayed on copies of the state as it is now: nothing of the user's changes.
        After a skipped step that is the state which it began with, and its loss scale is used, so
        that the replay is exact. Takes the time of a few dozen steps; call it when a step was
        skipped, or on a batch whose loss is not finite.

        Raises:
            ArgumentError: the batch does not fit what was captured.
        """
        return self._find_overflow(self.module.signature.flatten_batch(batch, named))

    def find_overflow_in(self, tensors: list[torch.Tensor]) -> Any:
        """Do what `find_overflow` does on a flat batch."""
        return self._find_overflow(tensors)

    def run_current(self, tensors: list[torch.Tensor]) -> Any:
        """Run as `__call__` does on a flat batch, for a caller that has checked the guards.

        Raises:
            IndexOutOfRangeError, StateError: as for a call.
        """
        use_threads_that_exist()
        self._program.check_inputs(tensors)
        return self._run(tensors)

    def _run(self, tensors: list[torch.Tensor]) -> Any:
        if not self._is_installed:
            self._program.check_state()
        try:
            results = self._program.run(tensors, finish=functools.partial(self._finish, tensors))
        except BaseException:
            # What a torn step wrote is the optimizer's, so that loading replaces it.
            if torn_state.is_torn(self._program.state()):
                self._install()
            raise
        return self.module.signature.unflatten_results(results)

    def _finish(self, batch: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Do what belongs to the step after its last call; return the results."""
        # Behind the run: a first step that fails leaves the optimizer without state, as it was.
        self._install()
        results, gradients = self._program.results_of(outputs)
        self.module.hooks.keep_results(batch, results)
        self.module.hooks.after_step(gradients)
        return results

    def _install(self) -> None:
        if not self._is_installed:
            self.module.hooks.install_state()
            self._is_installed = True

    def synchronise(self) -> None:
        """Wait until all steps so far are done; on a CPU they always are.

        Raises:
            IndexOutOfRangeError: a step computed an index out of range, and was rolled back.
        """
        self._program.synchronise()

    @property
    def program(self) -> Program:
        """Return the program inside of a call, without the checks around it; for measurements."""
        return self._program

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the step's own state: `random_state` int64[2], if it draws numbers.

        Beside the state of model, optimizer and scaler it makes a checkpoint complete.
        """
        random_state = self.module.random_state
        return {} if random_state is None else {"random_state": random_state.clone()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue drawing numbers where the step that gave `state` stopped.

        Raises:
            StateError: one of the two draws random numbers and the other does not.
        """
        random_state = self.module.random_state
        if (random_state is None) != ("random_state" not in state):
            has = "has no random op" if random_state is None else "draws random numbers"
            raise StateError(
                f"the step {has}, and the state that it is given has the entries {sorted(state)}; "
                "it belongs to another step"
            )
        if random_state is not None:
            random_state.copy_(state["random_state"])

    @property
    def logs(self) -> list[StepLog]:
        """Return the logs of the last 1024 steps, one per loss scaler in the order passed."""
        state = self.module.state
        count = sum(name.endswith(".counts") for name in self._scaler_inputs)
        return [StepLog(state[f"scaler{k}.ring"], state[f"scaler{k}.counts"]) for k in range(count)]  # type: ignore[arg-type]

    @property
    def last(self) -> StepRecord:
        """Return the last step: skipped or not, its scale, gradient norm, and skips in a row.

        With several scalers it is the first one's record. Only this read waits for the step.

        Raises:
            StateError: the step has no loss scaler, or has not run yet.
        """
        if not self._scaler_inputs:
            raise StateError(
                "the step has no loss scaler, so no step was checked or skipped; capture it with "
                "scaler=amp_ir.GradScaler() and call scale, step and update in it"
            )
        record = self.logs[0].last()
        if record is None:
            raise StateError("the step has not run yet; call it first")
        return record

    @property
    def skipped(self) -> bool:
        """Return whether `scaler.step` skipped in the last step; for learning-rate schedulers.

        With several scalers: whether any of them skipped. False without a loss scaler.
        """
        records = [log.last() for log in self.logs]
        return any(record is not None and record.skipped for record in records)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled.

        Raises:
            CopyError: always.
        """
        raise CopyError(NO_COPY)

    def __repr__(self) -> str:
        """Describe the compiled step in one line."""
        return f"CompiledStep({self.report.summary()})"
