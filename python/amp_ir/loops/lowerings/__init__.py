# SPDX-License-Identifier: Apache-2.0
"""Ops as loop values, one file an op family."""

from amp_ir.loops.lowerings import (  # noqa: F401  (registers the lowerings)
    activations,
    attention,
    batch_normalization,
    collectives,
    convolution,
    data_movement,
    elementwise,
    embedding,
    gather,
    group_normalization,
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
