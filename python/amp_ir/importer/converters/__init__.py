# SPDX-License-Identifier: Apache-2.0
"""Converters from ATen overloads to Relax, one file a family; importing this fills the table."""

from amp_ir.importer.converters import (  # noqa: F401  (each registers its converters)
    activations,
    arithmetic,
    attention,
    batch_normalization,
    collectives,
    convolution,
    creation,
    elementwise,
    indexing,
    lengths,
    linear_algebra,
    loss_scale,
    losses,
    normalization,
    ordering,
    padding,
    pooling,
    random,
    recurrence,
    reductions,
    resampling,
    shapes,
    slices,
    softmax,
)
from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.registry import CONVERTERS, ConversionError, converter_of

__all__ = ["CONVERTERS", "Emitter", "ConversionError", "converter_of"]
