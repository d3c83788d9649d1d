# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.jit`, as a function and as a decorator of functions and methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from amp_ir.amp.overrides import Override, listed
from amp_ir.amp.policies import find_policy
from amp_ir.api import Models, Optimizers
from amp_ir.capture import trace
from amp_ir.capture.announced_batches import announced_batches
from amp_ir.capture.call_arguments import Key
from amp_ir.distributed.rank_options import check_exchange
from amp_ir.distributed.replicas import find_ranks
from amp_ir.errors import ArgumentError, OptionError
from amp_ir.ir.options import (
    check_budget,
    check_limit,
    check_opt_level,
    check_rounding,
    dtype_name,
    meant_dtype,
)
from amp_ir.ir.public_function import public_function
from amp_ir.ir.target import target_of
from amp_ir.jit_step import JitStep
from amp_ir.replay.watch import Watch
from amp_ir.report.step_name import name_between_ranks
from amp_ir.runtime.overflow_log import overflow_log
from amp_ir.runtime.step_variants import DEFAULT_LIMIT, DEFAULT_SHAPES

if TYPE_CHECKING:
    from amp_ir.buckets.bucketed_calls import BucketedCalls

_NOT_GIVEN: Any = object()


@public_function("amp_ir.jit")
def jit(
    step: Any = _NOT_GIVEN,
    *,
    model: Models | str,
    optimizer: Optimizers | str = None,
    scaler: Any = None,
    amp_dtype: str | torch.dtype | None = None,
    overrides: Sequence[Override] = (),
    policy: str = "default",
    verbose: bool = False,
    device: str = "cpu",
    opt_level: int = 3,
    rounding: str = "fast",
    memory_budget: int | None = None,
    recompute: bool = True,
    recompile_limit: int = DEFAULT_LIMIT,
    max_shapes: int = DEFAULT_SHAPES,
    precompile: Sequence[tuple[Any, ...]] = (),
    buckets: Mapping[Key, Mapping[int, Sequence[int] | str]] | str | None = None,
    pad: Mapping[Key, float] | None = None,
    pad_check: str = "proof",
    on_overflow: str | None = None,
    explain_below: float = 256.0,
    process_group: Any = None,
    data_parallel: bool = False,
    comm_dtype: str | torch.dtype | None = None,
    bucket_cap_mb: float | None = None,
    shard: str | None = None,
    watch: Watch | None = None,
) -> Any:
    """Capture, cast and compile `step` when it is first called, and again when a guard fails.

    Another shape, dtype or structure of the batch, train or eval mode, a frozen parameter, a flag:
    each is compiled at its first call, and kept. Python's logger "amp_ir" reports it at level INFO,
    with the reason; `train.recompiles` lists it.

    Without `step` it is a decorator: `@amp_ir.jit(model=model, optimizer=optimizer)`. A decorated
    method is a jitted step of each instance; `model="net"` then names the attribute of the instance
    that holds the model, as `optimizer=` and `scaler=` do.

    Args:
        step: as for `trace_step`, as are `model`, `optimizer` and `scaler`.
        amp_dtype: "float16", "bfloat16" (or torch's dtypes), or None for no casts.
        overrides: as for `autocast`, as are `policy` and `verbose`.
        device: as for `compile`; `opt_level`, `rounding`, `memory_budget`, `recompute` as well.
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
        on_overflow: "explain" logs `train.find_overflow` of each skipped step by which a loss scale
            falls below `explain_below`. On a GPU every step is then waited for.
        explain_below: a loss scale. A new scaler begins at 65536 and falls until steps are finite.
        process_group: as for `trace_step`, as are `data_parallel`, `comm_dtype` and
            `bucket_cap_mb`. All ranks call the step equally often; before the first exchange they
            compare their programs.
        shard: "optimizer": each rank holds its part of the optimizers' state, updates that part of
            the parameters, and sends it to the others; for optimizers that compute each element
            alone. "gradients": no whole gradient is left after the exchange either. None: every
            rank holds all.
        watch: an `amp_ir.Watch`, which collects the ranges of chosen tensors every so many steps.

    Raises:
        OptionError, DeviceError, ArgumentError: at once, for errors independent of the batch.
    """
    options = {name: value for name, value in locals().items() if name != "step"}
    if step is _NOT_GIVEN:
        return functools.partial(jit, **options)
    if any(isinstance(options[name], str) for name in _OWNERS):
        return JitMethod(step, options)
    made = _jitted(step, **options)
    # A method of a class: each instance has a jitted step of its own.
    made.bind_to = functools.partial(_bound, step, options)
    return made


_OWNERS = ("model", "optimizer", "scaler")


class JitMethod:
    """A method that `jit` decorates, whose model and optimizer are attributes of the instance."""

    def __init__(self, step: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._options = options

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the jitted step of an instance, made at the first access."""
        return self if instance is None else _bound(self._step, self._options, instance)

    def __call__(self, *_args: Any, **_named: Any) -> Any:
        """Refuse to be called without an instance.

        Raises:
            ArgumentError: always.
        """
        named = ", ".join(f"{n}={self._options[n]!r}" for n in _OWNERS if self._options[n])
        raise ArgumentError(
            f"jit({named}) names attributes of the object whose method it decorates, and "
            f"{self._step.__qualname__} is called as a function; pass the objects themselves, or "
            "decorate a method and call it on an instance"
        )


def _bound(step: Callable[..., Any], options: dict[str, Any], instance: Any) -> JitStep:
    """Return the jitted step of an instance, which keeps it; a copy of the instance does not."""
    kept, key = vars(instance), f"_amp_ir_{step.__name__}"
    if key in kept and kept[key].__wrapped__.__self__ is instance:
        return cast(JitStep, kept[key])
    found = {name: _attribute(instance, options[name], name) for name in _OWNERS}
    made = _jitted(step.__get__(instance), **{**options, **found})
    kept[key] = made
    return made


def _attribute(instance: Any, value: Any, option: str) -> Any:
    if not isinstance(value, str):
        return value
    if not hasattr(instance, value):
        kind = type(instance).__name__
        raise ArgumentError(
            f"{option}={value!r} names no attribute of this {kind}; set self.{value} before the "
            "first call of the step, or give another name"
        )
    return getattr(instance, value)


def _jitted(
    step: Callable[..., Any],
    *,
    model: Models,
    optimizer: Optimizers,
    scaler: Any,
    amp_dtype: str | torch.dtype | None,
    overrides: Sequence[Override],
    policy: str,
    verbose: bool,
    device: str,
    opt_level: int,
    rounding: str,
    memory_budget: int | None,
    recompute: bool,
    recompile_limit: int,
    max_shapes: int,
    precompile: Sequence[tuple[Any, ...]],
    buckets: Mapping[Key, Mapping[int, Sequence[int] | str]] | str | None,
    pad: Mapping[Key, float] | None,
    pad_check: str,
    on_overflow: str | None,
    explain_below: float,
    process_group: Any,
    data_parallel: bool,
    comm_dtype: str | torch.dtype | None,
    bucket_cap_mb: float | None,
    shard: str | None,
    watch: Watch | None,
) -> JitStep:
    amp_dtype = dtype_name(amp_dtype)
    accepted = (None, "float16", "bfloat16", "float32")
    if amp_dtype not in accepted:
        raise OptionError(
            f'amp_dtype={amp_dtype!r} is not supported; expected "float16", "bfloat16", "float32" '
            f"or None for no casts{meant_dtype(amp_dtype, accepted)}"
        )
    find_policy(policy)
    check_rounding(rounding)
    check_budget(memory_budget, recompute)
    check_opt_level(opt_level)
    check_limit("recompile_limit", recompile_limit)
    check_limit("max_shapes", max_shapes)
    if watch is not None and not isinstance(watch, Watch):
        raise OptionError(f"watch={watch!r} is not an amp_ir.Watch(every=..., ops=...)")
    explained = overflow_log(on_overflow, explain_below)
    for name, is_given in (("pad", pad is not None), ("pad_check", pad_check != "proof")):
        if is_given and buckets is None:
            raise OptionError(
                f"{name}= is given without buckets=, which says what is padded to which sizes"
            )
    padded: BucketedCalls | None = None
    if buckets is not None:
        most_sizes = max(1, max_shapes * 3 // 4)
        padded = _bucketed_calls(step, buckets, pad, pad_check, most_sizes)
        precompile = padded.examples(precompile)
    announced = announced_batches(precompile, max_shapes)
    target = target_of(device)
    captured, ranks = find_ranks(
        model,
        process_group=process_group,
        data_parallel=data_parallel,
        comm_dtype=comm_dtype,
        bucket_cap_mb=bucket_cap_mb,
        shard=shard,
        step=name_between_ranks(step),
    )
    check_exchange(ranks, is_cuda=target.is_cuda, amp_dtype=amp_dtype)
    if explained is not None and ranks is not None and ranks.exchanges:
        raise OptionError(
            f"on_overflow={on_overflow!r} runs a skipped step again on one rank alone, and this "
            "one exchanges gradients with others; leave it out"
        )
    if watch is not None and ranks is not None and ranks.exchanges:
        raise OptionError(
            "watch= runs another program every so many steps, and the ranks that exchange "
            "gradients must all run the same one; leave it out"
        )
    trace.check_training(step, captured, optimizer, scaler)
    return JitStep(
        step,
        ranks=ranks,
        model=captured,
        optimizer=optimizer,
        scaler=scaler,
        amp_dtype=amp_dtype,
        autocast_options={
            "overrides": tuple(listed(overrides)),
            "policy": policy,
            "verbose": verbose,
        },
        recompile_limit=recompile_limit,
        max_shapes=max_shapes,
        precompile=announced,
        overflow_log=explained,
        watch=watch,
        buckets=padded,
        compile_options={
            "device": device,
            "opt_level": opt_level,
            "rounding": rounding,
            "memory_budget": memory_budget,
            "recompute": recompute,
        },
    )


def _bucketed_calls(*options: Any) -> BucketedCalls:
    # On demand: the proofs of padding are dozens of modules, which few steps need.
    from amp_ir.buckets.bucket_options import BucketOptions
    from amp_ir.buckets.bucketed_calls import BucketedCalls

    return BucketedCalls(BucketOptions(*options))
