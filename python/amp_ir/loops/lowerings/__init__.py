# SPDX-License-Identifier: Apache-2.0
"""Ops as loop values, one file an op family."""

from amp_ir.loops.lowerings import (  # noqa: F401  (registers the lowerings)
    activations,
    attention,
    channel_normalization,
    collectives,
    convolution,
    data_movement,
    elementwise,
    embedding,
    gather,
    indexing,
    lengths,
    loss_scale,
    losses,
    matmul,
    normalization,
    ordering,
    pooling,
    random,
    reductions,
)
