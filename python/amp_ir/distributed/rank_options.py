# SPDX-License-Identifier: Apache-2.0
"""The options of data parallel steps that are checked before anything is captured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from amp_ir.distributed.shards import KINDS
from amp_ir.errors import OptionError
from amp_ir.ir.bucket_sizes import BucketSizes

_MIB = 2**20
# Where nobody chose: DistributedDataParallel's first bucket, which starts early, and its cap, and
# smaller ones at the end of the backward pass, which has little left to hide them.
DEFAULT_SIZES = BucketSizes(25 * _MIB, _MIB, _MIB)
COMM_DTYPES = ("float16", "bfloat16")


def check_comm_dtype(comm_dtype: str | None) -> None:
    """Refuse a dtype in which gradients are not exchanged.

    Raises:
        OptionError: it is another.
    """
    if comm_dtype not in (None, *COMM_DTYPES):
        raise OptionError(
            f'comm_dtype={comm_dtype!r} is not supported; expected "float16", "bfloat16", or None '
            "for the dtype of the gradients"
        )


def check_shard(shard: str | None) -> None:
    """Refuse what is no kind of a split.

    Raises:
        OptionError: it is none.
    """
    if shard not in (None, *KINDS):
        raise OptionError(
            f'shard={shard!r} is not supported; expected "optimizer", "gradients", or None for '
            "all of the optimizers' state on every rank"
        )


def sizes_of(bucket_cap_mb: Any) -> BucketSizes:
    """Return the sizes of buckets of so many MiB; for None those that nobody chose.

    Raises:
        OptionError: it is no size.
    """
    if bucket_cap_mb is None:
        return DEFAULT_SIZES
    is_number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
    if not is_number or not (math.isfinite(bucket_cap_mb) and bucket_cap_mb * _MIB >= 1):
        raise OptionError(
            f"bucket_cap_mb={bucket_cap_mb!r} is no size of a bucket; expected a finite number of "
            "MiB above 0, such as 4, or None for up to 25 MiB, smaller at the end"
        )
    cap = int(bucket_cap_mb * _MIB)
    return BucketSizes(cap, cap)


def refuse_given(options: Mapping[str, Any], why: str) -> None:
    """Refuse options that have no effect.

    Raises:
        OptionError: one is not None; names the first.
    """
    what = next((name for name, value in options.items() if value is not None), None)
    if what is not None:
        raise OptionError(f"{what} is given, and {why}")
