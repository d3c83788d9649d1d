# SPDX-License-Identifier: Apache-2.0
"""Changes to PyTorch during a capture, undone after it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import batchnorm
from torch.nn.utils import clip_grad
from torch.optim import _adafactor, asgd, radam, swa_utils

from amp_ir.capture.collectives import TracedRanks
from amp_ir.capture.decompositions.attention import scaled_dot_product_attention
from amp_ir.capture.decompositions.averaged_model import update_parameters
from amp_ir.capture.decompositions.batch_statistics import batch_norm, instance_norm
from amp_ir.capture.decompositions.group_norm import group_norm
from amp_ir.capture.decompositions.optimizers import (
    single_tensor_adafactor,
    single_tensor_asgd,
    single_tensor_radam,
)
from amp_ir.capture.decompositions.packed_sequences import (
    Forwarding,
    PackingFunctions,
    invert_permutation,
    pad,
)
from amp_ir.capture.decompositions.sync_batch_norm import synced_forward
from amp_ir.capture.decompositions.truncated_normal import truncated_normal
from amp_ir.capture.diagnostics import Diagnostics, TracingStopped
from amp_ir.capture.distribution import wrapper_error
from amp_ir.capture.gradient_watch import GradientWatch
from amp_ir.capture.guards.outside_calls import address
from amp_ir.capture.later_number import patch_item
from amp_ir.capture.locations import Locator
from amp_ir.capture.patches.autocast_regions import mark_autocast_regions
from amp_ir.capture.patches.registered_functions import patch_annotated
from amp_ir.capture.patches.restores import Restores, restoring
from amp_ir.capture.patches.silent_output import patch_output
from amp_ir.capture.patches.thread_patches import ValueHere, here, patch, patch_function, silence
from amp_ir.capture.state import State
from amp_ir.capture.symbolic_float import SymbolicFloat
from amp_ir.capture.transaction import Transaction
from amp_ir.ir.annotations import registrations


@contextlib.contextmanager
def patched(
    state: State,
    locator: Locator,
    watch: GradientWatch,
    diagnostics: Diagnostics,
    transaction: Transaction,
    ranks: TracedRanks | None = None,
) -> Iterator[list[torch.optim.Optimizer]]:
    """Change PyTorch so that a step can be traced.

    Yields:
        the list that collects the optimizers whose `step` was called. Their `step` attribute is
        restored by `state.kept`, which must be around this.
    """
    stepped: list[torch.optim.Optimizer] = []

    def on_step(optimizer: torch.optim.Optimizer) -> None:
        stepped.append(optimizer)
        transaction.stepped(optimizer)

    for optimizer in state.optimizers:
        vars(optimizer)["step"] = _located_step(optimizer, locator, on_step)
        # Fused kernels would unscale by themselves; the captured step uses the plain loop.
        vars(optimizer)["_step_supports_amp_scaling"] = False
    replacements: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (torch.nn.Module, "zero_grad", _watched_zero_grad(torch.nn.Module.zero_grad, watch)),
        (
            torch.optim.Optimizer,
            "zero_grad",
            _watched_zero_grad(torch.optim.Optimizer.zero_grad, watch),
        ),
        (torch.nn.Module, "_apply", _apply_unless_same(torch.nn.Module._apply)),
        (torch.nn.RNNBase, "flatten_parameters", _leave_unpacked),
        (torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention),
        (torch, "batch_norm", batch_norm),
        (torch, "instance_norm", instance_norm),
        (torch, "group_norm", group_norm),
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _no_checkpoint),
        (torch.optim.lr_scheduler.LRScheduler, "step", _rejected_scheduler(locator, diagnostics)),
        (torch.amp.GradScaler, "scale", _rejected_scaler(locator, diagnostics)),
        (radam, "_single_tensor_radam", single_tensor_radam),
        (asgd, "_single_tensor_asgd", single_tensor_asgd),
        (_adafactor, "_single_tensor_adafactor", single_tensor_adafactor),
        (swa_utils.AveragedModel, "update_parameters", update_parameters),
        (torch.nn.init, "_no_grad_trunc_normal_", truncated_normal),
        # PyTorch's own code, in which the observer does not look, asks the memory below.
        (torch.TypedStorage, "data_ptr", _refused_address(locator, diagnostics)),
        # Marks for a profiler, in Optimizer.step and zero_grad: ops that a trace takes 2 ms for.
        (torch.autograd.profiler.record_function, "__enter__", lambda mark: mark),
        (torch.autograd.profiler.record_function, "__exit__", lambda *_: None),
        # nn.TransformerEncoderLayer has an inference kernel that fuses many ops.
        (torch.backends.mha, "get_fastpath_enabled", _caller_is_attention_in_training),
    )
    # Thread-local, as is everything below.
    with restoring() as restores:
        _use_one_thread_for_autograd(restores)
        for owner, name, replacement in replacements:
            patch_function(restores, owner, name, replacement)
        if ranks is not None:
            norm = torch.nn.SyncBatchNorm
            patch_function(restores, norm, "forward", synced_forward(ranks, norm.forward))
        for owner in _optimizers():
            step = _rejected_step(vars(owner)["step"], state, locator, diagnostics)
            patch_function(restores, owner, "step", step)
        call = locator.wrap_call(torch.nn.Module.__call__)
        call = _checked_call(call, locator, diagnostics, ranks)
        patch_function(restores, torch.nn.Module, "__call__", call)
        devices = frozenset(entry.tensor.device.type for entry in state.tensors)
        mark_autocast_regions(restores, devices or frozenset({"cpu"}))
        for one in registrations():
            patch_annotated(restores, one)
        patch(restores, torch.utils.checkpoint, "CheckpointFunction", _checkpoint_function())
        # Checks of a distribution's arguments look at values, which do not exist yet.
        distribution = torch.distributions.Distribution
        checks = ValueHere(value=False, elsewhere=distribution._validate_args)
        patch(restores, distribution, "_validate_args", checks)
        # The functions of clip_grad convert their threshold, which may depend on the loss scale; a
        # BatchNorm without a momentum converts its count of batches. For a number that is not
        # followed it is Python's own `float`.
        for module in (clip_grad, batchnorm):
            patch(restores, module, "float", _float_of)
        _patch_packing(restores)
        patch_item(restores)
        patch_output(restores, diagnostics)
        # An error of the user's step is raised; the fake tensors would log it as well.
        silence(restores, "torch._subclasses.fake_tensor")
        yield stepped


def _use_one_thread_for_autograd(restores: Restores) -> None:
    # Python 3.10: a generator that is interrupted as it resumes does not leave its `with` blocks.
    threads = torch._C._is_multithreading_enabled()
    restores.add(lambda: torch._C._set_multithreading_enabled(threads))
    torch._C._set_multithreading_enabled(False)


def _patch_packing(restores: Restores) -> None:
    """Let torch.nn.utils.rnn pack by other functions, wherever the user imported its own from."""
    functions, ours = torch.nn.utils.rnn, PackingFunctions()
    native: Any = torch._VF
    packing: dict[str, Callable[..., Any]] = {
        "_pack_padded_sequence": ours.pack,
        "_pad_packed_sequence": pad,
    }
    replaced = {name: here(one, getattr(native, name)) for name, one in packing.items()}
    patch(restores, functions, "_VF", Forwarding(native, replaced))
    sort: Any = torch.sort
    patch(restores, functions, "torch", Forwarding(torch, {"sort": here(ours.sort, sort)}))
    patch_function(restores, functions, "invert_permutation", invert_permutation)


def _located_step(
    optimizer: torch.optim.Optimizer,
    locator: Locator,
    on_step: Callable[[torch.optim.Optimizer], None],
) -> Callable[..., Any]:
    step = optimizer.step

    def of_step(value: Any) -> Any:
        return locator.leaves_optimizer(value) if callable(value) else value

    def located(*args: Any, **kwargs: Any) -> Any:
        on_step(optimizer)
        # A closure computes the loss and its gradients: forward, whoever calls it.
        given = {name: of_step(value) for name, value in kwargs.items()}
        with locator.optimizing():
            return step(*map(of_step, args), **given)

    return located


def _refused_address(locator: Locator, diagnostics: Diagnostics) -> Callable[[Any], int]:
    def refuse(_storage: Any) -> int:
        diagnostics.add(*address(locator.here()))
        return 0

    return refuse


_fastpath_is_enabled = torch.backends.mha.get_fastpath_enabled


def _caller_is_attention_in_training() -> bool:
    """Return whether a layer asks that will find itself in training, where it has no fast path.

    Before it reads its weights, and a parametrized one, as of `spectral_norm`, changes with each
    read.
    """
    caller = sys._getframe(2).f_locals.get("self")  # 1 is the frame of `here`
    asks = isinstance(caller, torch.nn.MultiheadAttention) and caller.training
    return asks and _fastpath_is_enabled()


def _leave_unpacked(_layer: torch.nn.RNNBase) -> None:
    """Leave weights where they are: PyTorch looks at addresses to pack them for cuDNN."""


def _watched_zero_grad(zero_grad: Callable[..., None], watch: GradientWatch) -> Callable[..., None]:
    def watched(self: Any, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        if not set_to_none:
            zero_grad(self, set_to_none=False)
            return
        with watch.clearing_of(self):
            zero_grad(self)

    return watched


def _apply_unless_same(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Module._apply` that leaves a module alone whose tensors it would not change.

    PyTorch replaces the tensors even then, which fakes do not allow: `module.to(its own dtype)`.
    """

    def applied(self: Any, fn: Any, recurse: bool = True) -> Any:  # noqa: FBT001, FBT002
        tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        if all(fn(one) is one for one in tensors):
            return self
        return apply(self, fn, recurse)

    return applied


def _float_of(value: Any) -> Any:
    """Return `float` that keeps a followed number, and converts a tensor to float64."""
    if isinstance(value, FakeTensor):
        return value.double()
    return value if isinstance(value, SymbolicFloat) else float(value)


def _rejected_scheduler(locator: Locator, diagnostics: Diagnostics) -> Callable[..., None]:
    def refuse(self: Any, *_args: Any, **_kwargs: Any) -> None:
        diagnostics.add(
            f"{type(self).__name__}.step is called inside the step",
            locator.here(),
            "Call it after the compiled step: the new learning rate is read at the next call",
        )

    return refuse


def _optimizers() -> list[type[torch.optim.Optimizer]]:
    """Return the classes of optimizers that have a `step` of their own."""
    found, rest = [], [torch.optim.Optimizer]
    while rest:
        rest += (last := rest.pop()).__subclasses__()
        if last is not torch.optim.Optimizer and "step" in vars(last):
            found.append(last)
    return list(dict.fromkeys(found))


def _rejected_step(
    step: Callable[..., Any], state: State, locator: Locator, diagnostics: Diagnostics
) -> Callable[..., Any]:
    """Return a `step` that rejects optimizers that were not passed, whose state is unknown."""

    @functools.wraps(step)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A wrapper, as that of accelerate, steps the one that it holds.
        if not any(one is self or one is vars(self).get("optimizer") for one in state.optimizers):
            diagnostics.add(
                f"{type(self).__name__}.step of an optimizer that was not passed is called",
                locator.here(),
                "Pass it in optimizer=, or a list of all that the step calls. One that the step "
                "makes has no state to pass: write its update, p - lr * g, with "
                "torch.autograd.grad and torch.func.functional_call",
            )
            raise TracingStopped
        return step(self, *args, **kwargs)

    return checked


def _rejected_scaler(locator: Locator, diagnostics: Diagnostics) -> Callable[..., Any]:
    """Return a method that rejects scalers that were not passed; those that were have their own."""
    scale = torch.amp.GradScaler.scale

    def refuse(self: Any, outputs: Any) -> Any:
        if not self.is_enabled():
            return scale(self, outputs)
        diagnostics.add(
            f"a {type(self).__name__} that was not passed scales a loss",
            locator.here(),
            "Pass it in scaler=",
        )
        raise TracingStopped

    return refuse


def _checked_call(
    call: Callable[..., Any],
    locator: Locator,
    diagnostics: Diagnostics,
    ranks: TracedRanks | None,
) -> Callable[..., Any]:
    """Return a `torch.nn.Module.__call__` that calls the modules of replicas.

    It rejects others that distribute their training.
    """

    def checked(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = None if ranks is None else ranks.module_for(module)
        error = wrapper_error(module) if inner is None else None
        if error is not None:
            what, _, advice = error.partition("; ")
            text = f"the step calls a module that {what}"
            diagnostics.add(text, locator.here(), advice[0].upper() + advice[1:])
            raise TracingStopped
        return call(module if inner is None else inner, *args, **kwargs)

    return checked


def _checkpoint_function() -> type:
    """Run the function without activation checkpointing: the compiler plans memory."""

    def plain(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:  # noqa: FBT001
        return function(*args)

    apply = here(plain, torch.utils.checkpoint.CheckpointFunction.apply)
    return type("CheckpointFunction", (), {"apply": staticmethod(apply)})


def _no_checkpoint(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield
