# SPDX-License-Identifier: Apache-2.0
"""The error that the roundings of each op make alone: groups of ops first, then the guilty ones.

The step is evaluated in float64, and only the low values of some ops are rounded: those of all ops,
of each phase, of the modules of the worst phase, and so on down to single ops, the largest error
first. What time does not reach stays a group.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

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
from amp_ir.verification.outcome import relative_error

# Ops that move elements round nothing.
_MOVES = (*VIEWS, "relax.broadcast_to")
_CAST = "amp_ir.cast"
OnValue = Callable[[relax.Var, torch.Tensor], torch.Tensor]
_Place = tuple[str, str, str]
# Evaluates the step in float64 with another value for some variables; gives its gradients.
Evaluate = Callable[[OnValue], Mapping[str, torch.Tensor]]


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
    """The contributions of a step's roundings, the largest first, and the error of all together."""

    error: float
    parts: tuple[Contribution, ...]
    evaluations: int
    seconds: float
    is_complete: bool


def contributions(
    mod: StepModule,
    exact: Mapping[str, torch.Tensor],
    evaluate: Evaluate,
    *,
    amp_dtype: str,
    seconds: float,
) -> Contributions:
    """Split the roundings of a step until all are single ops, or time ends.

    Args:
        mod: a step after autocast, without loops.
        exact: its gradients in float64.
        evaluate: evaluates `mod`.
        amp_dtype: what is rounded to.
        seconds: when to stop; one evaluation may take it beyond that.
    """
    return _Search(exact, evaluate, getattr(torch, amp_dtype)).run(list(roundings(mod)), seconds)


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


@attrs.define(eq=False)
class _Search:
    exact: Mapping[str, torch.Tensor]
    evaluate: Evaluate
    dtype: torch.dtype
    evaluations: int = 0

    def run(self, everything: list[_Rounding], seconds: float) -> Contributions:
        if not everything:
            return Contributions(0.0, (), 0, 0.0, is_complete=True)
        started = time.perf_counter()
        whole = self.measured(everything)
        waiting: list[tuple[float, int, int, list[_Rounding], Contribution]] = []
        done: list[Contribution] = []
        numbers = itertools.count()

        def put(depth: int, group: list[_Rounding], found: Contribution) -> None:
            if found.op:
                done.append(found)
            else:
                heapq.heappush(waiting, (-found.error, next(numbers), depth, group, found))

        put(0, everything, whole)
        while waiting and time.perf_counter() - started < seconds:
            _, _, depth, group, _ = heapq.heappop(waiting)
            parts = _parts(group, depth)
            while len(parts) == 1:
                depth += 1
                parts = _parts(group, depth)
            for part in parts:
                put(depth + 1, part, self.measured(part))
        found = [*done, *(one for *_, one in waiting)]
        return Contributions(
            whole.error,
            tuple(sorted(found, key=lambda one: -one.error)),
            self.evaluations,
            time.perf_counter() - started,
            is_complete=not waiting,
        )

    def measured(self, group: Sequence[_Rounding]) -> Contribution:
        """Evaluate the step with the roundings of a group alone."""
        rounded = {one.variable for one in group}

        def on_value(variable: relax.Var, value: torch.Tensor) -> torch.Tensor:
            return value.to(self.dtype).to(value.dtype) if variable in rounded else value

        got = self.evaluate(on_value)
        self.evaluations += 1
        first = group[0]
        is_op = len({one.path for one in group}) == 1
        return Contribution(
            op=first.op if is_op else "",
            module=_shared([one.module for one in group]),
            phase=first.phase if len({one.phase for one in group}) == 1 else "",
            is_cast=first.is_cast and is_op,
            roundings=len(group),
            error=relative_error(got, self.exact),
            worst_parameter=self._worst(got),
            line=first.line,
            elements=sum(math.prod(shape_of(one.variable)) for one in group),
            overrides=tuple(dict.fromkeys(o for one in group for o in one.overrides)),
        )

    def _worst(self, got: Mapping[str, torch.Tensor]) -> str:
        least = 2.0**-24 * sum(float((one**2).sum()) for one in self.exact.values()) ** 0.5
        errors = {
            name: relative_error({0: got[name]}, {0: one})
            for name, one in self.exact.items()
            if float(one.norm()) > least
        }
        worst = max(errors, key=lambda name: errors[name], default="")
        return worst if worst and errors[worst] > 0 else ""


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


def _parts(group: Sequence[_Rounding], depth: int) -> list[list[_Rounding]]:
    """Split a group by the next part of the paths; all that end there are one more."""
    found: dict[str, list[_Rounding]] = {}
    for one in group:
        found.setdefault(one.path[depth] if depth < len(one.path) else "", []).append(one)
    return list(found.values())


def _shared(modules: Sequence[str]) -> str:
    """Return the path that all modules begin with."""
    parts = [one.split(".") for one in modules]
    shared = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)
