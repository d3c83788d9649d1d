# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.verify`: a step's numbers against float64, beside PyTorch's, and against its plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tvm import relax

from amp_ir.amp.overrides import Override
from amp_ir.api import Models, Optimizers, autocast, compile_step
from amp_ir.capture.arguments import check_arguments
from amp_ir.errors import OptionError
from amp_ir.ir.dataflow import Dataflow, variables_of
from amp_ir.ir.location import from_span
from amp_ir.ir.options import dtype_name, meant_dtype
from amp_ir.ir.public_function import public_function
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.runtime.program import Program
from amp_ir.verification.kept_state import kept_scalers, kept_state
from amp_ir.verification.lowered_scale import dynamic_scales, lower_until
from amp_ir.verification.outcome import Errors, Outcome, errors_of
from amp_ir.verification.plan_check import check_plan
from amp_ir.verification.ranges import ranges_of
from amp_ir.verification.recorded_capture import Recording, capture_recorded
from amp_ir.verification.recorded_step import Owners
from amp_ir.verification.variants import Captured
from amp_ir.verification.verification import (
    AUTOCAST,
    EAGER,
    FULL,
    LOW,
    STRICT,
    Parameter,
    Verification,
)

DTYPES = ("bfloat16", "float16", "float32")
_WORST = 5
_NOTHING = (
    "in float64 the step has no floating-point result, gradient or update but zeros on a batch: no "
    "error could be measured there, and the plan check is all that was compared"
)
_NO_UPDATE = (
    "in float64 the optimizer changes no parameter on a batch, as at a learning rate of 0 in a "
    "warm-up: an update error of 0 says nothing about it"
)


@public_function("amp_ir.verify")
def verify(
    step: Callable[..., Any],
    batch: tuple[Any, ...],
    *,
    model: Models,
    optimizer: Optimizers = None,
    scaler: Any = None,
    amp_dtype: str | torch.dtype = "bfloat16",
    overrides: Sequence[Override] = (),
    policy: str = "default",
    batches: Sequence[tuple[Any, ...]] = (),
    max_ratio: float = 1.5,
    check: bool = True,
) -> Verification:
    """Compare what a step computes with float64, with PyTorch, and with its own plan.

    The step is captured once. Its float64 evaluation is the reference for PyTorch's eager float32
    and torch.autocast, and for what amp_ir compiles in float32 and in `amp_dtype`. amp_ir works on
    copies; PyTorch runs your step, and parameters, buffers, gradients, optimizers, scaler and
    random generators are put back. Dropout is off meanwhile, since PyTorch draws other numbers.

    Args:
        step: as for `trace_step`, as are `model`, `optimizer` and `scaler`.
        batch: the step's positional arguments.
        amp_dtype: "bfloat16", "float16", or "float32" for the step without casts.
        overrides: as for `autocast`, as is `policy`.
        batches: more batches of the same shapes, each a draw more.
        max_ratio: how many times torch.autocast's gradient error (in float32: eager's) amp_ir's may
            have, in the geometric mean over draws.
        check: whether to compare kernels with the plan, op by op; takes the memory of all values of
            a step at once.

    Returns:
        A `Verification`: print it; `is_good` and `failures` say whether the numbers are right.

    Raises:
        OptionError: `amp_dtype` is unknown.
        What `trace_step` raises.
    """
    amp_dtype = dtype_name(amp_dtype)
    if amp_dtype not in DTYPES:
        accepted, meant = ", ".join(map(repr, DTYPES)), meant_dtype(amp_dtype, DTYPES)
        raise OptionError(
            f"amp_dtype={amp_dtype!r} is not known; expected one of {accepted}{meant}"
        )
    check_arguments(step, batch, model, optimizer, scaler)
    with (
        kept_state(Owners.of(model, optimizer), scaler),
        capture_recorded(step, batch, model, optimizer, scaler) as recording,
        # Those of `scale_loss` may be new.
        kept_scalers(recording.scalers),
    ):
        casts = {"amp_dtype": amp_dtype, "overrides": overrides, "policy": policy}
        verifier = _Verifier(recording, casts)
        draws = tuple(verifier.errors(one) for one in (batch, *batches))
        return verifier.verification(draws, max_ratio=max_ratio, check=check)


class _Verifier:
    """One captured step and its variants."""

    def __init__(self, recording: Recording, casts: dict[str, Any]) -> None:
        self.recording, self.amp_dtype = recording, casts["amp_dtype"]
        self.full = recording.mod
        self.low: StepModule | None = None
        if self.amp_dtype != "float32":
            self.low = autocast(self.full, recording.args, **casts)
        self.is_finite, self.has_numbers = True, False
        self.notes = list(self._notes(had_dropout=recording.had_dropout))

    @property
    def is_random(self) -> bool:
        """Whether the step draws numbers although dropout modules are off."""
        return self.full.random_state is not None

    def _notes(self, *, had_dropout: bool) -> Iterator[str]:
        if had_dropout:
            yield "dropout was off (p=0) in every variant"
        if self.is_random:
            yield (
                "the step draws random numbers of its own, and PyTorch draws others: it is not "
                "compared with PyTorch; amp_ir's variants and float64 have the same draws"
            )

    def errors(self, batch: tuple[Any, ...]) -> dict[str, Errors]:
        """Return the errors of every variant on one batch."""
        captured = self.recording.captured(batch)
        exact = captured.interpreted(self.full, float_dtype=torch.float64)
        self.is_finite &= exact.is_finite
        self.has_numbers |= exact.has_numbers
        if not exact.has_numbers:
            self._add_note(_NOTHING)
        elif self.recording.owners.optimizers and exact.gradients and not exact.has_updates:
            self._add_note(_NO_UPDATE)
        found = self.outcomes(captured, batch)
        if exact.is_finite and not _all_finite(found, exact):
            found = self.at_lower_scale(captured, batch, exact, found)
        for name in (EAGER, AUTOCAST):
            if exact.is_finite and name in found and not found[name].is_finite_beside(exact):
                self._add_note(f"{name} is not finite on a batch: there is no ratio to it there")
        return {name: errors_of(one, exact) for name, one in found.items()}

    def outcomes(self, captured: Captured, batch: tuple[Any, ...]) -> dict[str, Outcome]:
        """Return what every variant makes of one batch."""
        found = {name: captured.ran(*one) for name, one in self.programs.items()}
        if not self.is_random:
            found[EAGER] = captured.eager(lambda: self.recording.step(*batch), None)
        if not self.is_random and self.low is not None:
            autocasted = self.autocasted(captured, batch)
            if autocasted is not None:
                found[AUTOCAST] = autocasted
        return found

    @functools.cached_property
    def programs(self) -> dict[str, tuple[Program, StepModule]]:
        """The compiled variants, by name, with what each was compiled of."""
        found = {FULL: (compile_step(self.full).program, self.full)}
        if self.low is not None:
            found[LOW] = compile_step(self.low).program, self.low
            found[STRICT] = compile_step(self.low, rounding="strict").program, self.low
        return found

    def at_lower_scale(
        self,
        captured: Captured,
        batch: tuple[Any, ...],
        exact: Outcome,
        found: dict[str, Outcome],
    ) -> dict[str, Outcome]:
        """Return the outcomes at the largest loss scale where all are finite, if there is one.

        The scale stays there, as in a training that skipped the steps before.
        """
        scales = dynamic_scales(self.recording.scalers)
        before = max(map(float, scales), default=1.0)
        wrong = [name for name, one in found.items() if not one.is_finite_beside(exact)]
        lower = lower_until(scales, lambda: _all_finite(self.outcomes(captured, batch), exact))
        if lower is None:
            return found
        self._add_note(
            f"at the loss scale {before:g} gradients overflow ({', '.join(wrong)}) and the step is "
            f"skipped: compared at {lower:g}, the largest power of two where all are finite"
        )
        return self.outcomes(captured, batch)

    def autocasted(self, captured: Captured, batch: tuple[Any, ...]) -> Outcome | None:
        """Return what torch.autocast makes of a batch; None where it cannot run the step."""
        dtype = getattr(torch, self.amp_dtype)
        reason = ""
        # oneDNN has no float16 on most CPUs, where PyTorch's own kernels do.
        for has_onednn in (True, False):
            try:
                with torch.backends.mkldnn.flags(enabled=has_onednn, allow_tf32=None):
                    return captured.eager(lambda: self.recording.step(*batch), dtype)
            except (RuntimeError, NotImplementedError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        self._add_note(f"torch.autocast cannot run the step in {self.amp_dtype} here: {reason}")
        return None

    def _add_note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def verification(
        self, draws: tuple[dict[str, Errors], ...], *, max_ratio: float, check: bool
    ) -> Verification:
        captured = self.recording.captured()
        mod = self.full if self.low is None else self.low
        inputs = captured.inputs()
        return Verification(
            step=self.recording.name,
            amp_dtype=self.amp_dtype,
            max_ratio=max_ratio,
            draws=draws,
            worst=tuple(self._worst(draws[0])),
            plan=check_plan(mod, inputs, captured.batch) if check else None,
            ranges=() if self.low is None else tuple(ranges_of(self.low, inputs)),
            is_finite=self.is_finite,
            notes=tuple(self.notes),
            has_numbers=self.has_numbers,
        )

    def _worst(self, errors: dict[str, Errors]) -> Iterator[Parameter]:
        ours = errors[FULL if self.low is None else LOW]
        theirs = errors.get(EAGER if self.low is None else AUTOCAST)
        lines = gradient_lines(self.full)
        for name in ours.worst(_WORST):
            yield Parameter(
                name=name,
                error=ours.gradients[name],
                update_error=ours.updates.get(name, 0.0),
                pytorch_error=None if theirs is None else theirs.gradients[name],
                line=lines.get(name, ""),
            )


def _all_finite(found: Mapping[str, Outcome], exact: Outcome) -> bool:
    return all(one.is_finite_beside(exact) for one in found.values())


def gradient_lines(mod: StepModule) -> dict[str, str]:
    """Return where each gradient of a recorded step is made, "file:line", by parameter."""
    flow = Dataflow(mod.ir)
    pairs = zip(mod.signature.outputs, flow.fields, strict=True)
    places = [_place(flow, field) for spec, field in pairs if spec.role is Role.RESULT]
    # Places take the tensors' places in what the step returns.
    markers = [torch.tensor(float(number)) for number in range(len(places))]
    _, gradients = mod.signature.unflatten_results(markers)
    return {name: places[int(one)] for name, one in gradients.items()}


def _place(flow: Dataflow, field: Any) -> str:
    """Return the line of the last op of a gradient that is not the optimizer's."""
    while isinstance(field, relax.Var) and field in flow.values:
        value = flow.values[field]
        place = from_span(getattr(value, "span", None))
        if place.file and place.phase == "backward":
            return f"{place.file}:{place.line}"
        read = variables_of(value)
        field = read[0] if read else None
    return ""
