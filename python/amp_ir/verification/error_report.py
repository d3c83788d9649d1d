# SPDX-License-Identifier: Apache-2.0
"""Error report: how much of the gradients' error each op's rounding makes, alone.

The step is evaluated in float64, and only the low values of some ops are rounded: those of all ops,
of each phase, of the modules of the worst phase, and so on down to single ops, the largest error
first. What time does not reach stays a group.
"""

from __future__ import annotations

import heapq
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

import attrs
import torch
from tvm import relax

from amp_ir.amp.overrides import Override
from amp_ir.api import Models, Optimizers, autocast, trace_step
from amp_ir.dialect.define import LOW_DTYPES
from amp_ir.dialect.external_call import NAME as EXTERNAL
from amp_ir.dialect.external_call import external_op
from amp_ir.errors import OptionError
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.location import from_span
from amp_ir.ir.options import dtype_name
from amp_ir.ir.public_function import public_function
from amp_ir.ir.step_graph import VIEWS
from amp_ir.ir.step_module import StepModule
from amp_ir.replay.non_finite_origins import call_of
from amp_ir.rewrites.unroll_loops import unroll_loops
from amp_ir.verification.outcome import Outcome, relative_error
from amp_ir.verification.recorded_step import Owners, recorded, without_dropout
from amp_ir.verification.variants import Captured

# Ops that move elements round nothing.
_MOVES = (*VIEWS, "relax.broadcast_to")
_CAST = "amp_ir.cast"
_BAR = 24


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
    """

    op: str
    module: str
    phase: str
    is_cast: bool
    roundings: int
    error: float
    worst_parameter: str
    line: str

    @property
    def name(self) -> str:
        """Say what it is: `casts for relax.matmul in encoder.0 (backward)`."""
        place = f"in {self.module or 'step'}" + (f" ({self.phase})" if self.phase else "")
        if not self.op:
            return f"{self.roundings} roundings {place}, not split"
        return f"casts for {self.op} {place}" if self.is_cast else f"{self.op} {place}"


@attrs.frozen(kw_only=True)
class ErrorReport:
    """The contributions of a step's roundings to its gradient error, the largest first.

    `error` is that of all of them together; those of single ops add up about as squares do.
    `evaluations` and `seconds` say what it took; `is_complete`, whether every op was measured.
    """

    step: str
    amp_dtype: str
    error: float
    contributions: tuple[Contribution, ...]
    evaluations: int
    seconds: float
    is_complete: bool

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(attrs.asdict(self), indent=1) + "\n"

    def __str__(self) -> str:
        """Return a table of the twenty largest contributions, with bars."""
        return self.table(20)

    def table(self, count: int) -> str:
        """Return a table of the `count` largest contributions."""
        shown = self.contributions[:count]
        width = max((len(one.name) for one in shown), default=0)
        largest = max((one.error for one in shown), default=0.0) or 1.0
        lines = [
            f"{self.step} in {self.amp_dtype}: relative gradient error {self.error:.2e} by all "
            f"roundings of the plan; alone, in float64 otherwise:"
        ]
        for one in shown:
            bar = "#" * round(_BAR * one.error / largest)
            lines.append(f"  {one.error:.2e}  {bar:<{_BAR}}  {one.name:<{width}}".rstrip())
        rest = len(self.contributions) - len(shown)
        lines.append(
            f"{rest} more; {self.evaluations} evaluations in {self.seconds:.0f} s"
            + ("" if self.is_complete else "; groups were left whole for lack of time")
        )
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return everything as one page, with a bar chart."""
        largest = max((one.error for one in self.contributions), default=0.0) or 1.0
        rows = "".join(
            f"<tr><td>{one.error:.2e}</td><td><i style='width:{100 * one.error / largest:.1f}%'>"
            f"</i></td><td>{escape(one.name)}</td><td>{escape(one.worst_parameter)}</td>"
            f"<td>{escape(one.line)}</td></tr>"
            for one in self.contributions
        )
        title = escape(f"{self.step} in {self.amp_dtype}: gradient error {self.error:.2e}")
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{_STYLE}</style></head><body><h1>{title}</h1><table><thead><tr>"
            "<th>Error alone</th><th></th><th>Roundings</th><th>Changes most</th><th>Line</th>"
            f"</tr></thead>{rows}</table></body></html>\n"
        )


_STYLE = """
:root { color-scheme: light dark; --line: #8884 }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem }
h1 { font-size: 1.3rem } table { border-collapse: collapse; width: 100% } th { text-align: left }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line) }
td:nth-child(2) { width: 30% }
i { display: block; height: .7rem; background: #2563eb }
"""


@public_function("amp_ir.error_report")
def error_report(
    step: Callable[..., Any],
    batch: tuple[Any, ...],
    *,
    model: Models,
    optimizer: Optimizers = None,
    scaler: Any = None,
    amp_dtype: str | torch.dtype = "bfloat16",
    overrides: Sequence[Override] = (),
    policy: str = "default",
    seconds: float = 60.0,
) -> ErrorReport:
    """Say how much of the gradients' error in mixed precision each op and each cast makes.

    Nothing of yours changes, and PyTorch runs nothing of it; dropout is off meanwhile.

    Args:
        step: as for `trace_step`, as are `batch`, `model`, `optimizer` and `scaler`.
        amp_dtype: "bfloat16" or "float16".
        overrides: as for `autocast`, as is `policy`.
        seconds: when to stop splitting groups; one evaluation of the step in float64 may take it
            beyond that.

    Raises:
        OptionError: `amp_dtype` is not a low dtype.
        What `trace_step` raises.
    """
    amp_dtype = dtype_name(amp_dtype)
    if amp_dtype not in LOW_DTYPES:
        accepted = " or ".join(map(repr, LOW_DTYPES))
        raise OptionError(f"amp_dtype={amp_dtype!r} rounds nothing; expected {accepted}")
    owners = Owners.of(model, optimizer)
    with without_dropout(owners.models):
        options: dict[str, Any] = {"model": list(owners.models), "scaler": scaler}
        options["optimizer"] = list(owners.optimizers)
        mod, args = trace_step(recorded(step, owners), batch, **options)
        low = autocast(mod, args, amp_dtype=amp_dtype, overrides=overrides, policy=policy)
        name = getattr(step, "__qualname__", type(step).__qualname__)
        captured = Captured(mod, mod.signature.flatten_batch(batch), owners, scaler)
        return _Search(captured, low, name, amp_dtype).run(seconds)


@attrs.frozen(eq=False)
class _Rounding:
    """One value that is rounded, with the place and the op it is counted for."""

    variable: relax.Var
    phase: str
    module: str
    op: str
    is_cast: bool
    line: str

    @property
    def path(self) -> tuple[str, ...]:
        """The groups that it belongs to, from the outermost to its op."""
        leaf = f"{self.op} {self.is_cast}"
        return (self.phase, *self.module.split("."), leaf)


class _Search:
    def __init__(self, captured: Captured, low: StepModule, name: str, amp_dtype: str) -> None:
        self.captured, self.name, self.amp_dtype = captured, name, amp_dtype
        self.mod = low.with_ir(unroll_loops(low.ir))
        self.dtype = getattr(torch, amp_dtype)
        self.exact = captured.interpreted(self.mod, float_dtype=torch.float64)
        self.evaluations = 1

    def run(self, seconds: float) -> ErrorReport:
        """Split the groups with the largest errors until all are single ops, or time ends."""
        started = time.perf_counter()
        everything = list(roundings(self.mod))
        if not everything:
            return ErrorReport(
                step=self.name, amp_dtype=self.amp_dtype, error=0.0, contributions=(),
                evaluations=self.evaluations, seconds=0.0, is_complete=True,
            )  # fmt: skip
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
        return ErrorReport(
            step=self.name,
            amp_dtype=self.amp_dtype,
            error=whole.error,
            contributions=tuple(sorted(found, key=lambda one: -one.error)),
            evaluations=self.evaluations,
            seconds=time.perf_counter() - started,
            is_complete=not waiting,
        )

    def measured(self, group: Sequence[_Rounding]) -> Contribution:
        """Evaluate the step with the roundings of a group alone."""
        rounded = {one.variable for one in group}

        def on_value(variable: relax.Var, value: torch.Tensor) -> torch.Tensor:
            return value.to(self.dtype).to(value.dtype) if variable in rounded else value

        got = self.captured.interpreted(self.mod, float_dtype=torch.float64, on_value=on_value)
        self.evaluations += 1
        first = group[0]
        is_op = len({one.path for one in group}) == 1
        return Contribution(
            op=first.op if is_op else "",
            module=_shared([one.module for one in group]),
            phase=first.phase if len({one.phase for one in group}) == 1 else "",
            is_cast=first.is_cast and is_op,
            roundings=len(group),
            error=relative_error(got.gradients, self.exact.gradients),
            worst_parameter=self._worst(got),
            line=first.line,
        )

    def _worst(self, got: Outcome) -> str:
        exact = self.exact.gradients
        least = 2.0**-24 * sum(float((one**2).sum()) for one in exact.values()) ** 0.5
        errors = {
            name: relative_error({0: got.gradients[name]}, {0: one})
            for name, one in exact.items()
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
        place, is_cast = from_span(call.span), op_name(call) == _CAST
        line = f"{place.file}:{place.line}" if place.file else ""
        op = _reader(flow, variable) if is_cast else _label(call)
        yield _Rounding(variable, place.phase, place.module, op, is_cast, line)


def _reader(flow: Dataflow, variable: relax.Var) -> str:
    """Return the name of the first op that reads a cast, through views and other casts."""
    for one in flow.readers.get(variable, ()):
        call = call_of(flow, one)
        if call is not None and op_name(call) not in (*_MOVES, _CAST):
            return _label(call)
        found = _reader(flow, one)
        if found:
            return found
    return ""


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
