# SPDX-License-Identifier: Apache-2.0
"""PyTorch's variants of a workload's step: eager and torch.compile, in both memory layouts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from amp_ir.demo.workloads import Training, Workload

Step = Callable[[], Any]
# PyTorch's convolutions may be faster in channels_last.
_OF_IMAGES = ("resnet50", "ssd", "unet", "convnext", "mobilenetv2")
LAYOUTS = dict.fromkeys(_OF_IMAGES, ("contiguous", "channels_last"))
# Columns of the table, and the variants of torch.compile that they add.
COMPILED = {"compile": "compile", "whole": "compile whole", "autotune": "compile max-autotune"}


@attrs.frozen
class Peer:
    """One PyTorch variant, "eager" or one of `COMPILED`, in a memory layout, ready to run."""

    variant: str
    layout: str
    training: Training = attrs.field(repr=False)
    step: Step = attrs.field(repr=False)

    @property
    def name(self) -> str:
        """Return the variant's key among the measurements."""
        return peer_name(self.variant, self.layout)


def peer_name(variant: str, layout: str) -> str:
    """Return the key of a PyTorch variant; the default layout is left out."""
    return variant if layout == "contiguous" else f"{variant} {layout}"


def layouts_of(workload: str) -> tuple[str, ...]:
    """Return the memory layouts that are worth measuring for a workload."""
    return LAYOUTS.get(workload, ("contiguous",))


def make_peer(workload: Workload, dtype: str, variant: str, layout: str, *, small: bool) -> Peer:
    """Make a separate training with PyTorch's step; it does not run yet."""
    training = in_layout(workload.make(small=small), layout)
    step = peer_step(training, dtype)
    return Peer(variant, layout, training, compiled_step(step, variant))


def compiled_step(step: Step, variant: str) -> Step:
    """Return the step as a variant of `COMPILED` runs it; "eager" is the step itself."""
    if variant == "eager":
        return step
    if variant == COMPILED["compile"]:
        return torch.compile(step)
    if variant == COMPILED["autotune"]:
        return torch.compile(step, mode="max-autotune")
    whole = torch.compile(step)

    def traced_with_backward() -> Any:
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return whole()

    return traced_with_backward


def peer_step(training: Training, dtype: str) -> Step:
    """Return PyTorch's step: plain in float32, under torch.autocast otherwise."""
    if dtype == "float32":
        return lambda: training.step(*training.batch)
    low = getattr(torch, dtype)
    return lambda: training.autocast_step(*training.batch, dtype=low)


def in_layout(training: Training, layout: str) -> Training:
    """Return the training with its images and convolution weights in a memory layout."""
    if layout == "contiguous":
        return training
    form = getattr(torch, layout)
    training.model.to(memory_format=form)  # type: ignore[call-overload]  # not in its stubs
    batch = tuple(
        one.contiguous(memory_format=form) if one.dim() == 4 else one for one in training.batch
    )
    return attrs.evolve(training, batch=batch)


@contextlib.contextmanager
def cold_compiler() -> Iterator[None]:
    """Disable torch.compile's caches in memory and on the disk."""
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    # The variants of a step are one function to torch.compile, which keeps 8 programs of each.
    limits = torch._dynamo.config.patch(recompile_limit=64)
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with limits, folder as path, fresh_cache(dir=path):
        yield
    torch._dynamo.reset()
