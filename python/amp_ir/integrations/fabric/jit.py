# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.jit` for a step with `fabric.backward`, in the precision of the Fabric."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.plugins import MixedPrecision, Precision
from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from amp_ir.integrations.tool_step import ToolStep, listed, refuse

_AMP_DTYPES = {"32-true": None, "bf16-mixed": "bfloat16", "16-mixed": "float16"}


def jit(
    step: Callable[..., Any], *, fabric: Any, model: Any, optimizer: Any, **options: Any
) -> ToolStep:
    """Compile the body of a loop that calls a Fabric; as `amp_ir.jit`.

    The Fabric's precision chooses the dtype that amp_ir's rules work with, instead of autocast in
    the forward pass: "32-true", "bf16-mixed", or "16-mixed" with the Fabric's own loss scale. Other
    calls of the model, such as an evaluation, stay under autocast.

    Args:
        step: what the loop did for a batch: forward, `fabric.backward`, `fabric.clip_gradients`,
            the optimizer's step.
        fabric: a Fabric of one process, on one device.
        model: what `fabric.setup` returned, or a list of these, as is `optimizer`.
        options: further options of `amp_ir.jit`: overrides, policy, memory_budget, ...

    Raises:
        OptionError: the Fabric does what one compiled step cannot do; the message names all of it.
    """
    strategy = fabric.strategy
    precision: Any = strategy.precision
    _check(fabric, precision)
    captured: Precision = precision
    if isinstance(precision, MixedPrecision):
        mode: Any = precision.precision
        captured = _WithoutAutocast(mode, precision.device, precision.scaler)
        options = {"scaler": precision.scaler, **options}

    @contextlib.contextmanager
    def set_aside() -> Iterator[None]:
        strategy.precision = captured
        try:
            yield
        finally:
            strategy.precision = precision

    amp_dtype = _AMP_DTYPES[precision.precision]
    return ToolStep(
        step,
        set_aside,
        model=listed(model),
        # A compiled step's optimizers are torch's, inside of Fabric's wrappers.
        optimizer=[getattr(one, "optimizer", one) for one in listed(optimizer)],
        **{"device": str(fabric.device), "amp_dtype": amp_dtype, **options},
    )


class _WithoutAutocast(MixedPrecision):
    """Fabric's mixed precision with its loss scale, and without its casts: those are amp_ir's."""

    def forward_context(self) -> Any:
        return contextlib.nullcontext()

    def convert_input(self, data: Any) -> Any:
        return data


def _check(fabric: Any, precision: Any) -> None:
    """Reject what one compiled step on one device cannot do.

    Raises:
        OptionError: lists all of it.
    """
    wrong = {
        f"{fabric.world_size} processes": fabric.world_size > 1,
        type(fabric.strategy).__name__: not isinstance(fabric.strategy, SingleDeviceStrategy),
        f"precision={precision.precision!r}": precision.precision not in _AMP_DTYPES
        or type(precision) not in (Precision, MixedPrecision),
    }
    refuse("fabric", _AMP_DTYPES, wrong)
