# SPDX-License-Identifier: Apache-2.0
"""The capture of a recorded step: what `verify` and `error_report` begin with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from torch.nn.parallel import DistributedDataParallel

from amp_ir.api import Models, Optimizers, trace_step
from amp_ir.errors import OptionError
from amp_ir.ir.step_module import StepModule
from amp_ir.loss_scaling.scale_loss import scalers_of
from amp_ir.report.step_name import function_name
from amp_ir.verification.recorded_step import Owners, recorded, without_dropout
from amp_ir.verification.variants import Captured


@attrs.frozen(eq=False)
class Recording:
    """A step whose gradients are among its results, as it was captured; dropout is off.

    `scalers` are those that were passed, and those that `scale_loss` made for the optimizers.
    """

    name: str
    step: Callable[..., Any]
    batch: tuple[Any, ...]
    owners: Owners
    scalers: list[Any]
    mod: StepModule
    args: tuple[Any, ...]
    had_dropout: bool

    def captured(self, batch: tuple[Any, ...] | None = None) -> Captured:
        """Return it with a batch, by default the one of the capture."""
        tensors = self.mod.signature.flatten_batch(self.batch if batch is None else batch)
        return Captured(self.mod, tensors, self.owners, self.scalers)


@contextlib.contextmanager
def capture_recorded(
    step: Callable[..., Any],
    batch: tuple[Any, ...],
    model: Models,
    optimizer: Optimizers,
    scaler: Any,
) -> Iterator[Recording]:
    """Capture a step with its gradients among the results; dropout is off inside.

    Raises:
        OptionError: a model exchanges gradients with other ranks.
    """
    owners = Owners.of(model, optimizer)
    if any(isinstance(one, DistributedDataParallel) for one in owners.models):
        raise OptionError(
            "the step is run again here on this rank alone, and a DistributedDataParallel in "
            "model= exchanges gradients with others; pass a step that calls the model inside of "
            "it, model.module, and that module in model="
        )
    with without_dropout(owners.models) as had_dropout:
        with_gradients = recorded(step, owners)
        options: dict[str, Any] = {"optimizer": list(owners.optimizers), "scaler": scaler}
        mod, args = trace_step(with_gradients, batch, model=list(owners.models), **options)
        scalers = list(scaler) if isinstance(scaler, list | tuple) else [scaler]
        scalers += [one for one in scalers_of(owners.optimizers) if one not in scalers]
        scalers = [one for one in scalers if one is not None]
        yield Recording(
            function_name(step),
            with_gradients,
            batch,
            owners,
            scalers,
            mod,
            args,
            had_dropout=had_dropout,
        )
