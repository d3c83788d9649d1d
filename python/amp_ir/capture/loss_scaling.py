# SPDX-License-Identifier: Apache-2.0
"""Loss scaling as ops of a captured graph, and scalers that trace as such.

During a capture the methods of each scaler that was passed are those of `CapturedScaler`;
all checks of wrong uses are those of `torch.amp.GradScaler`. `optimizer.step` then always runs,
and `Transaction` selects the old values for a skipped step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from amp_ir.capture.define_op import define_op
from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.locations import Locator
from amp_ir.capture.state import ScalerState
from amp_ir.capture.symbolic_float import SymbolicFloat
from amp_ir.capture.transaction import Transaction
from amp_ir.dialect import DECLARATIONS
from amp_ir.dialect.loss_scale import options_of
from amp_ir.ir.step_log import StepLog

_UPDATE_SCALE = (
    "update_scale(Tensor scale, Tensor growth_tracker, Tensor hysteresis_tracker, "
    "Tensor found_inf, float growth_factor, float backoff_factor, int growth_interval, "
    "int hysteresis, float min_scale, float max_scale) -> (Tensor, Tensor, Tensor)"
)


def _reference(name: str) -> Callable[..., Any]:
    return DECLARATIONS[f"amp_ir.{name}"].reference


def _all_finite(gradients: list[torch.Tensor], scale: torch.Tensor) -> Any:
    finite, norm = _reference("all_finite")(*gradients, scale)
    return finite, norm.float()  # the reference implementation does not round its float64 values


def _all_finite_types(gradients: list[torch.Tensor], scale: torch.Tensor) -> Any:
    return scale.new_empty((), dtype=torch.bool), scale.new_empty((), dtype=torch.float32)


def _update_scale(*tensors_and_options: Any) -> Any:
    names = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis")
    options = zip((*names, "min_scale", "max_scale"), tensors_and_options[4:], strict=True)
    return _reference("update_scale")(*tensors_and_options[:4], **dict(options))


def _update_types(scale: Any, growth: Any, hysteresis: Any, *_rest: Any) -> Any:
    return scale.new_empty(()), growth.new_empty(()), hysteresis.new_empty(())


define_op(
    "scale_loss(Tensor x, Tensor scale) -> Tensor",
    _reference("scale_loss"),
    lambda x, _scale: x.new_empty(x.shape),
)
define_op(
    "unscale(Tensor grad, Tensor scale) -> Tensor",
    _reference("unscale"),
    lambda grad, _scale: torch.empty_like(grad),
)
define_op(
    "all_finite(Tensor[] gradients, Tensor scale) -> (Tensor, Tensor)",
    _all_finite,
    _all_finite_types,
)
define_op("step_skipped(Tensor flag) -> Tensor", torch.clone, torch.empty_like)
define_op(_UPDATE_SCALE, _update_scale, _update_types)


class _ScaleLoss(torch.autograd.Function):
    """The op of a scaled loss; its gradient is the same op again, and differentiable again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return torch.ops.amp_ir.scale_loss(x, scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _ScaleLoss.apply(grad, ctx.scale), None


@attrs.frozen
class _Checked:
    """The result of the check of one optimizer's gradients: bool[] and f32[]."""

    found_inf: torch.Tensor
    norm: torch.Tensor


class CapturedScaler:
    """The methods that a scaler has while a step is traced.

    `read(tensor)` returns the value of a 0-d tensor as a symbolic float.
    """

    def __init__(
        self,
        scaler_state: ScalerState,
        transaction: Transaction,
        locator: Locator,
        diagnostics: Diagnostics,
        read: Callable[[torch.Tensor], Any],
    ) -> None:
        self._scaler = scaler_state.scaler
        self._scale = scaler_state.scale.fake
        self._growth_tracker = scaler_state.growth_tracker.fake
        self._hysteresis_tracker = scaler_state.hysteresis_tracker.fake
        self._log = StepLog(scaler_state.ring.fake, scaler_state.counts.fake)
        self._transaction = transaction
        self._locator = locator
        self._diagnostics = diagnostics
        self._read = read
        self._checked: dict[int, _Checked] = {}
        self._stepped: set[int] = set()

    def install(self) -> None:
        """Put the methods on the scaler; `state.kept` removes them."""
        vars(self._scaler).update(
            {
                "_scale": self._scale,
                "_growth_tracker": self._growth_tracker,
                "_hysteresis_tracker": self._hysteresis_tracker,
                "scale": self.scale,
                "get_scale": self.get_scale,
                "update": self.update,
                "_unscale_grads_": self.unscale_gradients,
                "_maybe_opt_step": self.step_unless_found,
            }
        )

    def finish(self) -> None:
        """Reject a step that ends in the middle of a scaler's iteration."""
        if self._checked:
            begun = "scaler.step" if self._stepped else "scaler.unscale_"
            missing = "scaler.update()" if self._stepped else "scaler.step and scaler.update()"
            self._diagnostics.add(
                f"the step calls {begun} but ends before {missing}",
                self._locator.here(),
                "A captured step ends with scaler.update() after the scaler.step of every "
                "optimizer; call both inside of it",
            )

    def scale(self, outputs: Any) -> Any:
        """Replace `GradScaler.scale`, for a tensor or an iterable of tensors."""
        if isinstance(outputs, torch.Tensor):
            return _ScaleLoss.apply(outputs, self._scale)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    def get_scale(self) -> Any:
        """Return the scale as a float on which later Python arithmetic is followed."""
        return self._read(self._scale)

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, _inverse: Any, _found: Any, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Check and unscale the gradients of one optimizer, in place."""
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not allow_fp16 and any(one.dtype is torch.float16 for one in gradients):
            raise ValueError("Attempting to unscale FP16 gradients.")
        if not gradients:
            return {}
        with torch.no_grad(), self._locator.optimizing():
            finite, norm = torch.ops.amp_ir.all_finite(gradients, self._scale)
            found = torch.logical_not(finite)
            known = self._checked.get(id(optimizer))
            if known is not None:
                # Another loss of this optimizer; see loss_scaling/scale_loss.py.
                found = torch.logical_or(found, known.found_inf)
                norm = torch.hypot(norm, known.norm)
            for gradient in gradients:
                gradient.copy_(torch.ops.amp_ir.unscale(gradient, self._scale))
        self._checked[id(optimizer)] = _Checked(found, norm)
        return {self._scale.device: found.float()}

    def step_unless_found(
        self, optimizer: torch.optim.Optimizer, _state: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Step, and select the optimizer's old tensors where a gradient is not finite."""
        self._stepped.add(id(optimizer))
        found = self._checked[id(optimizer)].found_inf
        with self._locator.optimizing(), self._transaction.of_optimizer(optimizer, found):
            optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End the iteration: compute the next scale, and select old tensors for a skipped step."""
        checked = list(self._checked.values())
        with torch.no_grad(), self._locator.optimizing():
            if checked:
                skipped = torch.ops.amp_ir.step_skipped(self._skipped())
                self._transaction.end(self, skipped)
                self._log.write(skipped, self._scale, _norm([one.norm for one in checked]))
            if new_scale is not None:
                self._set_scale(new_scale)
            elif checked:
                self._update(_any([one.found_inf for one in checked]))
            else:
                raise AssertionError("No inf checks were recorded prior to update.")
        self._scaler._per_optimizer_states.clear()
        self._checked.clear()
        self._stepped.clear()

    def _set_scale(self, new_scale: float | torch.Tensor) -> None:
        if isinstance(new_scale, float) and not isinstance(new_scale, SymbolicFloat):
            getattr(self._scaler, "check_new_scale", float)(new_scale)
        torch.amp.GradScaler.update(self._scaler, new_scale)

    def _skipped(self) -> torch.Tensor:
        """Return whether an optimizer was skipped; one that the user stepped directly never is."""
        found = [one.found_inf for key, one in self._checked.items() if key in self._stepped]
        none = torch.zeros((), dtype=torch.bool, device=self._scale.device)
        return _any(found) if found else none

    def _update(self, found: torch.Tensor) -> None:
        values = torch.ops.amp_ir.update_scale(
            self._scale,
            self._growth_tracker,
            self._hysteresis_tracker,
            found,
            *options_of(self._scaler).values(),
        )
        self._scale.copy_(values[0])
        self._growth_tracker.copy_(values[1])
        self._hysteresis_tracker.copy_(values[2])


def _any(flags: list[torch.Tensor]) -> torch.Tensor:
    found = flags[0]
    for flag in flags[1:]:
        found = torch.logical_or(found, flag)
    return found


def _norm(norms: list[torch.Tensor]) -> torch.Tensor:
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
