# SPDX-License-Identifier: Apache-2.0
"""The error that the roundings of each op make alone: groups of ops first, then the guilty ones.

Only the low values of some ops are rounded: those of all ops, of each phase, of the modules of the
worst phase, and so on down to single ops, the largest error first; of every op at once where time
allows that. What time does not reach stays a group.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from tvm import relax

from amp_ir.amp.overrides import Override
from amp_ir.dialect.define import LOW_DTYPES
from amp_ir.dialect.external_call import NAME as EXTERNAL
from amp_ir.dialect.external_call import external_op
from amp_ir.ir.dataflow import Dataflow, op_name, variables_of
from amp_ir.ir.location import from_span
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.step_graph import VIEWS
from amp_ir.ir.step_module import StepModule
from amp_ir.replay.non_finite_origins import call_of
from amp_ir.verification.outcome import Tensors
from amp_ir.verification.reference import check_reference
from amp_ir.verification.rounded_step import (
    RoundedStep,
    Wanted,
    squared_errors,
    squared_norm,
)

# Ops that move elements round nothing.
_MOVES = (*VIEWS, "relax.broadcast_to")
_CAST = "amp_ir.cast"
_Place = tuple[str, str, str]
# What float32's own roundings may make of the error, for the step to be evaluated in float32.
_NOISE_SHARE = 0.01


@attrs.frozen
class Contribution:
    """The gradient error that the roundings of one op make, or of a group that was not split.

    Attributes:
        op: the op's name; "" for a group.
        module: the module, or the path that all of the group share.
        phase: "forward", "backward" or "optimizer"; "" for a group of several.
        is_cast: whether they are casts that autocast inserted for the op, not its results.
        roundings: how many values are rounded.
        error: the relative error of all gradients together, with these roundings alone.
        worst_parameter: the parameter whose gradient they change most, relative to itself.
        line: "file:line" of the first.
        elements: how many numbers are rounded.
        overrides: what keeps these from being rounded, for `autocast` or `jit`.
    """

    op: str
    module: str
    phase: str
    is_cast: bool
    roundings: int
    error: float
    worst_parameter: str
    line: str
    elements: int = 0
    overrides: tuple[Override, ...] = ()

    @property
    def name(self) -> str:
        """Say what it is: `casts for relax.matmul in encoder.0 (backward)`."""
        place = f"in {self.module or 'step'}" + (f" ({self.phase})" if self.phase else "")
        if not self.op:
            return f"{self.roundings} roundings {place}, not split"
        return f"casts for {self.op} {place}" if self.is_cast else f"{self.op} {place}"


@attrs.frozen
class Contributions:
    """The contributions of a step's roundings, the largest first.

    Attributes:
        error: the gradients' error by all of them together.
        dtype: what is not rounded was evaluated in this dtype.
        noise: the gradients' error by that dtype's own roundings; 0 for float64.
        is_complete: whether every op was measured.
    """

    error: float
    parts: tuple[Contribution, ...]
    evaluations: int
    seconds: float
    is_complete: bool
    dtype: str = "float64"
    noise: float = 0.0


def contributions(
    mod: StepModule,
    inputs: Sequence[torch.Tensor],
    wanted: Wanted,
    *,
    amp_dtype: str,
    seconds: float,
) -> Contributions:
    """Split the roundings of a step until all are single ops, or time ends.

    The rest of the step is evaluated in float64. Where that takes too long for every op, it is
    evaluated in float32, if the roundings of float32 make less than a hundredth of the error.

    Args:
        mod: a step after autocast, without loops, whose ops the interpreter can evaluate.
        inputs: the arguments of its `main`.
        wanted: its gradients.
        amp_dtype: what is rounded to.
        seconds: when to stop; all roundings together are measured even so.

    Raises:
        OptionError, ArgumentError: as `check_reference`.
    """
    started = time.perf_counter()
    everything = list(roundings(mod))
    if not everything:
        return Contributions(0.0, (), 0, 0.0, is_complete=True)
    low = getattr(torch, amp_dtype)
    exact = RoundedStep(mod, inputs, wanted, torch.float64, low, kept_nbytes=0).exact
    check_reference(exact, "error_report")
    took = time.perf_counter() - started
    evaluations = 1
    if _leaves(everything) * took > seconds - took:
        step = RoundedStep(mod, inputs, wanted, torch.float32, low)
        search = _Search(step, exact, evaluations=2)
        whole = search.measured(everything)
        noise = _relative(squared_errors(step.exact, exact), search.sizes)
        if noise <= _NOISE_SHARE * whole.contribution.error:
            found = search.run(whole, started + seconds)
            return attrs.evolve(
                found, dtype="float32", noise=noise, seconds=time.perf_counter() - started
            )
        evaluations = search.evaluations
        del step, search
    step = RoundedStep(mod, inputs, wanted, torch.float64, low)
    search = _Search(step, exact, evaluations=evaluations + 1)
    whole = search.measured(everything)
    return attrs.evolve(search.run(whole, started + seconds), seconds=time.perf_counter() - started)


@attrs.frozen(eq=False)
class _Rounding:
    """One value that is rounded, with the op it is counted for: the first that reads a cast."""

    variable: relax.Var
    op: str
    module: str
    phase: str
    is_cast: bool
    line: str
    overrides: tuple[Override, ...]

    @property
    def path(self) -> tuple[str, ...]:
        """The groups that it belongs to, from the outermost to its op."""
        leaf = f"{self.op} {self.is_cast}"
        return (self.phase, *self.module.split("."), leaf)


class _Search:
    """Measures groups of roundings, and splits them."""

    def __init__(self, step: RoundedStep, exact: Tensors, *, evaluations: int) -> None:
        self.step = step
        self.sizes = {name: squared_norm(one) for name, one in exact.items()}
        self.evaluations = evaluations

    def run(self, whole: _Measured, until: float) -> Contributions:
        """Split the largest group until there are none, or the next would not end by `until`."""
        waiting: list[tuple[float, int, int, _Measured]] = []
        done: list[Contribution] = []
        numbers = itertools.count()

        def put(depth: int, found: _Measured) -> None:
            if found.contribution.op:
                done.append(found.contribution)
            else:
                entry = (-found.contribution.error, next(numbers), depth, found)
                heapq.heappush(waiting, entry)

        put(0, whole)
        left: list[Contribution] = []
        while waiting:
            # Nobody needs the groups between where there is time for every op.
            ops = sum(_leaves(one.group) * one.seconds for *_, one in waiting)
            to_ops = time.perf_counter() + ops < until
            _, _, depth, found = heapq.heappop(waiting)
            depth, parts = _split(found.group, None if to_ops else depth)
            if time.perf_counter() + len(parts) * found.seconds > until:
                left.append(found.contribution)
                continue
            for part in parts:
                put(depth, self.measured(part))
        return Contributions(
            whole.contribution.error,
            tuple(sorted([*done, *left], key=lambda one: -one.error)),
            self.evaluations,
            seconds=0.0,
            is_complete=not left,
        )

    def measured(self, group: Sequence[_Rounding]) -> _Measured:
        """Evaluate the step with the roundings of a group alone."""
        started = time.perf_counter()
        got = self.step.rounded({one.variable for one in group})
        errors = squared_errors(got, self.step.exact)
        self.evaluations += 1
        first = group[0]
        is_op = _leaves(group) == 1
        contribution = Contribution(
            op=first.op if is_op else "",
            module=_shared([one.module for one in group]),
            phase=first.phase if len({one.phase for one in group}) == 1 else "",
            is_cast=first.is_cast and is_op,
            roundings=len(group),
            error=_relative(errors, self.sizes),
            worst_parameter=self._worst(errors),
            line=first.line,
            elements=sum(math.prod(shape_of(one.variable)) for one in group),
            overrides=tuple(dict.fromkeys(o for one in group for o in one.overrides)),
        )
        return _Measured(group, contribution, time.perf_counter() - started)

    def _worst(self, errors: Mapping[str, float]) -> str:
        """Return whose gradient changed most; those that are rounding alone do not count."""
        least = 2.0**-48 * sum(self.sizes.values())
        shares = {name: errors[name] / size for name, size in self.sizes.items() if size > least}
        worst = max(shares, key=lambda name: shares[name], default="")
        return worst if worst and shares[worst] > 0 else ""


@attrs.frozen(eq=False)
class _Measured:
    """A group of roundings with its contribution, and the seconds of the evaluation.

    Those of its parts take no longer: they reach no more of the step.
    """

    group: Sequence[_Rounding]
    contribution: Contribution
    seconds: float


def _relative(errors: Mapping[str, float], sizes: Mapping[str, float]) -> float:
    """Return the relative error of all tensors together, 0 where there is none."""
    error, size = sum(errors.values()), sum(sizes.values())
    if error == 0.0:
        return 0.0
    return math.sqrt(error / size) if size > 0.0 else math.inf


def roundings(mod: StepModule) -> Iterator[_Rounding]:
    """Yield every value of a step that the plan rounds, in order."""
    flow = Dataflow(mod.ir)
    for variable in flow.values:
        call = call_of(flow, variable)
        ty = variable.ty
        if call is None or not isinstance(ty, relax.TensorType) or op_name(call) in _MOVES:
            continue
        if str(ty.dtype) not in LOW_DTYPES:
            continue
        is_cast = op_name(call) == _CAST
        readers = list(_readers(flow, variable)) if is_cast else []
        op, module, phase = readers[0] if readers else _place(call)
        place = from_span(call.span)
        line = f"{place.file}:{place.line}" if place.file else ""
        overrides = tuple(_overrides(flow, variable, call, readers))
        yield _Rounding(variable, op, module, phase, is_cast, line, overrides)


def _overrides(
    flow: Dataflow, variable: relax.Var, call: relax.Call, readers: Sequence[_Place]
) -> Iterator[Override]:
    """Yield what keeps a value from being rounded: its maker's result, and what reads a cast."""
    maker = _maker(flow, variable) if readers else call
    if maker is not None:
        op, module, phase = _place(maker)
        yield Override(op=op, module=module, phase=phase, to="float32_result")
    for op, module, phase in readers:
        yield Override(op=op, module=module, phase=phase, to="float32")


def _maker(flow: Dataflow, variable: relax.Var) -> relax.Call | None:
    """Return the op that makes what a cast reads, through views and casts; None for inputs."""
    call = call_of(flow, variable)
    while call is not None and op_name(call) in (*_MOVES, _CAST):
        read = variables_of(call)
        call = call_of(flow, read[0]) if read else None
    return call


def _readers(flow: Dataflow, variable: relax.Var) -> Iterator[_Place]:
    """Yield the ops that read a cast, through views and other casts."""
    for one in flow.readers.get(variable, ()):
        call = call_of(flow, one)
        if call is not None and op_name(call) not in (*_MOVES, _CAST):
            yield _place(call)
        else:
            yield from _readers(flow, one)


def _place(call: relax.Call) -> _Place:
    place = from_span(call.span)
    return _label(call), place.module, place.phase


def _label(call: relax.Call) -> str:
    name = op_name(call)
    return external_op(call) if name == EXTERNAL else name


def _leaves(group: Sequence[_Rounding]) -> int:
    """Return how many ops a group is of."""
    return len({one.path for one in group})


def _split(group: Sequence[_Rounding], depth: int | None) -> tuple[int, list[list[_Rounding]]]:
    """Split a group where the paths of its members part, at `depth` or below; with None, into ops.

    Return the depth below the split, and the parts.
    """
    found: dict[Any, list[_Rounding]] = {}
    if depth is None:
        for one in group:
            found.setdefault(one.path, []).append(one)
        return 0, list(found.values())
    while len(found) < 2:
        found = {}
        for one in group:
            # All that end there are one more part.
            key = one.path[depth] if depth < len(one.path) else ""
            found.setdefault(key, []).append(one)
        depth += 1
    return depth, list(found.values())


def _shared(modules: Sequence[str]) -> str:
    """Return the path that all modules begin with."""
    parts = [one.split(".") for one in modules]
    shared = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)
