# SPDX-License-Identifier: Apache-2.0
"""Capture: convert a training step as users write it to one functional graph (design D2).

The step runs once on fake tensors under `make_fx` (`tracing.py`), with its state replaced by
fakes (`state.py`) and its hyper-parameters by symbolic floats (`hyper_parameters.py`). A second
pass makes the graph functional (`functional.py`). This module joins the two, and gives each input
and output its name and role.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from amp_ir.capture.arguments import (
    Checked,
    check_arguments,
    check_training,
    refuse_bare_tensors,
)
from amp_ir.capture.batch import Arguments
from amp_ir.capture.call_arguments import bound
from amp_ir.capture.cell_loops.find_cell_loops import find_cell_loops
from amp_ir.capture.functional import make_functional
from amp_ir.capture.guards.ambient import Ambient
from amp_ir.capture.guards.call_hooks import CaptureGuards
from amp_ir.capture.guards.read_places import places_named, readable
from amp_ir.capture.hyper_parameters import find_hyper_parameters
from amp_ir.capture.interface import finish
from amp_ir.capture.model_inputs import bound_inputs, forward_like, mapping_by_position
from amp_ir.capture.notes import NOT_TRAINED, capture_notes, number_notes, shown_notes
from amp_ir.capture.outside_tensors import lift_outside_tensors
from amp_ir.capture.packed_weights import unpack_weights
from amp_ir.capture.parts_of_tensors import read_parts
from amp_ir.capture.patches.restores import alone, restoring
from amp_ir.capture.patches.trace_leftovers import clear_leftovers
from amp_ir.capture.rolled_loops.find_loops import find_loops
from amp_ir.capture.scaler_state import find_scaler_state
from amp_ir.capture.shared_memory import refuse_shared_memory
from amp_ir.capture.split_state import split_state
from amp_ir.capture.state import (
    LookedEarlyError,
    State,
    WritesOutsideError,
    find_state,
    move_counters,
)
from amp_ir.capture.traced import Traced
from amp_ir.capture.traces import Traces
from amp_ir.capture.transformers_hooks import install_output_hooks
from amp_ir.distributed.replicas import Ranks
from amp_ir.errors import ArgumentError, CaptureError
from amp_ir.ir.captured_step import CapturedStep
from amp_ir.ir.random_draws import number_draws
from amp_ir.ir.short_list import short_names
from amp_ir.ir.step_module import StepHooks

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
    numbers_as_inputs: frozenset[str] = frozenset(),
    unfollowed: frozenset[str] = frozenset(),
    tensors_as_inputs: frozenset[str] = frozenset(),
    rolls_loops: bool = True,
    ranks: Ranks | None = None,
) -> CapturedStep:
    """Capture a training step; the values of the model and the optimizer do not change.

    Args:
        step: called as `step(*example_batch)`; may call backward(), optimizer.step(), ...
        example_batch: the step's arguments; shapes, dtypes and plain values are fixed by them.
        model: every module that the step trains or writes buffers of.
        optimizer: every optimizer whose step() it calls.
        scaler: every enabled GradScaler that it uses (amp_ir's or torch.amp's), or None.
        numbers_as_inputs: names, as `changed_numbers` gives them, of Python numbers outside of the
            step, or paths ("argument 2") of those among its arguments, that are to be read at every
            call instead of guarded; those that decide a branch or a size stay guards, and a note
            says so.
        unfollowed: names of those that are known to be no inputs.
        tensors_as_inputs: names, as `changed_tensors` gives them, of places outside of the step
            whose tensors are to be read at every call, whichever they are then; those that are of
            the state, or whose values Python code reads, stay guards.
        rolls_loops: make loops of ops that repeat; not for a proof of what padding does.
        ranks: the replicas among the models, whose gradients are reduced over ranks.

    Raises:
        ArgumentError: an argument is invalid; the message lists every error.
        CaptureError: the step does what a compiled step cannot do; the message lists every place.
    """
    checked = check_arguments(step, example_batch, model, optimizer, scaler)
    if ranks is not None:
        refuse_bare_tensors(checked.models)
    unmade: list[torch.optim.Optimizer] = []
    written: list[tuple[torch.Tensor, str]] = []
    while True:
        try:
            return _captured(
                step,
                example_batch,
                checked,
                unmade,
                written,
                numbers_as_inputs,
                unfollowed,
                tensors_as_inputs,
                rolls_loops=rolls_loops,
                ranks=ranks,
            )
        except LookedEarlyError as error:  # at most once of each: then none is made ahead
            unmade.append(error.optimizer)
        except WritesOutsideError as error:  # of each tensor once: then it is state
            written += error.tensors


def _captured(
    step: Callable[..., Any],
    example_batch: tuple[Any, ...],
    checked: Checked,
    unmade: Sequence[torch.optim.Optimizer],
    written: Sequence[tuple[torch.Tensor, str]],
    numbers_as_inputs: frozenset[str],
    unfollowed: frozenset[str],
    tensors_as_inputs: frozenset[str],
    *,
    rolls_loops: bool,
    ranks: Ranks | None,
) -> CapturedStep:
    """Capture a step whose arguments are right; the state of `unmade` optimizers is its own.

    `written` are tensors outside of the models that it is known to write to.
    """
    install_output_hooks(checked.models)
    arguments = Arguments.of(example_batch, step)
    unpacked = unpack_weights(checked.models)
    moved = move_counters(checked.optimizers)
    state = find_state(checked.models, checked.optimizers, unmade, written)
    refuse_shared_memory(state)
    state.scalers = find_scaler_state(checked.scalers, _device_of(state))
    split_state(state, ranks)
    hypers = find_hyper_parameters(checked.optimizers)
    ambient = Ambient()
    with _garbage_kept():
        traces = Traces(step, arguments, state, hypers, ranks)
        numbers = traces.followable(numbers_as_inputs)
        tracer, traced = traces.run(numbers)
        check_hypers = traces.check_hypers(tracer, traced, numbers)
        equal_flags = traces.equal_flags(tracer, traced)
        mode, observer, tape = tracer.mode, tracer.observer, tracer.tape
        if tensors_as_inputs:
            places = readable(places_named(tensors_as_inputs, observer), state, observer)
            traced = traced.with_inputs(places)
        traced = lift_outside_tensors(traced, state, observer.objects.tensors, mode)
        graph = make_functional(traced.graph, traced.inputs, tape, mode)
        if traced.assigns_parts:
            read_parts(graph.graph)
        check_hypers(graph)
        graph = find_cell_loops(graph, tape, mode)
        number_draws(graph.graph)
        why_not = "" if rolls_loops else "what padding does is proven op by op"
        if state.shards is not None:
            why_not = "ranks split what an optimizer does op by op"
        unrolled = find_loops(graph, mode, why_not=why_not)
        found = tracer.numbers.found
        interface = finish(graph, traced, state, [*hypers, *found], arguments.tensors, tape, mode)
    followed = frozenset(number.name for number in found)
    unfollowed |= numbers_as_inputs - followed
    positions = (i for i, path in enumerate(arguments.plain_paths) if path in followed)
    arguments = attrs.evolve(arguments, followed=frozenset(positions))
    with traced.initial_values.held():
        capture_guards = CaptureGuards(
            state, hypers, found, unfollowed, traced, interface, tape.all_guards(), observer,
            ambient, ranks, equal_flags,
        )  # fmt: skip
    return CapturedStep(
        graph=graph,
        inputs=interface.inputs,
        outputs=interface.outputs,
        flatten_batch=arguments.flatten,
        unflatten_results=traced.results.build,
        notes=(
            *capture_notes(graph, state, interface, followed),
            *number_notes(followed, unfollowed),
            *unrolled,
            *_notes_on(moved, unpacked, written),
            *((NOT_TRAINED,) if _trains_nothing(checked.optimizers, traced) else ()),
            *shown_notes(traced.shown_at),
        ),
        hooks=StepHooks(
            install_state=capture_guards.install_state,
            after_step=capture_guards.after_step,
            recompile_reason=capture_guards.recompile_reason,
            is_over=capture_guards.is_over,
            changed_numbers=capture_guards.changed_numbers,
            changed_tensors=capture_guards.changed_tensors,
            take_numbers=arguments.take,
            followed=arguments.followed,
            follow_changes=lambda args, named: traced.changes.follow(
                bound(arguments.names, args, named)
            ),
            left=traced.left_by_name(),
            as_left=traced.initial_values.held,
            keep_results=capture_guards.keep_results,
            kept=tuple(one.place.name() for one in traced.kept),
            ranks=ranks,
        ),
    )


def _trains_nothing(optimizers: Sequence[torch.optim.Optimizer], traced: Traced) -> bool:
    """Return whether a step leaves its backward pass to the caller, which a compiled one cannot."""
    return bool(optimizers) and traced.gives_gradients and not traced.has_differentiated


def _notes_on(
    moved: int, unpacked: list[str], written: Sequence[tuple[torch.Tensor, str]]
) -> Iterator[str]:
    if written:
        names = short_names([name for _, name in written])
        yield f"{len(written)} tensors outside of the model are updated at every call: {names}."
    if moved:
        yield (
            f"{moved} step counters of the optimizer were moved from the host to their parameters' "
            "device, where fused and capturable optimizers keep them too."
        )
    if unpacked:
        yield (
            f"The weights of {', '.join(unpacked)} lay packed for cuDNN at addresses where no "
            "vector may begin, and were given memory of their own. Eager calls pack them again at "
            "each call; after training, flatten_parameters() packs them for good."
        )


def _device_of(state: State) -> torch.device:
    """Return the device of the step's state."""
    return next((entry.tensor.device for entry in state.parameters), torch.device("cpu"))


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Pause garbage collection: a trace's objects live to its end, and no collection frees any.

    Other threads' garbage stays as long; nothing else of them changes.
    """
    with restoring() as restores:
        if gc.isenabled():
            restores.add(gc.enable)
        gc.disable()
        yield


def capture_model(model: torch.nn.Module, example_inputs: tuple[Any, ...]) -> CapturedStep:
    """Capture the forward pass of a model, in its current mode (train or eval).

    `example_inputs` is what `model_inputs` returns.

    Raises:
        ArgumentError, CaptureError: as for `capture_step`.
    """
    inputs = bound_inputs(model, example_inputs)
    try:
        return capture_step(forward_like(model, example_inputs), inputs, model=model)
    except CaptureError as error:
        if given_by_position := mapping_by_position(model, example_inputs):
            raise ArgumentError(f"{given_by_position}. What it raised: {error}") from error
        raise
