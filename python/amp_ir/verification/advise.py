# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.advise`: will mixed precision pay, on this machine or on a GPU that is not here?

The step is planned twice, in float32 and with the casts of autocast. The time of each kernel and
library call is that of its arithmetic or of its bytes, whichever is longer, at the machine's rates
for work of that size, and what a call takes beside. Nothing is compiled and no step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from amp_ir.amp.overrides import Override, QuietOverride, listed
from amp_ir.api.estimate import EstimatedCall, StepEstimate, estimate_step
from amp_ir.api.precision import autocast
from amp_ir.errors import OptionError
from amp_ir.host.machine_model import MachineModel
from amp_ir.ir.options import batch_of, check_module
from amp_ir.ir.public_function import public_function
from amp_ir.ir.step_module import StepModule
from amp_ir.verification.advice import Advice, Finding
from amp_ir.verification.error_report import low_dtype_name
from amp_ir.verification.estimated_machine import estimated_machine

# Below this share of the step nothing is worth a line.
_WORTH = 0.02
_MOST = 5
_MANY_CALLS, _MUCH_MEMORY = 0.3, 0.5


@public_function("amp_ir.advise")
def advise(
    mod: StepModule,
    args: tuple[Any, ...],
    *,
    amp_dtype: str | torch.dtype = "bfloat16",
    gpu: str | None = None,
    allow_tf32: bool = False,
    overrides: Sequence[Override] = (),
    policy: str = "default",
) -> Advice:
    """Estimate what mixed precision gains, before any training, and say what limits it.

    Args:
        mod: what `trace_step` returns, before autocast.
        args: the example batch.
        amp_dtype: "bfloat16" or "float16".
        gpu: a GPU by name, "H100" or "L4", by its published peaks; by default this machine's CPU,
            whose rates are measured in some seconds, once a process.
        allow_tf32: whether a GPU's float32 matmuls use TF32.
        overrides: as for `autocast`, as is `policy`.

    Raises:
        OptionError: an option has a value that it does not accept, or the step went through
            autocast, or its tensors are on a GPU and `gpu` is not given.
    """
    check_module(mod, "advise")
    amp_dtype = low_dtype_name(amp_dtype)
    if mod.plan is not None:
        raise OptionError("the step went through autocast; give advise the one before")
    batch_of(mod, args)
    machine = estimated_machine(mod, gpu, allow_tf32=allow_tf32)
    full_step = estimate_step(mod, machine)

    def low_step(*more: Override) -> StepEstimate:
        every = [*listed(overrides), *more]
        low = autocast(mod, args, amp_dtype=amp_dtype, overrides=every, policy=policy)
        return estimate_step(low, machine)

    return _advice(full_step, low_step, machine, amp_dtype)


def _advice(
    full: StepEstimate,
    low_step: Callable[..., StepEstimate],
    machine: MachineModel,
    amp_dtype: str,
) -> Advice:
    low = low_step()
    if not full.calls:
        raise OptionError(
            "the step computes nothing, so that there is no time to gain; give advise a step that "
            "trains, or returns what a model makes of the batch"
        )
    time = low.milliseconds
    becoming = {_key(one) for one in low.calls if _is_low(one, amp_dtype)}
    arithmetic = sum(one.milliseconds for one in full.calls if _key(one) in becoming)
    waiting = [one for one in low.calls if one.memory_milliseconds > one.arithmetic_milliseconds]
    findings = [
        one
        for one in (
            *_findings(low, machine, amp_dtype),
            *_modules_that_lose(full, low, low_step),
        )
        if one.milliseconds >= _WORTH * time
    ]
    return Advice(
        amp_dtype=amp_dtype,
        machine=machine.name,
        source=machine.source,
        full_milliseconds=full.milliseconds,
        low_milliseconds=time,
        full_peak_nbytes=full.peak_nbytes,
        low_peak_nbytes=low.peak_nbytes,
        arithmetic_share=arithmetic / full.milliseconds,
        memory_share=sum(one.memory_milliseconds for one in waiting) / time,
        call_share=sum(one.call_milliseconds for one in low.calls) / time,
        cast_share=sum(one.milliseconds for one in low.calls if one.call.is_cast) / time,
        findings=tuple(sorted(findings, key=lambda one: -one.milliseconds)),
    )


def _key(one: EstimatedCall) -> tuple[Any, ...]:
    """Return what a library call has in both steps."""
    return one.extents, tuple((p.module, p.phase) for p in one.call.locations)


def _is_low(one: EstimatedCall, amp_dtype: str) -> bool:
    return bool(one.flop) and one.call.compute_dtype == amp_dtype


def _findings(low: StepEstimate, machine: MachineModel, amp_dtype: str) -> Iterator[Finding]:
    yield from _odd_extents(low, machine, amp_dtype)
    yield from _small_matmuls(low, machine, amp_dtype)
    yield from _whole_step(low, machine)


def _odd_extents(low: StepEstimate, machine: MachineModel, amp_dtype: str) -> Iterator[Finding]:
    if not machine.multiple:
        return
    found: dict[tuple[str, tuple[int, ...]], float] = {}
    for one in low.calls:
        odd = tuple(x for x in one.extents if x > machine.multiple and x % machine.multiple)
        if odd and _is_low(one, amp_dtype):
            place = one.call.locations[0].module if one.call.locations else ""
            found[place, odd] = found.get((place, odd), 0.0) + one.milliseconds
    for (place, odd), milliseconds in sorted(found.items(), key=lambda item: -item[1])[:_MOST]:
        near = ", ".join(f"{x} (say {-(-x // machine.multiple) * machine.multiple})" for x in odd)
        yield Finding(
            "odd extents",
            f"{place or 'the step'}: the extents {near} are no multiples of {machine.multiple}, "
            "which low matmuls are fastest with; pad the vocabulary or the width",
            milliseconds,
        )


def _small_matmuls(low: StepEstimate, machine: MachineModel, amp_dtype: str) -> Iterator[Finding]:
    small = [
        one
        for one in low.calls
        if _is_low(one, amp_dtype) and one.extents and _reached(one, machine, amp_dtype) < 0.5
    ]
    if not small:
        return
    largest = max(small, key=lambda one: one.milliseconds)
    place = largest.call.locations[0].module if largest.call.locations else ""
    what = (
        f"fill less than half of its {machine.units} multiprocessors: the batch is too small for "
        "this GPU"
        if machine.units
        else "reach less than half of the rate of large ones: a larger batch, or heads in one "
        "matmul, would"
    )
    yield Finding(
        "small matmuls",
        f"{len(small)} low matmuls {what} (first {place or 'the step'}, "
        f"{' x '.join(map(str, largest.extents))})",
        sum(one.milliseconds for one in small),
    )


def _reached(one: EstimatedCall, machine: MachineModel, amp_dtype: str) -> float:
    curve = machine.rates[amp_dtype]
    size = one.flop if machine.units else one.flop / one.pieces
    return curve.at(size) / curve.points[-1][1]


def _whole_step(low: StepEstimate, machine: MachineModel) -> Iterator[Finding]:
    time = low.milliseconds
    calls = sum(one.call_milliseconds for one in low.calls)
    if calls > _MANY_CALLS * time:
        yield Finding(
            "launches",
            f"{len(low.calls)} calls a step are started for little work each: a larger batch is "
            "nearly free",
            calls,
        )
    waiting = [
        one
        for one in low.calls
        if one.memory_milliseconds > one.arithmetic_milliseconds and not one.call.is_cast
    ]
    spent = sum(one.memory_milliseconds for one in waiting)
    if spent > _MUCH_MEMORY * time:
        optimizer = sum(
            one.memory_milliseconds
            for one in waiting
            if one.call.locations and one.call.locations[0].phase == "optimizer"
        )
        yield Finding(
            "memory",
            f"most of the step waits for memory ({optimizer / time:.0%} of it in the optimizer, "
            "which stays float32): low precision halves bytes at most; a larger batch or fewer "
            "optimizer steps help",
            spent,
        )


def _modules_that_lose(
    full: StepEstimate, low: StepEstimate, low_step: Callable[..., StepEstimate]
) -> Iterator[Finding]:
    """Find modules that take longer in low precision, with the casts of it.

    Each override is tried: the casts of a module may only move to another one.
    """
    before, after = _by_module(full), _by_module(low)
    losing = sorted(((after[name] - before.get(name, 0.0), name) for name in after), reverse=True)
    for more, name in losing[:_MOST]:
        if not name or more < _WORTH * low.milliseconds:
            continue
        changed = low_step(QuietOverride(module=name, to="float32"))
        saved = low.milliseconds - changed.milliseconds
        if saved > 0.0:
            yield Finding(
                "casts",
                f"{name}: takes longer in low precision, with its casts; "
                f"Override(module={name!r}, to='float32') gives this back",
                saved,
            )


def _by_module(step: StepEstimate) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in step.calls:
        places = list(dict.fromkeys(place.module for place in one.call.locations)) or [""]
        for place in places:
            found[place] = found.get(place, 0.0) + one.milliseconds / len(places)
    return found
