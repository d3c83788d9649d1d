# SPDX-License-Identifier: Apache-2.0
"""Capture: a training step or a model becomes a `StepModule`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from amp_ir import pipeline
from amp_ir.capture import trace
from amp_ir.capture.model_inputs import bound_inputs, model_inputs
from amp_ir.distributed.replicas import Ranks, find_ranks, warn_of_ranks_apart
from amp_ir.errors import UnsupportedOpError
from amp_ir.host.memory_limit import memory_for
from amp_ir.host.paused_garbage_collection import paused_garbage_collection
from amp_ir.ir.public_function import public_function
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.loss_scaling.scale_loss import ScalerNotPassed, scalers_of
from amp_ir.report.stage_files import current_stage_files
from amp_ir.report.step_name import name_between_ranks

Models = torch.nn.Module | Sequence[torch.nn.Module]


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@public_function("amp_ir.trace_step")
def trace_step(
    step: Callable[..., Any],
    example_batch: tuple[Any, ...],
    *,
    model: Models,
    optimizer: Optimizers = None,
    scaler: Any = None,
    numbers_as_inputs: frozenset[str] = frozenset(),
    process_group: Any = None,
    data_parallel: bool = False,
    comm_dtype: str | torch.dtype | None = None,
    bucket_cap_mb: float | None = None,
) -> tuple[StepModule, tuple[Any, ...]]:
    """Capture a training step as you wrote it; nothing is run and nothing changes.

    Args:
        step: called as `step(*example_batch)`; may call `loss.backward()`, `optimizer.step()`,
            `zero_grad()`, clip, accumulate, and return anything made of tensors and constants.
        example_batch: the step's positional arguments; shapes and dtypes count, values do not.
        model: the module or modules that the step uses.
        optimizer: the optimizer or optimizers that the step calls.
        scaler: the `amp_ir.GradScaler` that the step uses, or a list of them; by default those
            of `amp_ir.scale_loss`, which makes one for each loss of an optimizer.
        numbers_as_inputs: names of Python numbers outside of the step, as the `changed_numbers` of
            an earlier capture's hooks gives them, and paths ("argument 2") of those among the
            arguments, that are to be read at every call.
        process_group: the ranks that train together with `data_parallel`; None: all of them.
        data_parallel: every rank has a copy of the model: gradients are averaged over the ranks by
            each backward pass, as `DistributedDataParallel` does. One in `model` is recognised, and
            its options and `no_sync` are honoured.
        comm_dtype: "float16" or "bfloat16": the dtype in which gradients are exchanged, None for
            their own. The cast is one of the step's, decided by `autocast`.
        bucket_cap_mb: the MiB of gradients that are exchanged together, with `data_parallel`. None:
            up to 25, and less the less of the backward pass is left. A wrapper has its own.

    Returns:
        The step as a StepModule, and `example_batch`, ready for `autocast(mod, args)`.

    Raises:
        CaptureError: the step cannot be captured; the message lists every place.
        UnsupportedOpError: ops without a converter, all of them.
        LossScaleError: the loss scale reaches what must not depend on it; lists every place.
    """
    captured, ranks = find_ranks(
        model,
        process_group=process_group,
        data_parallel=data_parallel,
        comm_dtype=comm_dtype,
        bucket_cap_mb=bucket_cap_mb,
        step=name_between_ranks(step),
    )
    mod = trace_unchanged(
        step,
        example_batch,
        ranks=ranks,
        model=captured,
        optimizer=optimizer,
        scaler=scaler,
        numbers_as_inputs=numbers_as_inputs,
    )
    return rewrite(mod), example_batch


def rewrite(mod: StepModule) -> StepModule:
    """Do the rewrites of `trace_step`, which change no value but for the order of sums."""
    with paused_garbage_collection():
        return pipeline.rewrite(mod, on_stage=current_stage_files())


@paused_garbage_collection()
@memory_for("the capture of the step needs")
def trace_unchanged(
    step: Callable[..., Any],
    example_batch: tuple[Any, ...],
    *,
    model: Models,
    optimizer: Optimizers = None,
    scaler: Any = None,
    numbers_as_inputs: frozenset[str] = frozenset(),
    tensors_as_inputs: frozenset[str] = frozenset(),
    rolls_loops: bool = True,
    ranks: Ranks | None = None,
) -> StepModule:
    """Capture a step as `trace_step` does, and leave its ops as they were captured.

    `tensors_as_inputs` are names of places outside of the step, as the `changed_tensors` of its
    hooks gives them, whose tensors are read at every call. Without `rolls_loops` the steps of the
    user's loops stay single ops.
    """
    if ranks is None and optimizer is not None:
        warn_of_ranks_apart()
    owners: dict[str, Any] = {"model": model, "optimizer": optimizer, "ranks": ranks}
    owners |= {"rolls_loops": rolls_loops, "tensors_as_inputs": tensors_as_inputs}
    if scaler is not None:
        mod = _imported(step, example_batch, numbers_as_inputs, {**owners, "scaler": scaler})
    else:
        mod = _with_own_scalers(step, example_batch, numbers_as_inputs, owners)
    if mod.random_state is not None:
        mod = mod.with_random_state(mod.random_state.to(_device_of(mod)))
    return mod


def _with_own_scalers(
    step: Callable[..., Any], batch: Any, numbers: frozenset[str], owners: dict[str, Any]
) -> StepModule:
    """Capture a step with the scalers that its `scale_loss` uses, which are made at its first call.

    A capture that meets a loss without a scaler ends there, and is begun again with one more.
    """
    optimizers = _optimizers(owners["optimizer"])
    while True:
        scalers = scalers_of(optimizers)
        try:
            return _imported(step, batch, numbers, {**owners, "scaler": scalers})
        except ScalerNotPassed as missing:
            if not any(missing.optimizer is one for one in optimizers):
                raise
            missing.make(_device_of_optimizer(missing.optimizer))


def _imported(
    step: Callable[..., Any], batch: Any, numbers: frozenset[str], owners: dict[str, Any]
) -> StepModule:
    """Capture and import a step; `numbers` are inputs where its ops can take them so."""
    import_step = functools.partial(
        pipeline.import_step, step, batch, on_stage=current_stage_files(), **owners
    )
    try:
        return import_step(numbers_as_inputs=numbers)
    except (UnsupportedOpError, TypeError, ValueError, RuntimeError) as error:
        if not numbers or isinstance(error, ScalerNotPassed):
            raise
        # Where an op takes one of the numbers as a constant only, they all stay guards. What has
        # nothing to do with them is raised again.
        return import_step(unfollowed=numbers)


def _device_of_optimizer(optimizer: torch.optim.Optimizer) -> torch.device:
    parameters: list[torch.Tensor] = optimizer.param_groups[0]["params"]
    return parameters[0].device


@public_function("amp_ir.trace_model")
@paused_garbage_collection()
def trace_model(model: torch.nn.Module, example_inputs: Any) -> tuple[StepModule, tuple[Any, ...]]:
    """Capture the forward pass of a model, for inference; see `trace_step`.

    Args:
        model: any module, captured in its current mode.
        example_inputs: one tensor, the tuple of the arguments by position, what `call_arguments`
            returns, or a dict or BatchEncoding of the arguments by name.

    Returns:
        The forward pass as a StepModule, and the tuple of its arguments, ready for `autocast`.

    Raises:
        ArgumentError: the model does not take these inputs.
        CaptureError, UnsupportedOpError: as for `trace_step`.
    """
    inputs = model_inputs(model, example_inputs)
    captured = trace.capture_model(model, inputs)
    return pipeline.import_captured(captured), bound_inputs(model, inputs)


def _optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers among what was passed; what is none is refused later."""
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return [one for one in given if isinstance(one, torch.optim.Optimizer)]


def _device_of(mod: StepModule) -> torch.device:
    """Return where the model's tensors are; the CPU for a step without any."""
    owned = (Role.PARAMETER, Role.BUFFER)
    tensors = [mod.state[spec.name] for spec in mod.signature.inputs if spec.role in owned]
    return next((one.device for one in tensors if torch.is_tensor(one)), torch.device("cpu"))
