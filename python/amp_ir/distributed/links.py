# SPDX-License-Identifier: Apache-2.0
"""The links between ranks, as the alpha-beta model has them: a latency and a bandwidth.

A message of n bytes takes alpha + n * beta. From that follow the times of collectives over p ranks:

    algorithm    reduce-scatter, all-gather              all-reduce: one after the other
    ring         (p - 1) alpha + (p - 1)/p n beta        2 (p - 1) alpha + 2 (p - 1)/p n beta
    recursive    ceil(lg p) alpha + (p - 1)/p n beta     2 ceil(lg p) alpha + 2 (p - 1)/p n beta

and ceil(lg p) (alpha + n beta) for a broadcast along a binomial tree. The time of additions is part
of a measured beta, and left out of a given one.

Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in
    MPICH", sections 4.1 (all-gather), 4.2 (broadcast), 4.4 (reduce-scatter) and 4.5 (all-reduce);
    for the ring: Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations", section 4.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy
import torch

from amp_ir.distributed.process_group import Group
from amp_ir.errors import OptionError

ALGORITHMS = ("ring", "recursive")
# From what latency decides to what bandwidth decides.
_SIZES_NBYTES = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)


@attrs.frozen(kw_only=True)
class Links:
    """What each rank sends and receives with: `gigabytes_per_second` (10^9 bytes) each way.

    `latency_microseconds` is the time of an empty message. `algorithm` is "ring", as gloo has, or
    "recursive" (doubling and halving), whose latency grows with the logarithm of the ranks.

    Raises:
        OptionError: a number is out of range, or there is no such algorithm.
    """

    gigabytes_per_second: float
    latency_microseconds: float = 0.0
    algorithm: str = "ring"

    def __attrs_post_init__(self) -> None:
        """Refuse links that cannot be."""
        if not _is_number(self.gigabytes_per_second) or not self.gigabytes_per_second > 0:
            raise OptionError(
                f"Links(gigabytes_per_second={self.gigabytes_per_second!r}) is no bandwidth; "
                "expected a finite number above 0, such as 12.5 for 100 Gbit/s"
            )
        if not _is_number(self.latency_microseconds) or self.latency_microseconds < 0:
            raise OptionError(
                f"Links(latency_microseconds={self.latency_microseconds!r}) is no latency; "
                "expected a finite number of at least 0, such as 5"
            )
        if self.algorithm not in ALGORITHMS:
            raise OptionError(
                f"Links(algorithm={self.algorithm!r}) is not known; expected "
                f"{' or '.join(map(repr, ALGORITHMS))}"
            )

    def milliseconds(self, kind: str, nbytes: int, ranks: int) -> float:
        """Return the time of a collective: "all_reduce", "broadcast", ... of `nbytes` in all.

        Those of an all-gather and a reduce-scatter are the bytes of the whole range.
        """
        messages, share = self._terms(kind, ranks)
        microseconds = messages * self.latency_microseconds
        return microseconds / 1e3 + share * nbytes / self.gigabytes_per_second / 1e6

    def _terms(self, kind: str, ranks: int) -> tuple[int, float]:
        """Return how many latencies a collective takes, and how often its bytes pass a link."""
        rounds = math.ceil(math.log2(ranks))
        if kind == "broadcast":
            return rounds, float(rounds)
        steps = ranks - 1 if self.algorithm == "ring" else rounds
        times = 2 if kind == "all_reduce" else 1
        return times * steps, times * (ranks - 1) / ranks


def sent_nbytes(kind: str, nbytes: int, ranks: int) -> int:
    """Return the bytes that a rank sends in a collective, on average over the ranks."""
    times = 2 if kind == "all_reduce" else 1
    return round(times * nbytes * (ranks - 1) / ranks)


def measure_links(process_group: Any = None, *, repeats: int = 20) -> Links:
    """Measure the links of a process group by all-reduces; every rank calls this alike.

    The numbers are fitted to the ring's formula, from all-reduces of 4 KiB to 16 MiB of float32 one
    after the other, each a median of `repeats`, by least squares of the relative error. All ranks
    return rank 0's.

    Raises:
        OptionError: there is no process group, or it has one rank; or `repeats` is below 1.
    """
    group = Group.of(process_group)
    if group.size < 2:
        raise OptionError(
            "measure_links in a process group of one rank: there is no link to measure; start "
            "several with torchrun"
        )
    if not isinstance(repeats, int) or repeats < 1:
        raise OptionError(f"measure_links(repeats={repeats!r}): expected a whole number above 0")
    measured = [(nbytes, _seconds(group, nbytes, repeats)) for nbytes in _SIZES_NBYTES]
    found: list[Any] = [fit(measured, group.size)]
    first = torch.distributed.get_global_rank(group.handle, 0)
    torch.distributed.broadcast_object_list(found, src=first, group=group.handle)
    links: Links = found[0]
    return links


def _seconds(group: Group, nbytes: int, repeats: int) -> float:
    tensor = torch.zeros(nbytes // 4)
    options: Any = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed.ReduceOp.SUM
    spent = []
    for _ in range(repeats + 2):
        # Begun together: else a rank would wait for the others, too.
        group.handle.barrier().wait()
        started = time.perf_counter()
        group.handle.allreduce([tensor], options).wait()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent[2:])


def fit(measured: Sequence[tuple[int, float]], ranks: int) -> Links:
    """Return the links by which all-reduces of (bytes, seconds) fit the ring's formula best."""
    messages, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    rows = numpy.array([[messages / s, share * nbytes / s] for nbytes, s in measured])
    ones = numpy.ones(len(rows))
    alpha, beta = numpy.linalg.lstsq(rows, ones, rcond=None)[0]
    if beta <= 0 or alpha < 0:
        # Noise on a fast or a slow link: one of the two explains it all.
        alpha = max(0.0, float(alpha))
        column = rows[:, 1]
        beta = float(column @ (ones - rows[:, 0] * alpha) / (column @ column))
    if beta <= 0:
        alpha, beta = 0.0, min(s / (share * nbytes) for nbytes, s in measured)
    return Links(gigabytes_per_second=1e-9 / float(beta), latency_microseconds=float(alpha) * 1e6)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
