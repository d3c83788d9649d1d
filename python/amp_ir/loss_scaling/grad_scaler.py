# SPDX-License-Identifier: Apache-2.0
"""GradScaler: dynamic loss scaling, the same object in plain PyTorch and in a compiled step."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from typing import Any

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from amp_ir.dialect.loss_scale import next_scale, options_of
from amp_ir.errors import OptionError, SkippedTooOftenError
from amp_ir.ir.step_log import StepLog


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, with limits, that a captured step contains as ops.

    Every method, default and error is PyTorch's, and so is the sequence of scales while no limit
    is reached. In a compiled step the host reads nothing back, and a skipped step leaves all state
    unchanged: parameters, optimizer state, BatchNorm's statistics, averaged copies, random state.

    Args:
        device: "cpu" or "cuda"; by default a GPU where PyTorch sees one.
        init_scale: the first scale; a power of two, so that scaling is exact.
        growth_factor: what the scale grows by; a power of two.
        backoff_factor: what the scale backs off by; a power of two.
        growth_interval: steps without overflow after which the scale grows.
        enabled: if False, every method does nothing and a captured step contains no op of it.
        dynamic: if False, the scale stays `init_scale`; overflows still skip steps.
        min_scale: the scale does not back off below it; a RuntimeWarning says when it is reached.
            A scale this low means that gradients overflow for another reason than the scale.
        max_scale: the scale does not grow above it.
        hysteresis: overflows in a row before the scale backs off.
        max_consecutive_skips: raise SkippedTooOftenError when more steps in a row are skipped.
            None switches this limit, or that of `min_scale` and `max_scale`, off.

    Raises:
        OptionError: a number is invalid; the message lists every invalid one.
        AssertionError: growth_factor <= 1 or backoff_factor >= 1, as PyTorch does.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,  # noqa: FBT001, FBT002 - torch's own signature
        *,
        dynamic: bool = True,
        min_scale: float | None = 1.0,
        max_scale: float | None = 2.0**24,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.dynamic = dynamic
        self.min_scale, self.max_scale = min_scale, max_scale
        self.hysteresis = hysteresis
        self.max_consecutive_skips = max_consecutive_skips
        self._hysteresis_tracker: torch.Tensor | None = None
        self._init_hysteresis_tracker = hysteresis
        self._amp_ir_log: StepLog | None = None
        self._init_consecutive_skips = 0
        self._is_at_minimum = False
        if self._enabled:
            _check_numbers(self)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.full(
            (), self._init_hysteresis_tracker, dtype=torch.int32, device=dev
        )
        if self._amp_ir_log is None:
            self._amp_ir_log = StepLog.empty(torch.device(dev))
        self._amp_ir_log.set_consecutive_skips(self._init_consecutive_skips)

    @property
    def log(self) -> StepLog | None:
        """The outcome of the last 1024 steps; None before the first."""
        return self._amp_ir_log

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End the iteration and update the scale, as `torch.amp.GradScaler.update` does.

        Raises:
            SkippedTooOftenError: more than `max_consecutive_skips` steps in a row were skipped.
        """
        if not self._enabled:
            return
        if isinstance(new_scale, float):
            self.check_new_scale(new_scale)
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        found_inf = self._any_found(scale, list(self._per_optimizer_states.values()))
        assert self._hysteresis_tracker is not None and self._amp_ir_log is not None
        if found_inf is not None:
            stepped = [
                state
                for state in self._per_optimizer_states.values()
                if state["stage"] is OptState.STEPPED
            ]
            # An optimizer that the user stepped directly was not skipped, whatever was found.
            skipped = self._any_found(scale, stepped)
            skipped = torch.zeros_like(found_inf) if skipped is None else skipped
            self._amp_ir_log.write(skipped, scale, torch.full_like(scale, math.nan))
        if new_scale is not None:
            super().update(new_scale)
            return
        assert found_inf is not None, "No inf checks were recorded prior to update."
        if self.dynamic:
            values = next_scale(
                scale, growth_tracker, self._hysteresis_tracker, found_inf, **options_of(self)
            )
            scale.copy_(values[0])
            growth_tracker.copy_(values[1])
            self._hysteresis_tracker.copy_(values[2])
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self.check_limits()

    @staticmethod
    def check_new_scale(new_scale: float) -> None:
        """Raise OptionError where `new_scale` is not a power of two."""
        _raise_all([*_not_a_power("new_scale", new_scale)])

    @staticmethod
    def _any_found(scale: torch.Tensor, states: list[dict[str, Any]]) -> torch.Tensor | None:
        """Return as bool[] whether any of these optimizers has a gradient that is not finite."""
        found = [
            found.to(scale.device, non_blocking=True).reshape(())
            for state in states
            for found in state["found_inf_per_device"].values()
        ]
        return torch.stack(found).sum() > 0 if found else None

    def check_limits(self) -> None:
        """Warn when the scale has come down to `min_scale`; raise after too many skips.

        Reads the scale, so on a GPU it waits for the step. `update` calls it, and a compiled step
        on a CPU.
        """
        log = self._amp_ir_log
        if log is None or self._scale is None:
            return
        skips = log.consecutive_skips
        most = self.max_consecutive_skips
        if most is not None and skips > most:
            raise SkippedTooOftenError(
                f"{skips} steps in a row were skipped, since a gradient was not finite in each, "
                f"and max_consecutive_skips={most}; the loss scale is {self.get_scale():g}. "
                "Parameters and optimizer state are as before these steps. Look for an infinity "
                "or a NaN in the batch and the loss, or lower the learning rate"
            )
        if self.min_scale is None or not self.dynamic:
            return
        is_at_minimum = skips > 0 and self.get_scale() <= self.min_scale
        if is_at_minimum and not self._is_at_minimum:
            warnings.warn(
                f"the loss scale has come down to min_scale={self.min_scale:g} after {skips} "
                "skipped steps in a row: gradients overflow for another reason than the scale. "
                "Look for an infinity or a NaN in the batch and the loss",
                RuntimeWarning,
                stacklevel=3,
            )
        self._is_at_minimum = is_at_minimum

    def set_growth_factor(self, new_factor: float) -> None:
        """Set a new growth factor, a power of two."""
        _raise_all([*_not_a_power("new_factor", new_factor)])
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set a new backoff factor, a power of two."""
        _raise_all([*_not_a_power("new_factor", new_factor)])
        super().set_backoff_factor(new_factor)

    def state_dict(self) -> dict[str, Any]:
        """Return PyTorch's entries, loadable by `torch.amp.GradScaler`, and those of the limits."""
        state = super().state_dict()
        if self._enabled:
            tracker = self._hysteresis_tracker
            state["_hysteresis_tracker"] = (
                self._init_hysteresis_tracker if tracker is None else int(tracker)
            )
            state["_consecutive_skips"] = (
                self._init_consecutive_skips
                if self._amp_ir_log is None
                else self._amp_ir_log.consecutive_skips
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of `torch.amp.GradScaler`.

        Raises:
            OptionError: a scale or factor in it is not a power of two; nothing has changed.
        """
        if self._enabled:
            names = ("scale", "growth_factor", "backoff_factor")
            errors = [_not_a_power(f"state_dict[{n!r}]", state_dict[n]) for n in names
                      if n in state_dict]  # fmt: skip
            _raise_all([error for found in errors for error in found])
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        self._init_hysteresis_tracker = int(state_dict.get("_hysteresis_tracker", self.hysteresis))
        self._init_consecutive_skips = int(state_dict.get("_consecutive_skips", 0))
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)
        if self._amp_ir_log is not None:
            self._amp_ir_log.set_consecutive_skips(self._init_consecutive_skips)

    def __getstate__(self) -> dict[str, Any]:
        """Return PyTorch's state: numbers instead of tensors."""
        state = super().__getstate__()
        if self._enabled:
            entries = self.state_dict()
            state["_init_hysteresis_tracker"] = entries["_hysteresis_tracker"]
            state["_init_consecutive_skips"] = entries["_consecutive_skips"]
            state["_hysteresis_tracker"] = state["_amp_ir_log"] = None
        return state


def _check_numbers(scaler: GradScaler) -> None:
    errors: list[str] = []
    numbers = {
        "init_scale": scaler._init_scale,
        "growth_factor": scaler._growth_factor,
        "backoff_factor": scaler._backoff_factor,
        "min_scale": scaler.min_scale,
        "max_scale": scaler.max_scale,
    }
    for name, value in numbers.items():
        if value is not None:
            errors += _not_a_power(name, value)
    counts = {
        "hysteresis": (scaler.hysteresis, 1),
        "max_consecutive_skips": (scaler.max_consecutive_skips, 0),
    }
    for name, (count, least) in counts.items():
        is_count = isinstance(count, int) and not isinstance(count, bool)
        if count is not None and (not is_count or count < least):
            errors.append(f"{name}={count!r}, expected an integer of at least {least}")
    _raise_all(errors)


def _not_a_power(name: str, value: Any) -> list[str]:
    """Return what is wrong with a number that must be a power of two."""
    is_number = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    if not is_number:
        return [f"{name}={value!r}, expected a power of two"]
    if math.frexp(value)[0] == 0.5:
        return []
    nearest = 2.0 ** round(math.log2(value))
    return [
        f"{name}={value!r} is not a power of two, so scaling by it would round every gradient; "
        f"the nearest is {nearest:g}"
    ]


def _raise_all(errors: list[str]) -> None:
    if errors:
        raise OptionError("; ".join(errors))
