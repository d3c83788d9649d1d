# SPDX-License-Identifier: Apache-2.0
"""PyTorch's process groups, and the key-value store behind each."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import attrs
import torch

from amp_ir.errors import OptionError, StateError

if torch.distributed.is_available():
    from torch._C._distributed_c10d import AllgatherOptions

# What a message advises where ranks cannot go on together.
RESTART = "save the state, end the processes, and start them again from it"


def world_size() -> int:
    """Return the number of processes of the default group; 1 where nothing was initialised."""
    return rank_and_size()[1]


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank in the default group, and the number of processes in it."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


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
                "torch.distributed has no process group, which data_parallel=True and "
                "measure_links need; start the script with torchrun and call "
                "torch.distributed.init_process_group() first"
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
    def world_ranks(self) -> list[int]:
        """The ranks of the default group that are in this one, in its order."""
        return torch.distributed.get_process_group_ranks(self.handle)

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

    def backend_for(self, device_type: str) -> str:
        """Return what moves tensors of such devices: "gloo", "nccl"; "" where nothing does."""
        backend = _backend(self.handle, device_type)
        return "" if backend is None else str(backend.name())


# Of each model, optimizer and step of a training with split state: the group that splits it.
_splitting: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()


def remember_splitting(parts: Sequence[Any], group: Group) -> None:
    """Note that the ranks of a group split what is kept for a training of these parts, or lists."""
    for one in parts:
        if isinstance(one, (list, tuple)):
            remember_splitting(one, group)
        elif hasattr(one, "state_dict"):
            _splitting[one] = group


def splitting_group(part: object) -> Group | None:
    """Return the group whose ranks split what is kept for the training of a part."""
    return _splitting.get(part) if hasattr(part, "state_dict") else None


def first_line(error: BaseException, otherwise: str = "?") -> str:
    """Return the first line of what an error says: those of a backend end in a C++ traceback."""
    return (str(error).strip().splitlines() or [otherwise])[0]


def _timeout_seconds(handle: Any) -> float:
    """Return the timeout of a group's collectives."""
    found = [_backend(handle, device_type) for device_type in ("cpu", "cuda")]
    options = next((getattr(one, "options", None) for one in found if one is not None), None)
    timeout = getattr(options, "_timeout", None)
    default = torch.distributed.constants.default_pg_timeout
    return float((default if timeout is None else timeout).total_seconds())


def _backend(handle: Any, device_type: str) -> Any:
    """Return a group's backend for tensors of such devices, or None."""
    if all(device.type != device_type for device in handle._device_types):
        return None
    return handle._get_backend(torch.device(device_type))


class Recorded(Protocol):
    """What has collectives of a group in it, as a CUDA graph."""

    def forget(self) -> None:
        """Let it go; the next run records it again."""


_recorded: weakref.WeakSet[Any] = weakref.WeakSet()


def forget_before_destroy(recorded: Recorded) -> None:
    """Let a recorded graph go when the process destroys its groups.

    NCCL's communicator waits, for ever, for the graphs that have its collectives in them
    (`commDestroySync`; pytorch/pytorch#115388).
    """
    _recorded.add(recorded)
    _watch_destroy()


@functools.cache
def _watch_destroy() -> None:
    """Put a function before PyTorch's, in both of the places that scripts take it from."""
    destroy = torch.distributed.distributed_c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        for one in list(_recorded):
            one.forget()
        destroy(group)

    for module in (torch.distributed, torch.distributed.distributed_c10d):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
