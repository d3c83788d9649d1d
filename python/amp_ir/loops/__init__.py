# SPDX-License-Identifier: Apache-2.0
"""Ops as loops: lowering, grouping into kernels, and the kernels' code.

In the order of use: `ir` (loop values), `lower_*` (ops as loop values), `grouping` (which share a
kernel), `emit_cpu` or `emit_cuda` with `coordinates` and `element_writer` (the kernel's code),
`fuse` (the pass), `horizontal` and `share_kernels` (fewer of them).
"""

from amp_ir.loops import (  # noqa: F401  (registers the lowerings)
    lower_activations,
    lower_attention,
    lower_channel_normalization,
    lower_convolution,
    lower_embedding,
    lower_indexing,
    lower_loss_scale,
    lower_losses,
    lower_matmul,
    lower_normalization,
    lower_ordering,
    lower_pooling,
    lower_random,
    lower_relax,
)
