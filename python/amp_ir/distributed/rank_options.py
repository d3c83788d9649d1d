# SPDX-License-Identifier: Apache-2.0
"""The options of data parallel steps that are checked before anything is captured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amp_ir.distributed.process_group import Group
from amp_ir.distributed.shards import KINDS
from amp_ir.errors import DeviceError, OptionError
from amp_ir.ir.bucket_sizes import BucketSizes

if TYPE_CHECKING:
    from amp_ir.distributed.replicas import Ranks

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


def check_exchange(ranks: Ranks | None, *, is_cuda: bool, amp_dtype: str | None) -> None:
    """Refuse what a compiled step cannot exchange.

    Raises:
        DeviceError: a group without a backend for the device; OptionError: two low dtypes.
    """
    if ranks is None or not ranks.exchanges:
        return
    check_backends(ranks.groups, is_cuda=is_cuda)
    wanted = {one.comm_dtype for one in ranks.replicas} - {""}
    if amp_dtype in ("float16", "bfloat16") and wanted - {amp_dtype}:
        other = sorted(wanted - {amp_dtype})[0]
        raise OptionError(
            f"comm_dtype={other!r} and amp_dtype={amp_dtype!r}: a step has one low dtype; make "
            "them the same, or leave one out"
        )


def check_backends(groups: Sequence[Group], *, is_cuda: bool) -> None:
    """Require process groups that exchange tensors of the step's device.

    Raises:
        DeviceError: one does not; says how to make one.
    """
    found = {one.backend_for("cuda" if is_cuda else "cpu") for one in groups if one.size > 1}
    if is_cuda and found - {"nccl"}:
        named = " and ".join(sorted(one or "no backend" for one in found))
        raise DeviceError(
            f'device="cuda" exchanges gradients with NCCL, and the process group has {named} for '
            'CUDA tensors: call init_process_group("cpu:gloo,cuda:nccl") or '
            'init_process_group("nccl"), and torch.cuda.set_device(local_rank) before it'
        )
    if not is_cuda and "" in found:
        raise DeviceError(
            'the process group exchanges no CPU tensors, and the step runs with device="cpu": call '
            'init_process_group("gloo") or init_process_group("cpu:gloo,cuda:nccl"), or move the '
            'model to a GPU and pass device="cuda"'
        )
