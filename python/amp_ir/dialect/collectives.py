# SPDX-License-Identifier: Apache-2.0
"""Collectives: the ops by which the ranks of a process group exchange tensors.

A capture has whole collectives, `all_reduce` and `broadcast`. `rewrites/start_collectives.py` makes
each bucket of them a pair: the `_start` op hands tensors to the group, and its results are values
in flight, which only the `_wait` op of the same bucket may read. Other ops run between the two.
Reduce-scatter and all-gather fit the same form: n tensors start, and as many come out of the wait.

The options of a pair: `group` numbers the process groups of the step, `bucket` the pairs of a
group in the order in which they start; `ranks` is the number of ranks of the group.
"""

from __future__ import annotations

import torch

from amp_ir.dialect import rank_threads
from amp_ir.dialect.define import Tensor, define
from amp_ir.errors import ArgumentError

ALL_REDUCE, BROADCAST, AVERAGE = "amp_ir.all_reduce", "amp_ir.broadcast", "amp_ir.average"
# The whole op, by its first and second half.
STARTS = {f"{name}_start": name for name in (ALL_REDUCE, BROADCAST)}
WAITS = {f"{name}_wait": name for name in (ALL_REDUCE, BROADCAST)}


def _mean(x: torch.Tensor, *, ranks: int, **_options: object) -> torch.Tensor:
    rank_threads.send("all_reduce", [x])
    sent = rank_threads.receive("all_reduce", [x], ranks)
    return _sum([one for (one,) in sent]) * (1 / ranks)


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for one in tensors[1:]:
        total += one
    return total


@define(ALL_REDUCE, "x", reference=_mean)
def all_reduce(
    x: Tensor,
    *,
    ranks: int,
    group: int = 0,
    backward: int = 0,
    parameter: str = "",
    comm_dtype: str = "",
    bucket_nbytes: int = 0,
    first_bucket_nbytes: int = 0,
) -> Tensor:
    """Return the mean over all ranks: x f[...] -> like x.

    `backward` numbers the backward passes of the step; gradients of one pass share buckets of
    about `bucket_nbytes` bytes, the first of `first_bucket_nbytes`. `comm_dtype` is the dtype that
    the user wants on the wire, "" for that of the gradient; `parameter` names whose gradient it is.
    """
    x.expect_float()
    return x.with_shape(x.shape)


def _of_first_rank(x: torch.Tensor, *, ranks: int, **_options: object) -> torch.Tensor:
    rank_threads.send("broadcast", [x])
    return rank_threads.receive("broadcast", [x], ranks)[0][0].clone()


@define(BROADCAST, "x", reference=_of_first_rank)
def broadcast(
    x: Tensor, *, ranks: int, group: int = 0, forward: int = 0, buffer: str = ""
) -> Tensor:
    """Return the value of rank 0: x [...] -> like x; `forward` numbers the forward passes."""
    return x.with_shape(x.shape)


def _started(*tensors: torch.Tensor, group: int, bucket: int, **_options: object) -> tuple:  # type: ignore[type-arg]
    rank_threads.send((group, bucket), tensors)
    return tuple(one.clone() for one in tensors)


@define("amp_ir.all_reduce_start", "tensor", "tensors...", reference=_started)
def all_reduce_start(
    *tensors: Tensor,
    ranks: int,
    group: int,
    bucket: int,
    comm_dtype: str = "",
    parameters: str = "",
) -> tuple[Tensor, ...]:
    """Begin to sum tensors over the ranks: f[...]... -> the same in flight.

    `parameters` names those whose gradients they are, separated by commas. `comm_dtype` is the
    dtype that the user wants between ranks: autocast then casts the tensors, and says so.
    """
    return _alike(tensors)


@define("amp_ir.broadcast_start", "tensor", "tensors...", reference=_started)
def broadcast_start(
    *tensors: Tensor, ranks: int, group: int, bucket: int, buffers: str = ""
) -> tuple[Tensor, ...]:
    """Begin to send rank 0's tensors to all ranks: [...]... -> the same in flight."""
    return _alike(tensors)


def _alike(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    odd = next((one for one in tensors if one.dtype != tensors[0].dtype), None)
    if odd is not None:
        raise ArgumentError(
            f"{odd.label} has dtype {odd.dtype}, expected {tensors[0].dtype}, as the first tensor "
            "of its bucket has"
        )
    return tuple(one.with_shape(one.shape) for one in tensors)


def _summed(*tensors: torch.Tensor, ranks: int, group: int, bucket: int, comm_dtype: str) -> tuple:  # type: ignore[type-arg]
    sent = rank_threads.receive((group, bucket), tensors, ranks)
    return tuple(_sum(list(column)) for column in zip(*sent, strict=True))


@define("amp_ir.all_reduce_wait", "tensor", "tensors...", reference=_summed)
def all_reduce_wait(
    *tensors: Tensor, ranks: int, group: int, bucket: int, comm_dtype: str = ""
) -> tuple[Tensor, ...]:
    """Return the sums over the ranks of what is in flight: f[...]... -> like each."""
    return _alike(tensors)


def _received(*tensors: torch.Tensor, ranks: int, group: int, bucket: int) -> tuple:  # type: ignore[type-arg]
    sent = rank_threads.receive((group, bucket), tensors, ranks)
    return tuple(one.clone() for one in sent[0])


@define("amp_ir.broadcast_wait", "tensor", "tensors...", reference=_received)
def broadcast_wait(*tensors: Tensor, ranks: int, group: int, bucket: int) -> tuple[Tensor, ...]:
    """Return rank 0's tensors, which are in flight: [...]... -> like each."""
    return _alike(tensors)


def _averaged(x: torch.Tensor, *, ranks: int) -> torch.Tensor:
    return x * (1 / ranks)


@define(AVERAGE, "x", reference=_averaged)
def average(x: Tensor, *, ranks: int) -> Tensor:
    """Multiply a sum over the ranks, or a term of it, by 1 / ranks: x f[...] -> like x."""
    x.expect_float()
    return x.with_shape(x.shape)
