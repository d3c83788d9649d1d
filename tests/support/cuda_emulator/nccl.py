# SPDX-License-Identifier: Apache-2.0
"""Inside the emulating process: gloo in the place of NCCL, in the order of the emulated stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from amp_ir.distributed import exchange, stream_exchange
from amp_ir.distributed.process_group import Group
from cuda_emulator import device, steps


class StreamWork:
    """A collective as NCCL's handle has it: begun and waited for when the stream is there."""

    def __init__(self, kind: str, group: Group, tensor: torch.Tensor) -> None:
        # gloo has no reduce-scatter: of the sums only this rank's part counts.
        launch = exchange._LAUNCHES["all_reduce" if kind == "reduce_scatter" else kind]
        device.enqueue(lambda: setattr(self, "_work", launch(group, tensor)))

    def wait(self) -> None:
        """Let the stream wait."""
        device.enqueue(lambda: self._work.wait())


def _launch(owner: Any, collective: Any, tensor: torch.Tensor) -> StreamWork:
    return StreamWork(collective.kind, owner._ranks.groups[collective.group], tensor)


def _copy_parts(pairs: Any) -> None:
    views = [steps._host(one) for one in pairs]

    def copy() -> None:
        for part, result in zip(views[::2], views[1::2], strict=True):
            result.copy_(part)

    device.enqueue(copy)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Let a gloo group be one of NCCL's, which exchanges no tensors of the host."""
    backends = {"cuda": "nccl", "cpu": ""}
    with (
        mock.patch.object(stream_exchange.StreamExchange, "_launch", _launch),
        mock.patch.object(stream_exchange, "copy_parts", _copy_parts),
        mock.patch.object(stream_exchange, "shared", steps._host),
        mock.patch.object(Group, "backend_for", lambda self, device_type: backends[device_type]),
    ):
        yield
