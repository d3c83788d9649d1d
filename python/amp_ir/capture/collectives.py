# SPDX-License-Identifier: Apache-2.0
"""Collectives of a traced step: gradients that a backward pass reduces, buffers of rank 0.

As in DistributedDataParallel: what a backward pass leaves in `p.grad` is the mean over the ranks,
whatever was accumulated there before, and a forward pass begins with rank 0's buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from amp_ir.capture.define_op import define_op
from amp_ir.capture.diagnostics import Diagnostics, TracingStopped
from amp_ir.capture.locations import Locator
from amp_ir.dialect import DECLARATIONS
from amp_ir.distributed.replicas import Ranks, Replica
from amp_ir.ir.location import Location

_ALL_REDUCE = (
    "all_reduce(Tensor x, int ranks, int group, int backward, str parameter, str comm_dtype, "
    "int bucket_nbytes, int first_bucket_nbytes, int last_bucket_nbytes) -> Tensor"
)
_BROADCAST = "broadcast(Tensor x, int ranks, int group, int forward, str buffer) -> Tensor"


def _mean(x: torch.Tensor, ranks: int, *_options: Any) -> torch.Tensor:
    return DECLARATIONS["amp_ir.all_reduce"].reference(x, ranks=ranks)  # type: ignore[return-value]


def _of_first(x: torch.Tensor, ranks: int, *_options: Any) -> torch.Tensor:
    return DECLARATIONS["amp_ir.broadcast"].reference(x, ranks=ranks)  # type: ignore[return-value]


def _like_first(x: torch.Tensor, *_options: Any) -> torch.Tensor:
    return torch.empty_like(x)


define_op(_ALL_REDUCE, _mean, _like_first)
define_op(_BROADCAST, _of_first, _like_first)


@attrs.define(eq=False)
class _Traced:
    """One replica while the step is traced; the flags as the replica's."""

    replica: Replica
    prefix: str
    syncs: bool
    sends_buffers: bool


class TracedRanks:
    """The exchange of all replicas of a step that is being traced.

    `fakes` maps the id of a tensor of the user to its fake; `prefixes` the id of a module to its
    path, as locations have it.
    """

    def __init__(
        self, ranks: Ranks, fakes: Mapping[int, torch.Tensor], locator: Locator,
        diagnostics: Diagnostics,
    ) -> None:  # fmt: skip
        self._ranks = ranks
        self._fakes = fakes
        self._locator = locator
        self._diagnostics = diagnostics
        self._traced = {
            id(one): _Traced(
                one,
                locator.path_of(one.module),
                # A wrapper reduces only after a forward pass of its own.
                one.wrapper is None and one.syncs,
                one.sends_buffers,
            )
            for one in ranks.replicas
        }
        self._touched: dict[int, tuple[torch.Tensor, Location]] = {}
        self._backward = self._forward = 0
        self._is_queued = False
        self._statistics = 0
        self._watch()

    @property
    def sends_buffers(self) -> tuple[bool, ...]:
        """Return the flag of each replica as the step leaves it."""
        return tuple(one.sends_buffers for one in self._traced.values())

    def module_for(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """Return what is called instead of a module; None for one that is no replica.

        Sends rank 0's buffers, as a wrapper does before it calls its module.
        """
        replica = self._ranks.replica_of(module)
        if replica is None:
            return None
        traced = self._traced[id(replica)]
        if traced.sends_buffers:
            self._send_buffers(traced)
        syncs = torch.is_grad_enabled() and replica.syncs
        traced.sends_buffers = syncs
        if replica.wrapper is not None:
            traced.syncs = syncs
        return replica.module

    def _replica_around(self, module: torch.nn.Module) -> Replica | None:
        """Return the replica of several ranks that a module is in."""
        for traced in self._traced.values():
            if traced.replica.group.size > 1:
                if any(one is module for one in traced.replica.module.modules()):
                    return traced.replica
        return None

    def mean_for(
        self, module: torch.nn.Module
    ) -> tuple[Callable[[torch.Tensor], torch.Tensor], int] | None:
        """Return the mean over the ranks that have a module, and their number; None for one."""
        replica = self._replica_around(module)
        if replica is None:
            return None
        group, path = replica.group, self._locator.path_of(module)

        def mean(x: torch.Tensor) -> torch.Tensor:
            # Statistics travel at once: each has a number of its own, below those of gradients.
            self._statistics += 1
            number, index = -self._statistics, self._ranks.index_of(group)
            found: torch.Tensor = torch.ops.amp_ir.all_reduce(
                x, group.size, index, number, path, "", 0, 0, 0
            )
            return found

        return mean, group.size

    def _send_buffers(self, traced: _Traced) -> None:
        replica = traced.replica
        buffers = replica.buffers()
        if not buffers or replica.group.size == 1:
            return
        group = self._ranks.index_of(replica.group)
        for name, buffer in buffers:
            # The module holds the fake now, or what the step put in its place.
            path = _joined(traced.prefix, name)
            location = attrs.evolve(self._locator.here(), module=path.rpartition(".")[0])
            with torch.no_grad(), self._locator.at(location):
                sent = torch.ops.amp_ir.broadcast(
                    buffer, replica.group.size, group, self._forward, path
                )
                buffer.copy_(sent)
        self._forward += 1

    def _watch(self) -> None:
        """Learn from autograd which gradients a backward pass accumulates, and when it ends."""
        for traced in self._traced.values():
            if traced.replica.group.size == 1:
                continue
            for _name, parameter in traced.replica.parameters():
                fake = self._fakes.get(id(parameter), parameter)
                if fake.requires_grad:
                    fake.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._reduce)
        self._touched.setdefault(id(parameter), (parameter, self._locator.here()))

    def _reduce(self) -> None:
        """Reduce what the backward pass that ends has accumulated."""
        touched, self._touched = self._touched, {}
        self._is_queued = False
        for traced in self._traced.values():
            if traced.syncs and traced.replica.group.size > 1:
                is_reached = self._reduce_gradients(traced, touched)
                # A wrapper's next backward pass needs a forward pass of its own before it.
                traced.syncs = traced.replica.wrapper is None or not is_reached
        self._backward += 1

    def _reduce_gradients(
        self, traced: _Traced, touched: Mapping[int, tuple[torch.Tensor, Location]]
    ) -> bool:
        """Reduce a replica's gradients; return whether it has any of them."""
        replica = traced.replica
        # The module holds fakes now.
        names = {id(one): name for name, one in replica.parameters()}
        options = (
            replica.group.size,
            self._ranks.index_of(replica.group),
            self._backward,
        )
        for key, (parameter, location) in touched.items():
            if key not in names or parameter.grad is None:
                continue
            if parameter.grad.requires_grad:
                self._diagnostics.add(
                    "backward(create_graph=True) reduces gradients that are differentiated again",
                    location,
                    "Use torch.autograd.grad for what is differentiated again, and backward() "
                    "without create_graph for the rest",
                )
                raise TracingStopped
            path = _joined(traced.prefix, names[key])
            place = attrs.evolve(location, module=path.rpartition(".")[0], phase="backward")
            with torch.no_grad(), self._locator.at(place):
                mean = torch.ops.amp_ir.all_reduce(
                    parameter.grad,
                    *options,
                    path,
                    replica.comm_dtype,
                    *attrs.astuple(replica.sizes),
                )
                parameter.grad.copy_(mean)
        return any(key in names for key in touched)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
