# SPDX-License-Identifier: Apache-2.0
"""Collectives: the ops by which the ranks of a process group exchange tensors.

A capture has whole collectives, `all_reduce` and `broadcast`. `rewrites/start_collectives.py` makes
each bucket of them a pair: the `_start` op hands tensors to the group, and its results are values
in flight, which only the `_wait` op of the same bucket may read. Other ops run between the two.
A reduce-scatter starts with n tensors, and its wait gives the parts of their sums that this rank
holds; an all-gather starts with such parts, and its wait gives whole tensors.

The options of a pair: `group` numbers the process groups of the step, `bucket` the pairs of a
group in the order in which they start; `ranks` is the number of ranks of the group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from amp_ir.dialect import rank_threads
from amp_ir.dialect.define import Tensor, define
from amp_ir.errors import ArgumentError

ALL_REDUCE, BROADCAST, AVERAGE = "amp_ir.all_reduce", "amp_ir.broadcast", "amp_ir.average"
REDUCE_SCATTER, ALL_GATHER = "amp_ir.reduce_scatter", "amp_ir.all_gather"
_WHOLE = (ALL_REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER)
# The whole op, by its first and second half.
STARTS = {f"{name}_start": name for name in _WHOLE}
WAITS = {f"{name}_wait": name for name in _WHOLE}
# What a planned program calls for the two halves.
START_SYMBOL, WAIT_SYMBOL = "amp_ir.collective.start", "amp_ir.collective.wait"


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
    last_bucket_nbytes: int = 0,
) -> Tensor:
    """Return the mean over all ranks: x f[...] -> like x.

    `backward` numbers the backward passes of the step; gradients of one pass share buckets of the
    sizes that `BucketSizes` makes of the numbers of bytes. `comm_dtype` is the dtype that the user
    wants on the wire, "" for that of the gradient; `parameter` names whose gradient it is.
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


@define("amp_ir.reduce_scatter_start", "tensor", "tensors...", reference=_started)
def reduce_scatter_start(
    *tensors: Tensor,
    ranks: int,
    group: int,
    bucket: int,
    size: int,
    offsets: tuple[int, ...],
    comm_dtype: str = "",
    parameters: str = "",
) -> tuple[Tensor, ...]:
    """Begin to sum tensors over the ranks, each of which gets a part: f[...]... -> in flight.

    The tensors lie in a range of `size` elements, each from its number in `offsets` on; the rank k
    gets the k-th of `ranks` equal parts of it. Other options as of `all_reduce_start`.
    """
    return _alike(tensors)


def _sums_of_parts(
    *tensors: torch.Tensor, ranks: int, group: int, bucket: int, parts: tuple[int, ...],
    **_options: object,
) -> tuple:  # type: ignore[type-arg]  # fmt: skip
    sent = rank_threads.receive((group, bucket), tensors, ranks)
    sums = [_sum(list(column)).flatten() for column in zip(*sent, strict=True)]
    return tuple(sums[member][first:end].clone() for member, first, end in _triples(parts))


def _triples(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


@define("amp_ir.reduce_scatter_wait", "tensor", "tensors...", reference=_sums_of_parts)
def reduce_scatter_wait(
    *tensors: Tensor,
    ranks: int,
    group: int,
    bucket: int,
    size: int,
    offsets: tuple[int, ...],
    parts: tuple[int, ...],
    comm_dtype: str = "",
) -> tuple[Tensor, ...]:
    """Return this rank's parts of the sums of what is in flight: f[...]... -> f[elements]...

    `parts` has three numbers for each: the position of the tensor among those in flight, and the
    first and the end of the part in the flat tensor.
    """
    _alike(tensors)
    return tuple(
        tensors[member].with_shape((end - first,)) for member, first, end in _triples(parts)
    )


def _begun_gather(
    *tensors: torch.Tensor, group: int, bucket: int, ranks: int, size: int,
    offsets: tuple[int, ...], **_options: object,
) -> tuple:  # type: ignore[type-arg]  # fmt: skip
    whole = torch.zeros(size, dtype=tensors[0].dtype)
    for one, offset in zip(tensors, offsets, strict=True):
        whole[offset : offset + one.numel()] = one.flatten()
    rank_threads.send((group, bucket), [whole])
    return tuple(one.clone() for one in tensors)


@define("amp_ir.all_gather_start", "tensor", "tensors...", reference=_begun_gather)
def all_gather_start(
    *tensors: Tensor,
    ranks: int,
    group: int,
    bucket: int,
    size: int,
    offsets: tuple[int, ...],
    parameters: str = "",
) -> tuple[Tensor, ...]:
    """Begin to give all ranks this rank's parts of tensors: f[elements]... -> the same in flight.

    The parts lie in a range of `size` elements, each from its number in `offsets` on.
    """
    return _alike(tensors)


def _gathered(
    *tensors: torch.Tensor, ranks: int, group: int, bucket: int, size: int,
    offsets: tuple[int, ...], shapes: str, places: tuple[int, ...],
) -> tuple:  # type: ignore[type-arg]  # fmt: skip
    own = torch.zeros(size, dtype=tensors[0].dtype)
    for one, offset in zip(tensors, offsets, strict=True):
        own[offset : offset + one.numel()] = one.flatten()
    sent = [one for (one,) in rank_threads.receive((group, bucket), [own], ranks)]
    count = size // ranks
    whole = torch.cat([one[k * count : (k + 1) * count] for k, one in enumerate(sent)])
    return tuple(
        whole[offset : offset + math.prod(shape)].view(shape).clone()
        for shape, offset in zip(_shapes(shapes), places, strict=True)
    )


def _shapes(text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, one.split("x"))) for one in text.split(",")]


@define("amp_ir.all_gather_wait", "tensor", "tensors...", reference=_gathered)
def all_gather_wait(
    *tensors: Tensor,
    ranks: int,
    group: int,
    bucket: int,
    size: int,
    offsets: tuple[int, ...],
    shapes: str,
    places: tuple[int, ...],
) -> tuple[Tensor, ...]:
    """Return whole tensors from the parts in flight: f[elements]... -> f[...]...

    `shapes` are those of the results, as "4x8,16"; they lie from `places` on in the range.
    """
    _alike(tensors)
    return tuple(tensors[0].with_shape(shape) for shape in _shapes(shapes))


def _averaged(x: torch.Tensor, *, ranks: int) -> torch.Tensor:
    return x * (1 / ranks)


@define(AVERAGE, "x", reference=_averaged)
def average(x: Tensor, *, ranks: int) -> Tensor:
    """Multiply a sum over the ranks, or a term of it, by 1 / ranks: x f[...] -> like x."""
    x.expect_float()
    return x.with_shape(x.shape)
