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
LAYOUTS = {"resnet50": ("contiguous", "channels_last"), "ssd": ("contiguous", "channels_last")}


@attrs.frozen
class Peer:
    """One PyTorch variant: "eager" or "compile", in a memory layout, ready to run."""

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
    return Peer(variant, layout, training, torch.compile(step) if variant == "compile" else step)


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
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, fresh_cache(dir=folder):
        yield
    torch._dynamo.reset()
