# SPDX-License-Identifier: Apache-2.0
"""Overflow provenance: replay a step from the state as it is, and say where it stops being finite.

A skipped step leaves the state and the random numbers as they were, so that a replay with the scale
that it used is exact. The kernels run on copies; the interpreter evaluates the plan op by op.
What helps is found by trying: replays with smaller scales, and with overrides.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import attrs
import torch
import tvm
from tvm import relax

from amp_ir.amp.kernels import Kind, kind_of
from amp_ir.amp.overrides import Override
from amp_ir.amp.plan import CastPlan
from amp_ir.dialect.define import LOW_DTYPES
from amp_ir.ir.dataflow import Dataflow, op_name, variables_of
from amp_ir.ir.step_graph import VIEWS, read_step
from amp_ir.ir.step_log import StepLog
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.replay.non_finite_origins import (
    find_origins,
    largest_read,
    reads_constant,
    reads_finite,
)
from amp_ir.replay.observed_run import ObservedRun, non_finite_outputs, observe
from amp_ir.replay.origin import Origin
from amp_ir.replay.overflow import Cause, Overflow
from amp_ir.rewrites.unroll_loops import unroll_loops

RunKernels = Callable[[Mapping[str, Any]], "list[torch.Tensor]"]
Recast = Callable[[Sequence[Override]], "StepModule | None"]
StoredIn = Callable[[tvm.IRModule], "Set[relax.Var]"]

# Replays that tell apart the origins of one step, and overrides that are tried one after the other.
_MOST_ORIGINS, _MOST_OVERRIDES = 8, 6
_OF_PROGRAM = (
    "It reads an infinity or NaN that is a number of your program, such as a learning rate or the "
    "value of a mask."
)
_NOT_TRIED = (
    "No override was tried: the casts follow a plan that was given, or rules that are not in "
    "effect any more."
)


@attrs.frozen(eq=False)
class Replay:
    """A compiled step that can be run again, without touching the user's state.

    Attributes:
        mod: the step as it was compiled.
        run_kernels: runs the compiled program on the given state, which it writes to; returns the
            outputs of `main`.
        recast: the step with further overrides; None if its casts cannot be decided again.
        stored: the variables that fast kernels keep in memory; None where kernels round as the plan
            says.
    """

    mod: StepModule
    run_kernels: RunKernels
    recast: Recast
    stored: StoredIn | None


def find_overflow(replay: Replay, batch: Sequence[torch.Tensor]) -> Overflow:
    """Say where the step on `batch`, flat, makes its first infinity or NaN; see `Overflow`."""
    return _Search(replay, batch).run()


class _Search:
    """One search: the inputs of the step, and its evaluations."""

    def __init__(self, replay: Replay, batch: Sequence[torch.Tensor]) -> None:
        self.replay = replay
        self.mod = _without_loops(replay.mod)
        self.batch = list(batch)
        self.scales = scales_of(replay.mod)
        self.is_fast = replay.stored is not None

    def run(self) -> Overflow:
        """Compare the kernels with the plan, and go on with what they agree on."""
        inputs = self.inputs(self.scales)
        reached = non_finite_outputs(
            self.replay.mod, inputs, self.replay.run_kernels(self.state(self.scales))
        )
        run = self.observe(self.mod, self.scales)
        if run.is_finite and self.is_fast:
            # Where kernels are fused in another way than is thought here, the plan still tells.
            self.is_fast = False
            run = self.observe(self.mod, self.scales)
        if not reached:
            return Overflow(cause="none", scales=self.used_scales, note=self.of_plan_only())
        if run.is_finite:
            return Overflow(
                cause="kernels", tensor=reached[0], scales=self.used_scales,
                reached=reached,
            )  # fmt: skip
        return self.explain(run)

    def of_plan_only(self) -> str:
        """Return what there is to say where only the plan's own rounding overflows."""
        if self.replay.stored is None:
            return ""
        self.is_fast = False
        run = self.observe(self.mod, self.scales)
        if run.is_finite:
            return ""
        found = self.explain_origin(run)
        return (
            f"Rounded op by op, as the plan says, {found.op} in {found.place} would make "
            f'{found.value}; fused kernels keep float32 there, and rounding="strict" does not.'
        )

    @property
    def used_scales(self) -> tuple[float, ...]:
        return tuple(self.scales.values())

    def state(self, scales: Mapping[str, float]) -> dict[str, Any]:
        """Return copies of the state at the given loss scales."""
        copies: dict[str, Any] = self.replay.mod.copied_state()
        for name, scale in scales.items():
            copies[name].fill_(scale)
        return copies

    def inputs(self, scales: Mapping[str, float]) -> list[torch.Tensor]:
        """Return the inputs of `main`."""
        copies, batch = self.state(scales), iter(self.batch)
        held = [
            copies[spec.name] if spec.is_state else next(batch)
            for spec in self.replay.mod.signature.inputs
        ]
        return [one if isinstance(one, torch.Tensor) else one() for one in held]

    def observe(
        self,
        mod: StepModule,
        scales: Mapping[str, float],
        made_finite: Set[relax.Var] = frozenset(),
    ) -> ObservedRun:
        """Evaluate a step without loops, rounded as its kernels round."""
        unrounded = self.unrounded(mod) if self.is_fast else frozenset()
        return observe(mod, self.inputs(scales), unrounded=unrounded, made_finite=made_finite)

    def unrounded(self, mod: StepModule) -> Set[relax.Var]:
        assert self.replay.stored is not None
        stored = self.replay.stored(mod.ir) | arguments_of_libraries(mod.ir)
        return {one for one in _low_variables(mod.ir) if one not in stored}

    def explain(self, run: ObservedRun) -> Overflow:
        """Describe the origin of a run that is not finite, and try what helps."""
        found = self.explain_origin(run)
        if found.cause != "op":
            return found
        found = attrs.evolve(found, helping_scale=self.helping_scale(self.mod))
        if self.replay.mod.plan is None:
            return attrs.evolve(found, is_in_float32=True)
        full = _without_loops(self.replay.mod.without_casts())
        if not observe(full, self.inputs(self.scales)).is_finite:
            return attrs.evolve(found, is_in_float32=True)
        return attrs.evolve(self.with_overrides(found, run), is_in_float32=False)

    def with_overrides(self, found: Overflow, run: ObservedRun) -> Overflow:
        """Add the overrides that help, at the scale in use or at a smaller one."""
        before = self.replay.recast(())
        if before is None or _decisions(before.plan) != _decisions(self.replay.mod.plan):
            # A plan that was given, or rules that are not in effect any more, decided.
            return attrs.evolve(found, note=_NOT_TRIED)
        overrides, _ = self.helping_overrides(run, self.scales)
        if overrides or found.helping_scale is not None or not self.scales:
            return attrs.evolve(found, overrides=overrides)
        ones = dict.fromkeys(self.scales, 1.0)
        overrides, mod = self.helping_overrides(self.observe(self.mod, ones), ones)
        scale = self.helping_scale(mod) if overrides else None
        return attrs.evolve(found, overrides=overrides, overrides_scale=scale)

    def explain_origin(self, run: ObservedRun) -> Overflow:
        """Describe what made a run not finite; nothing is tried."""
        origins = find_origins(run)
        candidates = [*origins.inputs, *origins.ops]
        chosen = self.deciding(candidates) if candidates else origins.readers[0]
        common: dict[str, Any] = {
            "value": "NaN" if run.extents[chosen].has_nan else "infinity",
            "scales": self.used_scales,
            "reached": self.reached(run),
            "others": tuple(
                str(self.origin(run, one))
                for one in origins.ops
                if not one.same_as(chosen) and reads_finite(run, one)
            ),
        }
        if chosen in origins.inputs:
            return self.of_input(run, chosen, common)
        origin = self.origin(run, chosen)
        place = origin.location
        return Overflow(
            cause="op" if candidates else "constant",
            op=origin.op,
            cast=origin.cast,
            module=place.module,
            phase=place.phase,
            file=place.file,
            line=place.line,
            dtype=str(chosen.ty.dtype),
            largest_input=largest_read(run, chosen),
            note=_OF_PROGRAM if reads_constant(run, chosen) else "",
            **common,
        )

    def deciding(self, candidates: Sequence[relax.Var]) -> relax.Var:
        """Return the first origin without which the step is finite.

        Where it takes several, the first that is harmful without the others.
        """
        few = candidates[:_MOST_ORIGINS]
        alone = ({one} for one in few)
        others = (set(candidates) - {one} for one in few)
        if len(candidates) > 1:
            for one, changed in zip(few, alone, strict=True):
                if self.observe(self.mod, self.scales, changed).is_finite:
                    return one
            for one, changed in zip(few, others, strict=True):
                if not self.observe(self.mod, self.scales, changed).is_finite:
                    return one
        return candidates[0]

    def origin(self, run: ObservedRun, variable: relax.Var) -> Origin:
        return Origin.of(run, variable, self.mod.plan)

    def of_input(self, run: ObservedRun, chosen: relax.Var, common: dict[str, Any]) -> Overflow:
        position = next(k for k, one in enumerate(run.flow.main.params) if one.same_as(chosen))
        spec = self.replay.mod.signature.inputs[position]
        cause: Cause = "batch" if spec.role is Role.BATCH else "state"
        note = ""
        if spec.role is Role.HYPER_PARAMETER:
            note = "It is a number of the optimizer: set it to a finite one."
        return Overflow(cause=cause, tensor=spec.name, dtype=spec.dtype, note=note, **common)

    def reached(self, run: ObservedRun) -> tuple[str, ...]:
        """Return what of the step is not finite: checked gradients, and outputs by name."""
        results = run.result_names(self.replay.mod)
        gradients = [one for one in run.sinks if one not in results]
        found = [f"{len(gradients)} of {run.checked} checked gradients"] if gradients else []
        return (*found, *(results[one] for one in run.sinks if one in results))

    def helping_scale(self, mod: StepModule) -> float | None:
        """Return the largest scale below the one in use, in powers of two, that is finite."""
        if not self.scales:
            return None

        def is_finite_at(exponent: int) -> bool:
            scales = dict.fromkeys(self.scales, 2.0**exponent)
            return self.observe(mod, scales).is_finite

        lowest, highest = 0, math.ceil(math.log2(max(self.scales.values()))) - 1
        if highest < 0 or not is_finite_at(lowest):
            return None
        while lowest < highest:
            middle = (lowest + highest + 1) // 2
            lowest, highest = (middle, highest) if is_finite_at(middle) else (lowest, middle - 1)
        return 2.0**lowest

    def helping_overrides(
        self, run: ObservedRun, scales: Mapping[str, float]
    ) -> tuple[tuple[Override, ...], StepModule]:
        """Return overrides with which the step is finite, the first origin's first; () if none."""
        chosen: list[Override] = []
        mod = self.mod
        while not run.is_finite:
            origins = find_origins(run).ops
            offered = [
                one for origin in origins for one in Origin.of(run, origin, mod.plan).overrides()
            ]
            new = next((one for one in offered if one not in chosen), None)
            if new is None or len(chosen) == _MOST_OVERRIDES:
                return (), self.mod
            chosen.append(new)
            mod = self.recast(chosen)
            run = self.observe(mod, scales)
        for one in chosen[:-1]:
            fewer = [other for other in chosen if other is not one]
            recast = self.recast(fewer)
            if self.observe(recast, scales).is_finite:
                chosen, mod = fewer, recast
        return tuple(chosen), mod

    def recast(self, overrides: Sequence[Override]) -> StepModule:
        recast = self.replay.recast(overrides)
        assert recast is not None
        return _without_loops(recast)


def _decisions(plan: CastPlan) -> collections.Counter[Any]:
    """Return what a plan decides, whatever the order of views."""
    return collections.Counter(
        (one.name, one.module, one.phase, one.line, one.rule, one.reads, one.results)
        for one in plan.ops
        if one.reads
    )


def arguments_of_libraries(ir: tvm.IRModule) -> set[relax.Var]:
    """Return the variables that ops with kernels of their own kind read, through views too."""
    flow = Dataflow(ir)
    found: set[relax.Var] = set()
    for op in read_step(ir).ops:
        if kind_of(op) in (Kind.LIBRARY, Kind.OPAQUE):
            waiting = variables_of(op.call)
            while waiting:
                variable = waiting.pop()
                found.add(variable)
                value = flow.values.get(variable)
                waiting += variables_of(value) if op_name(value) in VIEWS else []
    return found


def _low_variables(ir: tvm.IRModule) -> list[relax.Var]:
    return [
        one
        for one in Dataflow(ir).values
        if isinstance(one.ty, relax.TensorType) and str(one.ty.dtype) in LOW_DTYPES
    ]


def _without_loops(mod: StepModule) -> StepModule:
    return mod.with_ir(unroll_loops(mod.ir))


def scales_of(mod: StepModule) -> dict[str, float]:
    """Return the loss scale of each scaler, by the name of its input.

    That of the last step where that was skipped, since the scale has moved then.
    """
    found = {}
    for spec in mod.signature.inputs:
        if spec.role is Role.SCALER_STATE and spec.name.endswith(".scale"):
            scaler = spec.name.removesuffix(".scale")
            ring, counts = mod.state[f"{scaler}.ring"], mod.state[f"{scaler}.counts"]
            assert isinstance(ring, torch.Tensor)
            assert isinstance(counts, torch.Tensor)
            last = StepLog(ring, counts).last()
            now: Any = mod.state[spec.name]
            found[spec.name] = float(now) if last is None or not last.skipped else last.scale
    return found
