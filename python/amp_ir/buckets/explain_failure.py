# SPDX-License-Identifier: Apache-2.0
"""Errors of steps that cannot be captured with the sizes of buckets, in terms of `buckets=`."""

from __future__ import annotations

from collections.abc import Callable

from amp_ir.buckets.bucket_options import BucketOptions
from amp_ir.buckets.chosen_sizes import ChosenSizes
from amp_ir.buckets.padded_batch import PaddedBatch
from amp_ir.errors import CaptureError, IndexOutOfRangeError


def explained(
    options: BucketOptions,
    batch: PaddedBatch,
    error: Exception,
    trace_unpadded: Callable[[], object],
) -> Exception:
    """Return the error of a padded batch; that of the batch alone where it fails alone too.

    `trace_unpadded` captures the step on the batch as the user passed it.
    """
    if not isinstance(error, (CaptureError, IndexOutOfRangeError)) or not batch.padded_dimensions:
        return error
    try:
        trace_unpadded()
    except Exception as own:  # whatever it is, it is the step's, and not that of a size
        return own
    sizes = " and ".join(
        f"{batch.sizes[name]} for {name}, which has {batch.lengths[name]} entries"
        for name in batch.sizes
        if name in batch.padded_dimensions
    )
    what_to_do = hint_of_sizes(options, batch) or (
        "If the step has a largest length, as a table of positions does, give buckets= no larger "
        "size"
    )
    failure = error.failure if isinstance(error, CaptureError) else ""
    return type(error)(
        f"the step can be captured on this batch, but not padded to its bucket ({sizes}): "
        f"{failure or error}. {what_to_do}"
    )


def explained_index(batch: PaddedBatch, error: IndexOutOfRangeError) -> IndexOutOfRangeError:
    """Return the error of a padded batch; it says so where the index is a number of `pad=`."""
    named = [
        f"pad= fills {name} with {number}"
        for name, number in batch.filled_integers
        if f"the index {number}," in str(error)
    ]
    if not named:
        return error
    return IndexOutOfRangeError(
        f"{error}. {' and '.join(named)}: give it an index that there is, such as 0"
    )


def hint_of_sizes(options: BucketOptions, batch: PaddedBatch) -> str:
    """Return what is missing in `buckets=`: axes, or the same sizes for axes of one length."""
    return not_padded(options, batch) or _sized_apart(batch)


def _sized_apart(batch: PaddedBatch) -> str:
    """Return which axes have one length and are padded to other sizes; or ""."""
    by_length: dict[int, list[str]] = {}
    for name, length in batch.lengths.items():
        by_length.setdefault(length, []).append(name)
    lines = [
        f"{' and '.join(names)} have {length} entries each and are padded to "
        f"{' and '.join(str(batch.sizes[name]) for name in names)}: if they are one dimension, "
        "give them the same sizes in buckets="
        for length, names in by_length.items()
        if len({batch.sizes[name] for name in names}) > 1
    ]
    return ". ".join(one[0].upper() + one[1:] for one in lines)


def not_padded(options: BucketOptions, batch: PaddedBatch) -> str:
    """Return which axes are as long as padded ones and not padded, and how to add them; or ""."""
    lines = []
    for path, axis, length, given in batch.unpadded_axes():
        key = options.best_key(path)
        name = f"argument {key}" if isinstance(key, int) else key
        sizes = '"auto"' if isinstance(given, ChosenSizes) else repr(given)
        lines.append(
            f"axis {axis} of {name} has {length} entries too, and buckets= does not pad it: if it "
            f"is the same dimension, add {key!r}: {{{axis}: {sizes}}} to buckets=, and for {key!r} "
            "a number to pad=, such as 0 for a mask or -100 for labels"
        )
    return ". ".join(one[0].upper() + one[1:] for one in lines)
