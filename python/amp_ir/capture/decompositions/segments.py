# SPDX-License-Identifier: Apache-2.0
"""Sums of rows by segments, whose offsets or lengths the step checks: bags, segment_reduce."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from amp_ir.capture.decompositions.checked_lengths import require_lengths


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,  # noqa: FBT001, FBT002 - torch's own signature
    mode: str = "mean",
    sparse: bool = False,  # noqa: FBT001, FBT002
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,  # noqa: FBT001, FBT002
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Return sums or means of rows of the weight, one per bag.

    The ids are int[bags, n], or int[n] with offsets.
    """
    if offsets is not None and offsets.ndim == input.ndim == 1 and mode != "max":
        offsets = _checked_offsets(offsets, len(input), include_last_offset=include_last_offset)
    is_plain = max_norm is None and not scale_grad_by_freq and not sparse
    if not is_plain or mode not in ("sum", "mean") or (input.ndim == 1) == (offsets is None):
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse,
            per_sample_weights, include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight)
    counted = torch.ones_like(input, dtype=rows.dtype)
    if padding_idx is not None:
        counted = (input != padding_idx % len(weight)).to(rows.dtype)
    shares = counted if per_sample_weights is None else counted * per_sample_weights
    rows = rows * shares.unsqueeze(-1)
    if offsets is None:
        sums, counts = rows.sum(1), counted.sum(1)
    else:
        count = len(offsets) - 1 if include_last_offset else len(offsets)
        bag = _bags(offsets[:count], len(input))
        sums = rows.new_zeros(count, weight.shape[1]).index_add(0, bag, rows)
        counts = rows.new_zeros(count).index_add(0, bag, counted)
    return sums if mode == "sum" else sums / counts.clamp(min=1).unsqueeze(-1)


def _checked_offsets(
    offsets: torch.Tensor, count: int, *, include_last_offset: bool
) -> torch.Tensor:
    """Return the offsets, which the step checks to be those of bags of `count` ids.

    Of others PyTorch refuses most; for some it reads memory past the ids, or its gradient is not
    that of its result. Its maxima are defined for offsets that decrease, too.
    """
    offsets = require_lengths(
        offsets, offsets[:1], 0, 0, "the offsets of embedding_bag begin with 0"
    )
    if include_last_offset:
        last, lengths = offsets[-1:], offsets.diff()
        text = "with include_last_offset=True the last offset of embedding_bag is the number of ids"
        offsets = require_lengths(offsets, last, count, count, f"{text}, {count}")
    else:
        lengths = offsets.diff(append=offsets.new_full((1,), count))
    text = f"offsets of embedding_bag never decrease, and are at most {count}, the number of ids"
    return require_lengths(offsets, lengths, 0, count, f"{text}: no bag is shorter than 0")


def segment_reduce(
    data: torch.Tensor,
    reduce: str,
    *,
    lengths: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Call PyTorch's op with checked offsets or lengths; by others it writes to foreign memory."""
    count = data.shape[axis]
    if offsets is not None:
        text = f"offsets of segment_reduce are 0 to {count}, the extent of the axis"
        offsets = require_lengths(offsets, offsets, 0, count, text)
        text = "offsets of segment_reduce never decrease: no segment is shorter than 0"
        offsets = require_lengths(offsets, offsets.diff(dim=-1), 0, count, text)
    elif lengths is not None:
        text = f"lengths of segment_reduce are 0 to {count}, the extent of the axis"
        lengths = require_lengths(lengths, lengths, 0, count, text)
        least, most = (0, "at most ") if unsafe else (count, "")
        text = f"the sum of lengths of segment_reduce is {most}{count}, the extent of the axis"
        lengths = require_lengths(lengths, lengths.sum(-1), least, count, text)
    return torch.segment_reduce(
        data, reduce, lengths=lengths, offsets=offsets, axis=axis, unsafe=unsafe, **options
    )


def _bags(offsets: torch.Tensor, count: int) -> torch.Tensor:
    """Return the bag of each of `count` ids, int64[count]."""
    # Within these bounds, which hold for checked offsets, the index needs no check.
    later = offsets[1:].clamp(0, count)
    begins = offsets.new_zeros(count + 1).index_add(0, later, torch.ones_like(later))
    return begins.cumsum(0)[:count].long()
