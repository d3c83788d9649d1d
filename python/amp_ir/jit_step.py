# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.jit`: a step that is captured, cast and compiled when it is first called."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from amp_ir.amp.custom_type_hint import RulesInEffect
from amp_ir.api import autocast, autocast_between_ranks, compile_into, rewrite, trace_unchanged
from amp_ir.capture.arguments import NESTED
from amp_ir.capture.call_arguments import bound, signature_of
from amp_ir.capture.guards.call_signature import CallSignature, SignatureReader
from amp_ir.capture.guards.changing_arguments import ChangingArguments
from amp_ir.capture.notes import is_warning
from amp_ir.distributed.process_group import remember_splitting
from amp_ir.distributed.replicas import Ranks
from amp_ir.errors import REFUSALS, ArgumentError, CopyError, IndexOutOfRangeError, StateError
from amp_ir.host.fork_safe_lock import ForkSafeLock
from amp_ir.ir.capturing import before_call, captured_scalers
from amp_ir.ir.stages import seconds_by_stage, stage
from amp_ir.ir.step_log import StepRecord
from amp_ir.ir.step_module import StepHooks, StepModule
from amp_ir.ir.target import target_of
from amp_ir.replay.watch import Watch
from amp_ir.report.live_stage import live_stage
from amp_ir.report.step_name import step_name
from amp_ir.runtime.arena import Arena
from amp_ir.runtime.hooked_weights import HookedWeight, hooked_weights
from amp_ir.runtime.overflow_log import OverflowLog
from amp_ir.runtime.precompilation import Captured, Precompilation
from amp_ir.runtime.step import NO_COPY, CompiledStep, CompileReport
from amp_ir.runtime.step_variants import (
    Recompile,
    StepVariants,
    Users,
    Variant,
    log,
)

if TYPE_CHECKING:
    from amp_ir.buckets.bucketed_calls import BucketedCalls, PaddedProgram
    from amp_ir.buckets.padded_batch import PaddedBatch
    from amp_ir.replay.overflow import Overflow

# A number that has changed this often becomes an input: it probably changes at every step.
_CHANGES_TO_INPUT = 2


class JitStep:
    """A step that is captured, cast and compiled at its first call, and again when a guard fails.

    The programs used last are kept: a step that changes back runs an earlier one. All work in one
    arena, as large as the largest needs. Calls from several threads run one after the other.
    """

    # What a decorated method of a class becomes for each instance; `amp_ir.jit` sets it.
    bind_to: Callable[[Any], JitStep] | None = None

    def __init__(self, step: Callable[..., Any], **options: Any) -> None:
        _take_names(self, step)
        self._step = step
        self._signature = signature_of(step)
        self._amp_dtype = options.pop("amp_dtype")
        self._autocast_options = options.pop("autocast_options")
        self._compile_options = options.pop("compile_options")
        self._buckets: BucketedCalls | None = options.pop("buckets")
        self._signatures = SignatureReader()
        self._variants: StepVariants[CallSignature]
        limits = options.pop("recompile_limit"), options.pop("max_shapes")
        keyed_by = "shapes, dtypes or structures"
        self._name = name = step_name(step)
        users = Users("a jitted step", name, "batches", keyed_by, "train.recompiles")
        self._variants = StepVariants(*limits, users)
        self._overflow_log: OverflowLog | None = options.pop("overflow_log")
        self._watch: Watch | None = options.pop("watch")
        # A watch may be that of several jitted steps, each of which counts its own.
        self._numbers = itertools.count()
        self._watched: weakref.WeakKeyDictionary[CompiledStep, CompiledStep]
        self._watched = weakref.WeakKeyDictionary()
        self._hooked: weakref.WeakKeyDictionary[CompiledStep, list[HookedWeight]]
        self._hooked = weakref.WeakKeyDictionary()
        announced = options.pop("precompile")
        self._precompilation = Precompilation(
            *(announced, self._capture, self._variants, name),
            in_thread=not target_of(self._compile_options["device"]).is_cuda,
        )
        self._trace_options = options
        self._ranks: Ranks | None = options["ranks"]
        if self._ranks is not None and self._ranks.exchanges:
            from amp_ir.distributed.exchange import agreement_of

            # Steps of one name are numbered in the order in which they are made.
            agreement_of(self._ranks)
            if self._ranks.shards is not None:
                remember_splitting([self, options["optimizer"]], self._ranks.shards.groups[0])
        self._turn = ForkSafeLock("the step was running")
        self._arena = Arena()
        self._compile_seconds = 0.0
        self._warned: set[str] = set()
        self._number_changes: collections.Counter[str] = collections.Counter()
        self._changed_tensors: set[str] = set()
        self._changing_arguments = ChangingArguments()
        # One for all programs: dropout continues from one shape's program to another's.
        self._random_state: torch.Tensor | None = None

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Run one step, compiling first if no program fits the call.

        Raises:
            ArgumentError: an argument is not a tensor or plain value that can be used.
            PaddingError: padding to a bucket may change the results or the state.
            What `amp_ir.trace_step` and `amp_ir.compile` raise; nothing has changed then.
            IndexOutOfRangeError, StateError: as a CompiledStep does.
        """
        if named:
            batch = bound(self._signature, batch, named)
        if (take := before_call.get()) is not None:
            take(self._step, self._trace_options, batch)
        if captured_scalers.get() is not None:
            # Another thread, which waits for the capture, may hold its lock.
            raise ArgumentError(NESTED)
        try:
            with self._turn, self._telling_ranks():
                result = self._run(batch) if self._buckets is None else self._run_in_buckets(batch)
                assert self._variants.last is not None
                self._variants.last.guards.follow_changes(batch, {})
                return result
        except REFUSALS as error:
            raise error.with_traceback(None) from error.__cause__

    def __get__(self, instance: Any, owner: type | None = None) -> JitStep:
        """Return the step of an instance, where a method of its class is decorated."""
        return self if instance is None or self.bind_to is None else self.bind_to(instance)

    @property
    def compiled(self) -> CompiledStep | None:
        """The program that ran last; None before the first call."""
        last = self._variants.last
        return None if last is None else last.program

    def ir(self, stage: str) -> str:
        """Return `CompiledStep.ir` of the program that ran last.

        Raises:
            StateError: the step has not run yet.
        """
        return self._last().ir(stage)

    @property
    def report(self) -> CompileReport:
        """`CompiledStep.report` of the program that ran last.

        Raises:
            StateError: the step has not run yet.
        """
        return self._last().report

    @property
    def recompiles(self) -> list[Recompile]:
        """The recompilations: the reason and the seconds of each."""
        return list(self._variants.recompiles)

    @property
    def notes(self) -> tuple[str, ...]:
        """The decisions of the capture of `compiled`, one sentence each; none before a call."""
        return () if self.compiled is None else self.compiled.module.notes

    @property
    def last(self) -> StepRecord:
        """`CompiledStep.last` of the program that ran last.

        Raises:
            StateError: the step has no loss scaler, or has not run yet.
        """
        return self._last().last

    @property
    def skipped(self) -> bool:
        """`CompiledStep.skipped` of the program that ran last; False before the first call."""
        return self.compiled is not None and self.compiled.skipped

    def find_overflow(self, *batch: Any, **named: Any) -> Overflow:
        """Say where the step on `batch` makes its first infinity or NaN; see `Overflow`.

        As `CompiledStep.find_overflow`, with the program that a call on this batch would run.

        Raises:
            StateError: no program has been compiled for such a batch yet, or the step exchanges
                gradients with other ranks.
        """
        batch = bound(self._signature, batch, named) if named else batch
        with self._turn:
            padded = None if self._buckets is None else self._buckets.padded(batch)
            signature, tensors = CallSignature.of(batch if padded is None else padded.args)
            # The step that ran may have left gradients where there were none, so that the next call
            # is another program's; the one that ran is asked all the same.
            variant = self._variants.find_only(signature) or self._variants.matching(signature)
            if variant is None:
                raise StateError(
                    "no program has been compiled for a batch like this; call the step on the "
                    "batch first, then find_overflow"
                )
            found: Overflow = variant.program.find_overflow_in(tensors)
            return found

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients on each rank alone.

        As `DistributedDataParallel.no_sync`, for all models of the step; the first call outside of
        it exchanges what was accumulated. Each of the two is a program.

        Raises:
            StateError: the step exchanges nothing.
        """
        if self._ranks is None:
            raise StateError(
                "the step exchanges nothing between ranks, so there is nothing to leave out; "
                "pass data_parallel=True to jit"
            )
        return self._ranks.no_sync()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return `CompiledStep.state_dict`; before the first call what was loaded, or nothing."""
        return {} if self._random_state is None else {"random_state": self._random_state.clone()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Call `CompiledStep.load_state_dict`, also before the first call."""
        if "random_state" not in state:
            return
        if self._random_state is None:
            self._random_state = state["random_state"].clone()
        else:
            self._random_state.copy_(state["random_state"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled.

        Raises:
            CopyError: always.
        """
        raise CopyError(NO_COPY)

    def __repr__(self) -> str:
        """Describe the step in one line: its name, dtype and device, and what was compiled."""
        dtype, device = self._amp_dtype or "no casts", self._compile_options["device"]
        about = f"{self._name}, {dtype}, {device}"
        if self.compiled is None:
            return f"JitStep({about}, not compiled yet)"
        count = len(self._variants.in_order)
        programs = f"{count} program{'s' if count > 1 else ''}"
        return f"JitStep({about}, {programs}; the last one: {self.report.summary()})"

    def _last(self) -> CompiledStep:
        if self.compiled is None:
            raise StateError("the step has not run yet; call it first")
        return self.compiled

    @contextlib.contextmanager
    def _telling_ranks(self) -> Iterator[None]:
        """Tell ranks that wait for this one's program if it fails before it has one."""
        if self._ranks is None or not self._ranks.exchanges:
            yield
            return
        from amp_ir.distributed.exchange import agreement_of

        with agreement_of(self._ranks).telling():
            yield

    def _run(self, batch: tuple[Any, ...]) -> Any:
        signature, tensors = self._signatures.of(batch)
        return self._run_program(self._variant(signature, batch).program, tensors)

    def _run_program(self, program: CompiledStep, tensors: list[torch.Tensor]) -> Any:
        for one in self._hooked_weights(program):
            one.refresh()
        is_watched = self._watch is not None and self._watch.is_due(next(self._numbers))
        value = (self._watched_program(program) if is_watched else program).run_current(tensors)
        if self._overflow_log is not None:
            self._overflow_log.after_step(program, tensors)
        return value

    def _hooked_weights(self, program: CompiledStep) -> list[HookedWeight]:
        """Return the weights that hooks keep, which are those of the capture by its guards."""
        found = self._hooked.get(program)
        if found is None:
            models = self._trace_options["model"]
            models = models if isinstance(models, (list, tuple)) else [models]
            found = self._hooked[program] = hooked_weights(m for m in models if m is not None)
        return found

    def _watched_program(self, program: CompiledStep) -> CompiledStep:
        """Return the program that does the same and fills the watch's ring, compiled once."""
        assert self._watch is not None
        if program not in self._watched:
            mod = self._watch.watched(program.module)
            self._watched[program] = compile_into(self._arena, mod, **self._compile_options)
        return self._watched[program]

    def _run_in_buckets(self, batch: tuple[Any, ...]) -> Any:
        assert self._buckets is not None
        while (padded := self._buckets.padded(batch)) is not None:
            signature, tensors = CallSignature.of(padded.args)
            try:
                variant, proven = self._proven_variant(signature, padded)
            except Exception as error:  # whatever it is: the batch alone raises what is its own
                if not self._buckets.pads_less(padded, error):
                    trace_again = functools.partial(self._trace, self._options(signature))
                    shown = self._buckets.explained(padded, error, trace_again)
                    raise shown from shown.__cause__ or error.__cause__
                continue
            if proven is None:
                return self._timed(padded, variant, tensors)
            if not self._buckets.is_proven_for(padded, proven):
                break
            value = self._timed(padded, variant, tensors)
            return padded.without_padding(value, proven.places, proven.padding)
        return self._run(batch)

    def _proven_variant(
        self, signature: CallSignature, padded: PaddedBatch
    ) -> tuple[Variant[CallSignature], PaddedProgram | None]:
        """Return the program of a padded batch, and what was proven of it; None: nothing needed."""
        assert self._buckets is not None
        variant = self._variant(signature, padded.args, padded)
        if not self._buckets.needs_proof(padded):
            return variant, None
        proven = self._buckets.known(variant, padded)
        if proven is None:
            # Dimensions of one length have two now, or the other way round.
            trace_again = functools.partial(self._trace, self._options(signature))
            proven = self._buckets.prove(trace_again(padded.args), trace_again, padded)
            self._buckets.add(variant, padded, proven)
        return variant, proven

    def _timed(
        self, padded: PaddedBatch, variant: Variant[CallSignature], tensors: list[torch.Tensor]
    ) -> Any:
        assert self._buckets is not None
        started = time.perf_counter()
        try:
            value = self._run_program(variant.program, tensors)
        except IndexOutOfRangeError as error:
            raise self._buckets.explained_index(padded, error) from error.__cause__
        seconds = time.perf_counter() - started
        self._buckets.add_step(padded, seconds, self._compile_seconds)
        return value

    def _variant(
        self,
        signature: CallSignature,
        batch: tuple[Any, ...],
        padded: PaddedBatch | None = None,
    ) -> Variant[CallSignature]:
        """Return the program of a call, compiled first if there is none."""
        variant = self._variants.find(signature)
        if variant is None:
            return self._compile(signature, batch, padded)
        if not self._precompilation.is_over:
            # The step has run: its optimizer has state, and this call's program is found.
            self._precompilation.advance()
            # A capture reads the numbers among the arguments of its own batch.
            variant.guards.take_numbers(signature.plain)
        return variant

    def _compile(
        self, signature: CallSignature, batch: tuple[Any, ...], padded: PaddedBatch | None
    ) -> Variant[CallSignature]:
        if self._precompilation.wait_for(signature):
            variant = self._variants.find(signature)
            if variant is not None:
                return variant
        why = self._variants.why_none(signature)
        started = time.perf_counter()
        with live_stage(self._name):
            captured, compiled, proven = self._made(signature, batch, padded)
        self._changing_arguments.add(signature)
        seconds = time.perf_counter() - started
        self._compile_seconds = seconds
        variant = self._variants.add(captured.signature, captured.guards, compiled, why, seconds)
        if self._buckets is not None and padded is not None and proven is not None:
            self._buckets.add(variant, padded, proven)
        for note in compiled.module.notes:
            is_new_warning = is_warning(note) and note not in self._warned
            self._warned |= {note} if is_new_warning else set()
            log.log(logging.WARNING if is_new_warning else logging.INFO, "%s", note)
        return variant

    def _made(
        self, signature: CallSignature, batch: tuple[Any, ...], padded: PaddedBatch | None
    ) -> tuple[Captured[CallSignature], CompiledStep, PaddedProgram | None]:
        """Capture and compile for a call; the padding of a padded one is proven before."""
        options, seconds = self._options(signature), dict[str, float]()
        note, proven = seconds_by_stage(seconds), None
        with stage("capture", None, note):
            mod = self._trace(options, batch)
        if self._buckets is not None and padded is not None and self._buckets.needs_proof(padded):
            with stage("padding", None, note):
                proven = self._buckets.prove(mod, functools.partial(self._trace, options), padded)
        captured = self._cast(mod, signature, batch, seconds)
        return captured, captured.compile(), proven

    def _capture(self, signature: CallSignature, batch: tuple[Any, ...]) -> Captured[CallSignature]:
        seconds: dict[str, float] = {}
        with stage("capture", None, seconds_by_stage(seconds)):
            mod = self._trace(self._options(signature), batch)
        return self._cast(mod, signature, batch, seconds)

    def _trace(self, options: dict[str, Any], batch: tuple[Any, ...]) -> StepModule:
        # What padding does is proven op by op.
        rolls_loops = self._buckets is None
        mod: StepModule = trace_unchanged(self._step, batch, rolls_loops=rolls_loops, **options)
        return mod

    def _cast(
        self,
        mod: StepModule,
        signature: CallSignature,
        batch: tuple[Any, ...],
        seconds: dict[str, float],
    ) -> Captured[CallSignature]:
        """Return the step with its casts, to be compiled; `seconds` gets how long they took."""
        if self._random_state is None:
            self._random_state = mod.random_state
        elif mod.random_state is not None:
            mod = mod.with_random_state(self._random_state)
        with stage("autocast", mod.ir, seconds_by_stage(seconds)):
            mod, guards = rewrite(mod), mod.hooks
            if self._amp_dtype is not None:
                mod = autocast(mod, batch, amp_dtype=self._amp_dtype, **self._autocast_options)
                # What a rule has written, as in a list of the ops that it saw, is no change.
                guards = _with_rules(guards, RulesInEffect())
            if self._amp_dtype in (None, "float32"):
                mod = autocast_between_ranks(mod, batch)
        followed = attrs.evolve(signature, followed=mod.hooks.followed)
        compiled = functools.partial(
            compile_into, self._arena, mod, seconds_before=seconds, **self._compile_options
        )
        return Captured(followed, guards, compiled)

    def _options(self, signature: CallSignature) -> dict[str, Any]:
        """Return the options of a capture, with the numbers that it should not freeze."""
        matching = self._variants.matching(signature)
        if matching is not None:
            self._number_changes.update(matching.guards.changed_numbers())
            self._changed_tensors.update(matching.guards.changed_tensors())
        changes = self._number_changes + self._changing_arguments.counts(signature)
        names = [name for name, count in changes.items() if count >= _CHANGES_TO_INPUT]
        inputs = {
            "numbers_as_inputs": frozenset(names),
            "tensors_as_inputs": frozenset(self._changed_tensors),
        }
        return {**self._trace_options, **{key: those for key, those in inputs.items() if those}}


def _take_names(made: JitStep, step: Callable[..., Any]) -> None:
    """Give a jitted step the names, the text and the signature of its function."""
    for name in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(step, name):
            setattr(made, name, getattr(step, name))
    vars(made)["__wrapped__"] = step


def _with_rules(guards: StepHooks, rules: RulesInEffect) -> StepHooks:
    """Return guards that compare the rules too, which a CompiledStep has from its autocast."""
    return attrs.evolve(
        guards, recompile_reason=lambda: guards.recompile_reason() or rules.change()
    )
