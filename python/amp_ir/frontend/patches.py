# SPDX-License-Identifier: Apache-2.0
"""What is changed in PyTorch for the time of a capture, and put back after it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.nn.utils import clip_grad

from amp_ir.frontend.attention import scaled_dot_product_attention
from amp_ir.frontend.autocast_regions import autocast_regions_marked
from amp_ir.frontend.locations import Locator
from amp_ir.frontend.recording import GradientWatch
from amp_ir.frontend.refusals import Findings, TracingStopped
from amp_ir.frontend.state import State
from amp_ir.frontend.symbolic_float import SymbolicFloat
from amp_ir.frontend.transaction import Transaction


@contextlib.contextmanager
def patched(
    state: State,
    locator: Locator,
    watch: GradientWatch,
    findings: Findings,
    transaction: Transaction,
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
        vars(optimizer)["step"] = _located_step(optimizer, locator, findings, on_step)
        # Fused kernels would unscale by themselves; the captured step is the plain one.
        vars(optimizer)["_step_supports_amp_scaling"] = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(_plain_kernels())
        stack.enter_context(_quiet_fakes())
        devices = frozenset(slot.tensor.device.type for slot in state.slots)
        stack.enter_context(autocast_regions_marked(devices or frozenset({"cpu"})))
        stack.enter_context(torch.autograd.set_multithreading_enabled(mode=False))
        replacements: tuple[tuple[Any, str, Any], ...] = (
            (torch.nn.Module, "zero_grad", _watched_zero_grad(torch.nn.Module.zero_grad, watch)),
            (
                torch.optim.Optimizer,
                "zero_grad",
                _watched_zero_grad(torch.optim.Optimizer.zero_grad, watch),
            ),
            (torch.nn.Module, "__call__", locator.wrap_call(torch.nn.Module.__call__)),
            (torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention),
            (torch.utils.checkpoint, "CheckpointFunction", _NoCheckpoint),
            (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _no_checkpoint),
            (torch.optim.lr_scheduler.LRScheduler, "step", _refused_scheduler(locator, findings)),
            # Checks of a distribution's arguments look at values, which do not exist yet.
            (torch.distributions.Distribution, "_validate_args", False),
            (torch.amp.GradScaler, "scale", _refused_scaler(locator, findings)),
        )
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        # The functions of this module convert their threshold, which may hang on the loss scale.
        stack.enter_context(mock.patch.object(clip_grad, "float", _float_of, create=True))
        yield stepped


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Switch off kernels that hide many ops in one that only one library has.

    oneDNN and cuDNN have whole LSTMs; nn.TransformerEncoderLayer has an inference kernel.
    """
    switches: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
        (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
        (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
        (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    )
    before = [get() for get, _ in switches]
    for _, switch in switches:
        switch(False)
    try:
        yield
    finally:
        for (_, switch), value in zip(switches, before, strict=True):
            switch(value)


@contextlib.contextmanager
def _quiet_fakes() -> Iterator[None]:
    """Let an error of the user's step be raised only, not logged by the fake tensors as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _located_step(
    optimizer: torch.optim.Optimizer,
    locator: Locator,
    findings: Findings,
    on_step: Callable[[torch.optim.Optimizer], None],
) -> Callable[..., Any]:
    step = optimizer.step

    def located(*args: Any, **kwargs: Any) -> Any:
        if any(callable(value) for value in (*args, *kwargs.values())):
            findings.add(
                f"{type(optimizer).__name__}.step is called with a closure",
                locator.here(),
                "Compute the loss and call backward() before step(); use an optimizer that needs "
                "no closure",
            )
            raise TracingStopped
        on_step(optimizer)
        with locator.optimizing():
            return step(*args, **kwargs)

    return located


def _watched_zero_grad(zero_grad: Callable[..., None], watch: GradientWatch) -> Callable[..., None]:
    def watched(self: Any, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        if not set_to_none:
            zero_grad(self, set_to_none=False)
            return
        with watch.clearing_of(self):
            zero_grad(self)

    return watched


def _float_of(value: Any) -> float:
    """`float` that leaves a number which is followed as it is: it is a float already."""
    return value if isinstance(value, SymbolicFloat) else float(value)


def _refused_scheduler(locator: Locator, findings: Findings) -> Callable[..., None]:
    def refuse(self: Any, *_args: Any, **_kwargs: Any) -> None:
        findings.add(
            f"{type(self).__name__}.step is called inside the step",
            locator.here(),
            "Call it after the compiled step: the new learning rate is read at the next call",
        )

    return refuse


def _refused_scaler(locator: Locator, findings: Findings) -> Callable[..., Any]:
    """Scalers that were passed have methods of their own while a step is traced."""
    scale = torch.amp.GradScaler.scale

    def refuse(self: Any, outputs: Any) -> Any:
        if not self.is_enabled():
            return scale(self, outputs)
        findings.add(
            f"a {type(self).__name__} that was not passed scales a loss",
            locator.here(),
            "Pass it in scaler=",
        )
        raise TracingStopped

    return refuse


class _NoCheckpoint:
    """Activation checkpointing changes memory, not results; memory is planned by the compiler."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:  # noqa: FBT001
        """Call the function."""
        return function(*args)


def _no_checkpoint(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield
