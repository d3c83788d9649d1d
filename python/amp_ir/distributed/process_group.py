# SPDX-License-Identifier: Apache-2.0
"""PyTorch's process groups, and the key-value store behind each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from amp_ir.errors import OptionError, StateError

if torch.distributed.is_available():
    from torch._C._distributed_c10d import AllgatherOptions


def world_size() -> int:
    """Return the number of processes of the default group; 1 where nothing was initialised."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


@attrs.frozen(eq=False)
class Group:
    """A process group: its handle, this process's rank in it, and the number of ranks.

    `timeout_seconds` is the group's own: after it PyTorch's collectives raise. The handle of a
    group whose ranks are only simulated is None.
    """

    handle: Any
    rank: int
    size: int
    timeout_seconds: float

    @classmethod
    def of(cls, handle: Any) -> Group:
        """Return a group of PyTorch; None is the default one.

        Raises:
            OptionError: there is none, or this process is not of it.
        """
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            raise OptionError(
                "data_parallel=True and torch.distributed has no process group; start the script "
                "with torchrun and call torch.distributed.init_process_group() first"
            )
        handle = distributed.group.WORLD if handle is None else handle
        rank = distributed.get_rank(handle)
        if rank < 0:
            raise OptionError(
                "process_group= is a group that this process is not in; pass one that it is in, or "
                "None for all processes"
            )
        seconds = _timeout_seconds(handle)
        return cls(handle, rank, distributed.get_world_size(handle), seconds)

    @property
    def store(self) -> Any:
        """The store that all ranks of the group share."""
        return self.handle.get_group_store()

    def send_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all ranks rank 0's values of tensors, in place."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with torch.no_grad():
            for one in tensors:
                dense = one.detach().contiguous()
                self.handle.broadcast([dense], options).wait()
                if dense.data_ptr() != one.data_ptr():
                    one.copy_(dense)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> Any:
        """Begin to fill `whole` with the parts of all ranks, in their order; return the handle."""
        return self.handle._allgather_base(whole, part, AllgatherOptions())

    def gather_objects(self, own: Any) -> list[Any]:
        """Return what each rank gave, in their order."""
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, own, group=self.handle)
        return found

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[bool]:
        """Run what is inside on rank 0, while the others wait; gives whether this is rank 0.

        Raises:
            StateError: on the others, where it failed on rank 0.
        """
        told: list[str | None] = [None]
        try:
            yield self.rank == 0
        except BaseException as error:
            told = [f"{type(error).__name__}: {error}"]
            raise
        finally:
            first = torch.distributed.get_global_rank(self.handle, 0)
            torch.distributed.broadcast_object_list(told, src=first, group=self.handle)
        if self.rank != 0 and told[0]:
            raise StateError(f"rank 0 of {self.size} failed: {told[0]}")

    @property
    def backend(self) -> str:
        """The library that moves the bytes: "gloo", "nccl"."""
        return str(torch.distributed.get_backend(self.handle))


def first_line(error: BaseException, otherwise: str = "?") -> str:
    """Return the first line of what an error says: those of a backend end in a C++ traceback."""
    return (str(error).strip().splitlines() or [otherwise])[0]


def _timeout_seconds(handle: Any) -> float:
    """Return the timeout of a group's collectives."""
    backend = handle._get_backend(torch.device("cpu")) if _has_cpu(handle) else None
    options = getattr(backend, "options", None)
    found = getattr(options, "_timeout", None)
    default = torch.distributed.constants.default_pg_timeout
    return float((default if found is None else found).total_seconds())


def _has_cpu(handle: Any) -> bool:
    return any(device.type == "cpu" for device in handle._device_types)
