# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.error_report`: how much of the gradients' error each op's rounding makes, alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import attrs
import torch
from tvm import relax

from amp_ir.amp.overrides import Override
from amp_ir.api import Models, Optimizers, autocast
from amp_ir.capture.arguments import check_arguments
from amp_ir.capture.containers import leaves_of
from amp_ir.dialect.define import LOW_DTYPES
from amp_ir.errors import OptionError
from amp_ir.files.strict_json import strict_json
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.options import dtype_name, meant_dtype
from amp_ir.ir.public_function import public_function
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.report.bar_shares import bar_shares
from amp_ir.rewrites.unroll_loops import unroll_loops
from amp_ir.verification.contributions import Contribution, contributions
from amp_ir.verification.recorded_capture import capture_recorded
from amp_ir.verification.rounded_step import Wanted

_BAR = 24


@attrs.frozen(kw_only=True)
class ErrorReport:
    """The contributions of a step's roundings to its gradient error, the largest first.

    `measure` is "gradient", or "result" for a step without gradients, whose results' error it is.
    `error` is that of all of them together; those of single ops add up about as squares do.
    `evaluations` and `seconds` say what it took; `is_complete`, whether every op was measured.
    What is not rounded was evaluated in the dtype `evaluated_in`, whose own roundings make an error
    of `noise` (0 for float64).
    """

    step: str
    amp_dtype: str
    error: float
    contributions: tuple[Contribution, ...]
    evaluations: int
    seconds: float
    is_complete: bool
    evaluated_in: str
    noise: float
    measure: str = "gradient"

    def to_json(self) -> str:
        """Return everything as JSON."""
        return strict_json(attrs.asdict(self)) + "\n"

    def __repr__(self) -> str:
        """Return the first line; `print` shows all of it."""
        return f"ErrorReport({str(self).splitlines()[0]})"

    def __str__(self) -> str:
        """Return a table of the twenty largest contributions, with bars."""
        return self.table(20)

    def table(self, count: int) -> str:
        """Return a table of the `count` largest contributions."""
        shown = self.contributions[:count]
        width = max((len(one.name) for one in shown), default=0)
        lines = [
            f"{self.step} in {self.amp_dtype}: relative {self.measure} error {self.error:.2e} "
            f"by all roundings of the plan; alone, in {self.evaluated_in} otherwise:"
        ]
        for one, share in zip(shown, bar_shares([one.error for one in shown]), strict=True):
            bar = "#" * round(_BAR * share)
            lines.append(f"  {one.error:.2e}  {bar:<{_BAR}}  {one.name:<{width}}".rstrip())
        rest = len(self.contributions) - len(shown)
        lines.append(
            f"{rest} more; {self.evaluations} evaluations in {self.seconds:.0f} s"
            + (f"; float32's own error: {self.noise:.1e}" if self.noise else "")
            + ("" if self.is_complete else "; groups were left whole for lack of time")
        )
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return everything as one page, with a bar chart."""
        shares = bar_shares([one.error for one in self.contributions])
        rows = "".join(
            f"<tr><td>{one.error:.2e}</td><td><i style='width:{100 * share:.1f}%'>"
            f"</i></td><td>{escape(one.name)}</td><td>{escape(one.worst_parameter)}</td>"
            f'<td title="{escape(one.line)}">{escape(os.path.basename(one.line))}</td></tr>'
            for one, share in zip(self.contributions, shares, strict=True)
        )
        measured = f"{self.measure} error {self.error:.2e}"
        title = escape(f"{self.step} in {self.amp_dtype}: {measured}")
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width">'
            f"<style>{_STYLE}</style></head><body><h1>{title}</h1><table><thead><tr>"
            "<th>Error alone</th><th></th><th>Roundings</th><th>Changes most</th><th>Line</th>"
            f"</tr></thead>{rows}</table></body></html>\n"
        )


_STYLE = """
:root { color-scheme: light dark; --line: #8884 }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem }
h1 { font-size: 1.3rem } table { border-collapse: collapse; width: 100% } th { text-align: left }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line) }
td:nth-child(1), td:nth-child(5) { white-space: nowrap }
td:nth-child(2) { width: 20%; min-width: 9rem }
td:nth-child(n + 3) { overflow-wrap: anywhere }
@media (max-width: 44rem) {
  thead { display: none } td { border: 0; padding: .1rem 0 }
  tr { display: grid; grid-template-columns: 5rem 1fr; align-items: center; padding: .4rem 0;
       border-bottom: 1px solid var(--line) }
  td:nth-child(2) { width: auto; min-width: 0 } td:nth-child(n + 3) { grid-column: 1 / -1 }
}
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
        seconds: when to be done, capture included. All roundings together are measured even so,
            which takes three evaluations of the step at most.

    Raises:
        OptionError: `amp_dtype` is not a low dtype, or the step has neither gradients nor
            floating-point results.
        ArgumentError: its exact gradients on this batch are not finite, or all 0.
        What `trace_step` raises.
    """
    started = time.perf_counter()
    amp_dtype = low_dtype_name(amp_dtype)
    check_seconds(seconds)
    check_arguments(step, batch, model, optimizer, scaler)
    with capture_recorded(step, batch, model, optimizer, scaler) as recording:
        low = autocast(
            recording.mod, recording.args, amp_dtype=amp_dtype, overrides=overrides, policy=policy
        )
        low = low.with_ir(unroll_loops(low.ir))
        left = seconds - (time.perf_counter() - started)
        measure, wanted = _measured(low)
        found = contributions(
            low, recording.captured().inputs(), wanted, amp_dtype=amp_dtype, seconds=left
        )
    return ErrorReport(
        step=recording.name,
        amp_dtype=amp_dtype,
        error=found.error,
        contributions=found.parts,
        evaluations=found.evaluations,
        seconds=time.perf_counter() - started,
        is_complete=found.is_complete,
        evaluated_in=found.dtype,
        noise=found.noise,
        measure=measure,
    )


def _measured(mod: StepModule) -> tuple[str, Wanted]:
    """Return the gradients among the results of a recorded step; without any, the results."""
    outputs = zip(mod.signature.outputs, Dataflow(mod.ir).fields, strict=True)
    fields = [value for spec, value in outputs if spec.role is Role.RESULT]
    # Tensors take the fields' places in what the step returns, whatever container that is.
    markers = [torch.tensor(float(number)) for number in range(len(fields))]
    results, gradients = mod.signature.unflatten_results(markers)
    if gradients:
        return "gradient", {name: fields[int(one)] for name, one in gradients.items()}
    leaves = (fields[int(one)] for one in leaves_of(results) if torch.is_tensor(one))
    floats = (one for one in leaves if _is_float(one))
    return "result", {str(number): one for number, one in enumerate(floats)}


def _is_float(value: relax.Expr) -> bool:
    return str(value.ty.dtype).startswith(("float", "bfloat"))


def check_seconds(seconds: Any) -> None:
    """Require a time that a tool may take.

    Raises:
        OptionError: it is no number, or below 0.
    """
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not seconds >= 0:
        raise OptionError(f"seconds={seconds!r}; expected a number of seconds, 0 or more")


def low_dtype_name(dtype: str | torch.dtype) -> str:
    """Return the name of a dtype that something is rounded to.

    Raises:
        OptionError: it is none of the low dtypes.
    """
    amp_dtype: str = dtype_name(dtype)
    if amp_dtype not in LOW_DTYPES:
        accepted = " or ".join(map(repr, LOW_DTYPES))
        meant = meant_dtype(amp_dtype, LOW_DTYPES)
        raise OptionError(f"amp_dtype={amp_dtype!r} rounds nothing; expected {accepted}{meant}")
    return amp_dtype
