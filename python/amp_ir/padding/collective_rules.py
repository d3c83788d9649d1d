# SPDX-License-Identifier: Apache-2.0
"""Padding rules of collectives: a gradient of a parameter has no padding, whatever the length."""

from __future__ import annotations

from amp_ir.padding.padded_call import Leak, PaddedCall, PaddedTensor, rule_for


@rule_for(
    "amp_ir.all_reduce", "amp_ir.all_reduce_start", "amp_ir.all_reduce_wait", "amp_ir.average",
    "amp_ir.broadcast", "amp_ir.broadcast_start", "amp_ir.broadcast_wait",
    "amp_ir.reduce_scatter_start", "amp_ir.reduce_scatter_wait",
    "amp_ir.all_gather_start", "amp_ir.all_gather_wait",
)  # fmt: skip
def exchange(call: PaddedCall) -> list[PaddedTensor]:
    """Require tensors of one shape on all ranks, whose batches may be padded to others."""
    if any(one.padded for one in call.operands):
        raise Leak("ranks exchange a tensor with a padded axis, which may be longer on another")
    return call.unpadded()
