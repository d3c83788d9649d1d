# SPDX-License-Identifier: Apache-2.0
"""The `amp_ir.*` ops; importing this package registers all of them.

One file per family. `registry.DECLARATIONS` lists every op; `registry.call_op` builds a call.
"""

from amp_ir.dialect import (
    activations,
    attention,
    attention_parts,
    cast,
    channel_normalization,
    collectives,
    convolution,
    embedding,
    external_call,
    indexing,
    lengths,
    loop,
    loss_scale,
    losses,
    normalization,
    pooling,
    random,
    recurrence,
    softmax,
)
from amp_ir.dialect.registry import DECLARATIONS, Declaration, call_op, options_of

__all__ = [
    "DECLARATIONS",
    "Declaration",
    "activations",
    "attention",
    "attention_parts",
    "call_op",
    "cast",
    "channel_normalization",
    "collectives",
    "convolution",
    "embedding",
    "external_call",
    "indexing",
    "lengths",
    "loop",
    "loss_scale",
    "losses",
    "normalization",
    "options_of",
    "pooling",
    "random",
    "recurrence",
    "softmax",
]
