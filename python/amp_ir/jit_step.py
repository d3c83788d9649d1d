# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.jit`: a step that is captured, cast and compiled when it is first called."""

from __future__ import annotations

import collections
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from amp_ir.amp.custom_type_hint import RulesInEffect
from amp_ir.amp.overrides import Override
from amp_ir.amp.policies import find_policy
from amp_ir.api import Models, Optimizers, autocast, compile_into, rewrite, trace_unchanged
from amp_ir.buckets.bucket_options import BucketOptions, Key
from amp_ir.buckets.bucketed_calls import BucketedCalls, PaddedProgram
from amp_ir.buckets.padded_batch import PaddedBatch, padded_examples
from amp_ir.capture import trace
from amp_ir.capture.announced_batches import announced_batches
from amp_ir.capture.arguments import NESTED
from amp_ir.capture.guards.call_signature import CallSignature
from amp_ir.capture.guards.changing_arguments import ChangingArguments
from amp_ir.errors import ArgumentError, CopyError, OptionError, StateError
from amp_ir.host.fork_safe_lock import ForkSafeLock
from amp_ir.ir.capturing import captured_scalers
from amp_ir.ir.options import check_budget, check_limit, check_opt_level, check_rounding
from amp_ir.ir.step_log import StepRecord
from amp_ir.ir.step_module import StepHooks, StepModule
from amp_ir.ir.target import target_of
from amp_ir.runtime.arena import Arena
from amp_ir.runtime.precompilation import Captured, Precompilation
from amp_ir.runtime.step import NO_COPY, CompiledStep, refuse_names
from amp_ir.runtime.step_variants import (
    DEFAULT_LIMIT,
    DEFAULT_SHAPES,
    Recompile,
    StepVariants,
    Users,
    Variant,
    log,
)

# A number that has changed this often becomes an input: it probably changes at every step.
_CHANGES_TO_INPUT = 2


class JitStep:
    """A step that is captured, cast and compiled at its first call, and again when a guard fails.

    The programs used last are kept: a step that changes back runs an earlier one. All work in one
    arena, as large as the largest needs. Calls from several threads run one after the other.
    """

    def __init__(self, step: Callable[..., Any], **options: Any) -> None:
        self._step = step
        self._amp_dtype = options.pop("amp_dtype")
        self._autocast_options = options.pop("autocast_options")
        self._compile_options = options.pop("compile_options")
        buckets: BucketOptions | None = options.pop("buckets")
        self._buckets = None if buckets is None else BucketedCalls(buckets)
        self._variants: StepVariants[CallSignature]
        limits = options.pop("recompile_limit"), options.pop("max_shapes")
        keyed_by = "shapes, dtypes or structures"
        name = _name_of(step)
        users = Users("a jitted step", name, "batches", keyed_by, "train.recompiles")
        self._variants = StepVariants(*limits, users)
        announced = options.pop("precompile")
        self._precompilation = Precompilation(
            *(announced, self._capture, self._variants, name),
            in_thread=not target_of(self._compile_options["device"]).is_cuda,
        )
        self._trace_options = options
        self._turn = ForkSafeLock("the step was running")
        self._arena = Arena()
        self._compile_seconds = 0.0
        self._number_changes: collections.Counter[str] = collections.Counter()
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
        refuse_names(named)
        if captured_scalers.get() is not None:
            # Another thread, which waits for the capture, may hold its lock.
            raise ArgumentError(NESTED)
        with self._turn:
            return self._run(batch) if self._buckets is None else self._run_in_buckets(batch)

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
        if self.compiled is None:
            raise StateError("the step has not run yet; call it first")
        return self.compiled.ir(stage)

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
        if self.compiled is None:
            raise StateError("the step has not run yet; call it first")
        return self.compiled.last

    @property
    def skipped(self) -> bool:
        """`CompiledStep.skipped` of the program that ran last; False before the first call."""
        return self.compiled is not None and self.compiled.skipped

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

    def _run(self, batch: tuple[Any, ...]) -> Any:
        signature, tensors = CallSignature.of(batch)
        return self._variant(signature, batch).program.run_current(tensors)

    def _run_in_buckets(self, batch: tuple[Any, ...]) -> Any:
        assert self._buckets is not None
        while (padded := self._buckets.padded(batch)) is not None:
            signature, tensors = CallSignature.of(padded.args)
            try:
                variant, proven = self._proven_variant(signature, padded)
            except Exception as error:  # whatever it is: the batch alone raises what is its own
                if not self._buckets.pads_less(padded, error):
                    raise self._buckets.explained(padded, error) from error.__cause__
                continue
            if proven is None:
                return self._timed(padded, variant, tensors)
            if not padded.fits(proven.padding):
                # Too short: what the step reads of the data would be padding.
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
        value = variant.program.run_current(tensors)
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
        options = self._options(signature)
        mod = self._trace(options, batch)
        proven = None
        if self._buckets is not None and padded is not None and self._buckets.needs_proof(padded):
            proven = self._buckets.prove(mod, functools.partial(self._trace, options), padded)
        captured = self._cast(mod, signature, batch)
        compiled = captured.compile()
        self._changing_arguments.add(signature)
        seconds = time.perf_counter() - started
        self._compile_seconds = seconds
        variant = self._variants.add(captured.signature, captured.guards, compiled, why, seconds)
        if self._buckets is not None and padded is not None and proven is not None:
            self._buckets.add(variant, padded, proven)
        for note in compiled.module.notes:
            log.info("%s", note)
        return variant

    def _capture(self, signature: CallSignature, batch: tuple[Any, ...]) -> Captured[CallSignature]:
        return self._cast(self._trace(self._options(signature), batch), signature, batch)

    def _trace(self, options: dict[str, Any], batch: tuple[Any, ...]) -> StepModule:
        # What padding does is proven op by op.
        rolls_loops = self._buckets is None
        mod: StepModule = trace_unchanged(self._step, batch, rolls_loops=rolls_loops, **options)
        return mod

    def _cast(
        self, mod: StepModule, signature: CallSignature, batch: tuple[Any, ...]
    ) -> Captured[CallSignature]:
        if self._random_state is None:
            self._random_state = mod.random_state
        elif mod.random_state is not None:
            mod = mod.with_random_state(self._random_state)
        mod, guards = rewrite(mod), mod.hooks
        if self._amp_dtype is not None:
            guards = _with_rules(guards, RulesInEffect())
            mod = autocast(mod, batch, amp_dtype=self._amp_dtype, **self._autocast_options)
        followed = attrs.evolve(signature, followed=mod.hooks.followed)
        compiled = functools.partial(compile_into, self._arena, mod, **self._compile_options)
        return Captured(followed, guards, compiled)

    def _options(self, signature: CallSignature) -> dict[str, Any]:
        """Return the options of a capture, with the numbers that it should not freeze."""
        matching = self._variants.matching(signature)
        if matching is not None:
            self._number_changes.update(matching.guards.changed_numbers())
        changes = self._number_changes + self._changing_arguments.counts(signature)
        names = [name for name, count in changes.items() if count >= _CHANGES_TO_INPUT]
        if not names:
            return self._trace_options
        return {**self._trace_options, "numbers_as_inputs": frozenset(names)}


def _name_of(step: Callable[..., Any]) -> str:
    """Return a step's name and where it is defined: "step (train.py:12)"."""
    kind = type(step)
    name = getattr(step, "__qualname__", kind.__qualname__).replace("<locals>.", "")
    code = getattr(step, "__code__", None)
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else name


def _with_rules(guards: StepHooks, rules: RulesInEffect) -> StepHooks:
    """Return guards that compare the rules too, which a CompiledStep has from its autocast."""
    return attrs.evolve(
        guards, recompile_reason=lambda: guards.recompile_reason() or rules.change()
    )


def jit(
    step: Callable[..., Any],
    *,
    model: Models,
    optimizer: Optimizers = None,
    scaler: Any = None,
    amp_dtype: str | None = None,
    overrides: Sequence[Override] = (),
    policy: str = "default",
    verbose: bool = False,
    device: str = "cpu",
    opt_level: int = 3,
    rounding: str = "fast",
    memory_budget: int | None = None,
    recompile_limit: int = DEFAULT_LIMIT,
    max_shapes: int = DEFAULT_SHAPES,
    precompile: Sequence[tuple[Any, ...]] = (),
    buckets: Mapping[Key, Mapping[int, Sequence[int] | str]] | str | None = None,
    pad: Mapping[Key, float] | None = None,
    pad_check: str = "proof",
) -> JitStep:
    """Capture, cast and compile `step` when it is first called, and again when a guard fails.

    Another shape, dtype or structure of the batch, train or eval mode, a frozen parameter, a flag:
    each is compiled at its first call, and kept. Python's logger "amp_ir" reports it at level INFO,
    with the reason; `train.recompiles` lists it.

    Args:
        step: as for `trace_step`, as are `model`, `optimizer` and `scaler`.
        amp_dtype: "float16", "bfloat16", or None for no casts.
        overrides: as for `autocast`, as are `policy` and `verbose`.
        device: as for `compile`, as are `opt_level`, `rounding` and `memory_budget`.
        recompile_limit: how many programs are kept for batches of the same structure, shapes and
            dtypes; a step that needs more emits one warning.
        max_shapes: for how many structures, shapes and dtypes of the batch programs are kept. The
            one not used for longest goes, which one warning says. They share one arena.
        precompile: batches of other shapes that the step will be called with, such as the last one
            of an epoch, each the tuple of the step's arguments. From the second call on each is
            captured before a step runs, one a call, and compiled while steps run. What fails is one
            warning, and compiled again by the call that needs it.
        buckets: sizes to which axes of the batch are padded, by argument and axis:
            {"input_ids": {1: (64, 128, 256)}}. An argument is named by its position, by its name
            in `step`, or by its key where it lies in a dict. Axes of equal lengths with equal
            sizes are one dimension. A program is compiled for each size that comes, and only if
            it is proven that padding changes neither the state nor the results; results are
            returned without padding. Dropout draws other numbers than without padding. A batch
            longer than all sizes runs unpadded. "auto" instead of sizes chooses them from the
            lengths that come, at most three quarters of `max_shapes`. buckets="auto" does so for
            all axes of the arguments in `pad` whose lengths differ between calls; one whose padding
            cannot be proven is left alone, which one warning says.
        pad: the number that each of these arguments is padded with: {"input_ids": 0}.
        pad_check: "values" compares the state and the results of one padded step of each size with
            those of the same step without padding, instead of a proof: for steps with ops of which
            the proof knows nothing. It says nothing about other batches.

    Raises:
        OptionError, DeviceError, ArgumentError: at once, for errors independent of the batch.
    """
    if amp_dtype not in (None, "float16", "bfloat16", "float32"):
        raise OptionError(
            f'amp_dtype={amp_dtype!r} is not supported; expected "float16", "bfloat16", "float32" '
            "or None for no casts"
        )
    find_policy(policy)
    check_rounding(rounding)
    check_budget(memory_budget)
    check_opt_level(opt_level)
    check_limit("recompile_limit", recompile_limit)
    check_limit("max_shapes", max_shapes)
    if pad is not None and buckets is None:
        raise OptionError(
            "pad= is given without buckets=, which says what is padded to which sizes"
        )
    options = (
        None
        if buckets is None
        else BucketOptions(step, buckets, pad, pad_check, max(1, max_shapes * 3 // 4))
    )
    examples = precompile if options is None else padded_examples(options, precompile)
    announced = announced_batches(examples, max_shapes)
    target_of(device)
    trace.check_training(step, model, optimizer, scaler)
    return JitStep(
        step,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        amp_dtype=amp_dtype,
        autocast_options={"overrides": tuple(overrides), "policy": policy, "verbose": verbose},
        recompile_limit=recompile_limit,
        max_shapes=max_shapes,
        precompile=announced,
        buckets=options,
        compile_options={
            "device": device,
            "opt_level": opt_level,
            "rounding": rounding,
            "memory_budget": memory_budget,
        },
    )
