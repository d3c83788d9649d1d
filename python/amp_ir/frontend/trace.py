# SPDX-License-Identifier: Apache-2.0
"""Capture: a training step as users write it becomes one functional graph (design D2).

The step runs once on fake tensors under `make_fx` (`tracing.py`), with its state replaced by
fakes (`state.py`) and its hyper-parameters by symbolic floats (`hyper_parameters.py`). A second
pass makes the graph functional (`functional.py`). Here the two are joined, and each input and
output gets its name and role.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_ir.frontend.arguments import check_arguments, check_training
from amp_ir.frontend.batch import Arguments
from amp_ir.frontend.captured import CapturedStep
from amp_ir.frontend.currency import Currency
from amp_ir.frontend.functional import make_functional
from amp_ir.frontend.hyper_parameters import find_hyper_parameters
from amp_ir.frontend.interface import finish
from amp_ir.frontend.notes import capture_notes
from amp_ir.frontend.restores import alone, restoring
from amp_ir.frontend.scaler_state import find_scaler_state
from amp_ir.frontend.state import State, find_state, move_counters
from amp_ir.frontend.trace_leftovers import clear_leftovers
from amp_ir.frontend.tracing import StepTracer

__all__ = ["capture_model", "capture_step", "check_training"]

Models = torch.nn.Module | Sequence[torch.nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@alone(clear_leftovers)
def capture_step(
    step: Callable[..., Any],
    example_batch: tuple[Any, ...],
    *,
    model: Models,
    optimizer: Optimizers = None,
    scaler: object = None,
) -> CapturedStep:
    """Capture a training step; the model and the optimizer are left exactly as they were.

    Args:
        step: called as `step(*example_batch)`; may call backward(), optimizer.step(), ...
        example_batch: the step's arguments; shapes, dtypes and plain values are fixed by them.
        model: every module that the step trains or writes buffers of.
        optimizer: every optimizer whose step() it calls.
        scaler: every enabled GradScaler that it uses (amp_ir's or torch.amp's), or None.

    Raises:
        ArgumentError: an argument is not what it must be; all that is wrong is listed.
        CaptureError: the step does what a compiled step cannot do; all places are listed.
    """
    checked = check_arguments(step, example_batch, model, optimizer, scaler)
    arguments = Arguments.of(example_batch)
    moved = move_counters(checked.optimizers)
    state = find_state(checked.models, checked.optimizers)
    state.scalers = find_scaler_state(checked.scalers, _device_of(state))
    hypers = find_hyper_parameters(checked.optimizers)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracer = StepTracer(step, arguments, state, hypers, mode)
    with _garbage_kept():
        traced = tracer.trace()
        graph = make_functional(traced.graph, traced.inputs, tracer.tape, mode)
        interface = finish(graph, traced, state, hypers, arguments.tensors, tracer.tape, mode)
    currency = Currency(state, hypers, traced, interface, tracer.tape.guards)
    return CapturedStep(
        graph=graph,
        inputs=interface.inputs,
        outputs=interface.outputs,
        flatten_batch=arguments.flatten,
        unflatten_results=traced.results.build,
        notes=(*capture_notes(graph, state, interface), *_notes_on(moved)),
        install_state=currency.install_state,
        is_current=currency.holds,
        after_step=currency.after_step,
        what_changed=currency.what_changed,
        is_over=currency.is_over,
    )


def _notes_on(moved: int) -> tuple[str, ...]:
    if not moved:
        return ()
    return (
        f"{moved} step counters of the optimizer were moved from the host to their parameters' "
        "device, where fused and capturable optimizers keep them too.",
    )


def _device_of(state: State) -> torch.device:
    """Where the step's state is."""
    return next((slot.tensor.device for slot in state.parameters), torch.device("cpu"))


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """No garbage collection: a trace's many objects live to its end, and are searched in vain.

    Other threads' garbage stays as long; nothing else of them changes.
    """
    with restoring() as restores:
        if gc.isenabled():
            restores.add(gc.enable)
        gc.disable()
        yield


def capture_model(model: torch.nn.Module, example_inputs: tuple[Any, ...]) -> CapturedStep:
    """Capture the forward pass of a model, in the mode (train or eval) it is in.

    Raises:
        ArgumentError, CaptureError: as for `capture_step`.
    """

    def forward(*args: Any) -> Any:
        with torch.no_grad():
            return model(*args)

    return capture_step(forward, example_inputs, model=model)
