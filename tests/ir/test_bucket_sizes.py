# SPDX-License-Identifier: Apache-2.0
"""Buckets have each tensor once, in order, and get smaller towards the end where asked to."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from amp_ir.distributed.rank_options import DEFAULT_SIZES
from amp_ir.ir.bucket_sizes import BucketSizes

MIB = 2**20


def in_buckets(sizes: list[int], counts: list[int]) -> list[list[int]]:
    left = iter(sizes)
    return [list(itertools.islice(left, count)) for count in counts]


@given(
    st.lists(st.integers(0, 400), max_size=40),
    st.integers(1, 900),
    st.integers(1, 900),
    st.integers(1, 300),
)
def test_tapered_buckets_have_each_tensor_once_and_respect_their_limits(
    sizes: list[int], cap: int, first: int, last: int
) -> None:
    counts = BucketSizes(cap, first, last).counts(sizes)
    assert sum(counts) == len(sizes) and all(counts)
    head, *tail = in_buckets(sizes, counts) or [[]]
    assert sum(head[:-1]) < first
    assert not tail or sum(head) >= first
    least = last // 4
    for k, bucket in enumerate(reversed(tail)):
        limit = min(last * 2**k, cap)
        # Above it is one tensor with what is no bucket of its own, at the end and at the front.
        rest = sum(bucket) - max(bucket)
        assert sum(bucket) <= limit + least or rest <= 2 * least or k == len(tail) - 1
        assert len(tail) == 1 or sum(bucket) > least


@given(st.lists(st.integers(1, 3 * MIB), max_size=60))
def test_the_default_ends_with_small_buckets_and_has_large_ones_before(sizes: list[int]) -> None:
    head, *tail = in_buckets(sizes, DEFAULT_SIZES.counts(sizes)) or [[]]
    for bucket, limit in zip(reversed(tail), (1, 2, 4, 8, 16, 25, 25, 25), strict=False):
        assert len(bucket) == 1 or sum(bucket) <= (limit + 3 + 0.25) * MIB
        # Another tensor, of at most 3 MiB, did not fit.
        assert bucket is tail[0] or sum(bucket) > (limit - 3) * MIB


def test_sizes_that_a_user_gave_are_kept() -> None:
    sizes = [MIB] * 20
    assert BucketSizes(4 * MIB, 4 * MIB).counts(sizes) == [4] * 5
    assert BucketSizes(25 * MIB, MIB).counts(sizes) == [1, 19]
    assert DEFAULT_SIZES.counts(sizes) == [1, 4, 8, 4, 2, 1]
    assert BucketSizes(0, 0).counts(sizes) == [20] and BucketSizes(0, 0).counts([]) == []
    assert DEFAULT_SIZES.counts([]) == []


def test_the_last_large_tensor_has_its_bias_beside_it_and_nothing_else() -> None:
    kib = 1024
    # The head, a hidden layer and the first one, each a weight and then its bias.
    assert DEFAULT_SIZES.counts([4 * MIB, kib, 4 * MIB, kib, 4 * MIB, kib]) == [1, 3, 2]
    assert DEFAULT_SIZES.counts([4 * MIB, kib, 512 * kib, 4 * MIB]) == [1, 2, 1]
