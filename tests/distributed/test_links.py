# SPDX-License-Identifier: Apache-2.0
"""The alpha-beta model of links: what collectives take, and numbers fitted to measured ones."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import amp_ir
from amp_ir.distributed.links import fit, sent_nbytes
from amp_ir.errors import OptionError
from rank_processes import ranks

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


@pytest.mark.parametrize(
    ("kind", "algorithm", "milliseconds"),
    [
        # 4 ranks, 8 MB at 1 GB/s: a quarter of it takes 2 ms, and a message 1 ms more.
        ("all_gather", "ring", 3 * 1 + 3 * 2),
        ("reduce_scatter", "ring", 3 * 1 + 3 * 2),
        ("all_reduce", "ring", 6 * 1 + 6 * 2),
        ("broadcast", "ring", 2 * (1 + 8)),
        ("all_gather", "recursive", 2 * 1 + 3 * 2),
        ("all_reduce", "recursive", 4 * 1 + 6 * 2),
    ],
)
def test_a_collective_takes_what_the_papers_say(kind, algorithm, milliseconds):
    links = amp_ir.Links(gigabytes_per_second=1.0, latency_microseconds=1000.0, algorithm=algorithm)
    assert links.milliseconds(kind, 8_000_000, 4) == pytest.approx(milliseconds)


@given(
    st.sampled_from(KINDS),
    st.integers(0, 2**34),
    st.integers(1, 4096),
    st.floats(1e-3, 1e4),
    st.floats(1.0, 100.0),
    st.floats(0.0, 1e5),
    st.sampled_from(["ring", "recursive"]),
)
def test_more_bandwidth_is_never_slower_and_one_rank_sends_nothing(
    kind, nbytes, count, rate, factor, latency, algorithm
):
    rest: dict[str, Any] = {"latency_microseconds": latency, "algorithm": algorithm}
    slow = amp_ir.Links(gigabytes_per_second=rate, **rest)
    fast = amp_ir.Links(gigabytes_per_second=rate * factor, **rest)
    assert 0 <= fast.milliseconds(kind, nbytes, count) <= slow.milliseconds(kind, nbytes, count)
    assert slow.milliseconds(kind, nbytes, 1) == 0 == sent_nbytes(kind, nbytes, 1)


def test_a_rank_of_a_ring_sends_its_share_of_the_bytes():
    assert [sent_nbytes(kind, 1000, 4) for kind in KINDS] == [1500, 750, 750, 750]


@given(st.floats(0.01, 100.0), st.floats(0.1, 1000.0), st.integers(2, 64))
def test_a_fit_finds_the_links_that_were_measured(rate, latency, count):
    links = amp_ir.Links(gigabytes_per_second=rate, latency_microseconds=latency)
    sizes = [2**k for k in range(12, 26, 2)]
    seconds = [links.milliseconds("all_reduce", nbytes, count) / 1e3 for nbytes in sizes]
    found = fit(list(zip(sizes, seconds, strict=True)), count)
    assert found.gigabytes_per_second == pytest.approx(rate, rel=1e-6)
    assert found.latency_microseconds == pytest.approx(latency, rel=1e-4)


def test_a_fit_of_noise_has_no_negative_latency_and_some_bandwidth():
    # Small messages that take no time, then such that take less the larger they are.
    steep = fit([(4096, 1e-6), (2**20, 1e-3), (2**24, 3e-2)], 2)
    assert steep.latency_microseconds == 0 and steep.gigabytes_per_second > 0
    falling = fit([(4096, 1e-2), (2**24, 1e-3)], 2)
    assert falling.latency_microseconds >= 0 and falling.gigabytes_per_second > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"gigabytes_per_second": 0},
            "Links(gigabytes_per_second=0) is no bandwidth; expected a finite number above 0, such "
            "as 12.5 for 100 Gbit/s",
        ),
        (
            {"gigabytes_per_second": 1.0, "latency_microseconds": float("nan")},
            "Links(latency_microseconds=nan) is no latency; expected a finite number of at least "
            "0, such as 5",
        ),
        (
            {"gigabytes_per_second": 1.0, "algorithm": "tree"},
            "Links(algorithm='tree') is not known; expected 'ring' or 'recursive'",
        ),
    ],
)
def test_links_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(OptionError) as caught:
        amp_ir.Links(**wrong)
    assert str(caught.value) == message


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_ranks_measure_the_same_links(tmp_path):
    def of_rank(_rank: int) -> tuple[amp_ir.Links, str]:
        found = amp_ir.measure_links(repeats=1)
        with pytest.raises(OptionError) as caught:
            amp_ir.measure_links(repeats=0)
        alone = [torch.distributed.new_group([one]) for one in range(2)]
        with pytest.raises(OptionError) as of_one:
            amp_ir.measure_links(alone[_rank])
        return found, f"{caught.value}\n{of_one.value}"

    (first, message), (second, _) = ranks(of_rank, tmp_path)
    assert first == second and first.gigabytes_per_second > 0
    assert message == (
        "measure_links(repeats=0): expected a whole number above 0\n"
        "measure_links in a process group of one rank: there is no link to measure; start several "
        "with torchrun"
    )
