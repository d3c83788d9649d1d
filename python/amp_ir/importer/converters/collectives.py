# SPDX-License-Identifier: Apache-2.0
"""Collectives, which the capture records as custom ops with the dialect's names."""

from __future__ import annotations

from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import shape_of
from amp_ir.importer.converters.registry import converts


@converts("amp_ir.all_reduce.default")
def all_reduce(
    ops: Emitter,
    x: relax.Expr,
    ranks: int,
    group: int,
    backward: int,
    parameter: str,
    comm_dtype: str,
    bucket_nbytes: int,
    first_bucket_nbytes: int,
    last_bucket_nbytes: int,
) -> relax.Expr:
    """Return the mean over the ranks; nothing is sent of a tensor without elements."""
    if 0 in shape_of(x):
        return x
    return ops.call(
        "amp_ir.all_reduce",
        x,
        ranks=ranks,
        group=group,
        backward=backward,
        parameter=parameter,
        comm_dtype=comm_dtype,
        bucket_nbytes=bucket_nbytes,
        first_bucket_nbytes=first_bucket_nbytes,
        last_bucket_nbytes=last_bucket_nbytes,
    )


@converts("amp_ir.broadcast.default")
def broadcast(
    ops: Emitter, x: relax.Expr, ranks: int, group: int, forward: int, buffer: str
) -> relax.Expr:
    """Return rank 0's value; nothing is sent of a tensor without elements."""
    if 0 in shape_of(x):
        return x
    return ops.call("amp_ir.broadcast", x, ranks=ranks, group=group, forward=forward, buffer=buffer)
