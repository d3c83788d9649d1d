# SPDX-License-Identifier: Apache-2.0
"""The buckets of one jitted step: padded calls, and what was proven of each program."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import torch

from amp_ir.buckets.bucket_options import BucketOptions
from amp_ir.buckets.explain_failure import explained, explained_index, hint_of_sizes
from amp_ir.buckets.padded_batch import PaddedBatch, padded_examples
from amp_ir.capture.batch import structures_of
from amp_ir.capture.containers import leaves_of
from amp_ir.errors import CaptureError, IndexOutOfRangeError, PaddingError
from amp_ir.ir.step_module import StepModule
from amp_ir.padding.axes import Dimension
from amp_ir.padding.check_padding import check_padding
from amp_ir.padding.compare_values import compare_padding
from amp_ir.padding.inert_padding import InertPadding

log = logging.getLogger("amp_ir")

Trace = Callable[[tuple[Any, ...]], StepModule]


@attrs.frozen(eq=False)
class PaddedProgram:
    """What was proven of a program: `places` are the outputs that its results' leaves are."""

    padding: InertPadding
    places: tuple[int | None, ...]


class BucketedCalls:
    """Pads batches, and proves once for each program that this changes nothing.

    Programs are any objects that live as long as they may be called.
    """

    def __init__(self, options: BucketOptions) -> None:
        self._options = options
        self._proven: weakref.WeakKeyDictionary[Any, dict[Any, PaddedProgram]]
        self._proven = weakref.WeakKeyDictionary()
        self._has_warned = False
        self._has_warned_of_numbers = False

    def examples(self, batches: Any) -> Any:
        """Return `precompile=` padded; what fits no bucket, or is no batch, as it is."""
        return padded_examples(self._options, batches)

    def padded(self, args: tuple[Any, ...]) -> PaddedBatch | None:
        """Return the padded arguments of a call; None where one is longer than every bucket.

        None too as long as no axis is known to vary, where that is found while steps run.

        Raises:
            ArgumentError: `buckets=` names no tensor of the call, or one without that axis.
        """
        batch = PaddedBatch.of(self._options, args)
        if isinstance(batch, PaddedBatch):
            return batch if batch.sizes else None
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s. It has a program of its own. Said once", batch)
        return None

    def prove(self, step: StepModule, trace: Trace, batch: PaddedBatch) -> PaddedProgram:
        """Prove that the padding of a captured step is inert; `trace` captures it again.

        Raises:
            PaddingError: it may change the results or the state.
        """
        results = structures_of(step.signature)[1]
        if self._options.check == "values":
            exact = trace(batch.exact_args)
            _refuse_plain_values(step, exact)
        dimensions, other = self._with_other_sizes(trace, batch)
        _refuse_plain_values(step, other)
        if self._options.check == "proof":
            return PaddedProgram(
                _inert_padding(step, trace, batch, dimensions, other), results.places
            )
        lengths = [(one, batch.lengths[name]) for name, one in dimensions.items()]
        tensors = _tensors(batch.args), _tensors(batch.exact_args)
        padding = compare_padding(step, exact, other, *tensors, lengths)
        return PaddedProgram(padding.for_lengths_from(dimensions.values()), results.places)

    def is_proven_for(self, batch: PaddedBatch, proven: PaddedProgram) -> bool:
        """Return whether what was proven of a program holds for a batch; warn once of its numbers.

        It does not where the step reads more of the data than there is: that would be padding.
        """
        if not batch.is_long_enough(proven.padding):
            return False
        unmet = batch.unmet(proven.padding)
        if unmet is not None and not self._has_warned_of_numbers:
            self._has_warned_of_numbers = True
            log.warning(
                "a batch of %s runs unpadded, by a program of its own: it has numbers for %s that "
                "would reach padding, %s. Said once",
                batch.lengths_text(),
                unmet.reader,
                unmet.expectation,
            )
        return unmet is None

    def pads_less(self, batch: PaddedBatch, error: Exception) -> bool:
        """Return whether the batch is to be padded again, to smaller sizes or in fewer axes.

        So it is where amp_ir chose them: sizes that the step cannot have, such as more than a table
        of positions has, and axes in which padding is not inert.
        """
        if not isinstance(error, PaddingError):
            shorter = batch.shorten()
            if shorter is not None:
                log.info("%s, where the step fails: %s", shorter, error)
            return shorter is not None
        if not self._options.is_auto:
            return False
        names = self._options.leave_out(batch.exact_args)
        log.warning(
            "%s is not padded: batches that differ there have programs of their own. Said once. %s",
            names,
            error,
        )
        return True

    def explained(self, batch: PaddedBatch, error: Exception, trace: Trace) -> Exception:
        """Return the error of a padded batch, in terms of `buckets=` where its size is the cause.

        `trace` captures the step again.
        """
        return explained(self._options, batch, error, lambda: trace(batch.exact_args))

    def explained_index(
        self, batch: PaddedBatch, error: IndexOutOfRangeError
    ) -> IndexOutOfRangeError:
        """Return the error of a padded batch, in terms of `pad=` where its number is the index."""
        return explained_index(batch, error)

    def needs_proof(self, batch: PaddedBatch) -> bool:
        """Return whether a program for this batch is to be proven now.

        Numbers can only be compared where there is padding.
        """
        return bool(batch.padded_dimensions) or self._options.check == "proof"

    def add(self, program: object, batch: PaddedBatch, proven: PaddedProgram) -> None:
        """Keep what was proven of a program, for batches with the same padded dimensions."""
        self._proven.setdefault(program, {})[self._key(batch)] = proven

    def add_step(self, batch: PaddedBatch, seconds: float, compile_seconds: float) -> None:
        """Note how long a step took, where sizes are chosen from that."""
        for name, sizes in batch.chosen.items():
            size, length = batch.sizes[name], batch.lengths[name]
            sizes.add_step(size, length, seconds, compile_seconds)

    def known(self, program: object, batch: PaddedBatch) -> PaddedProgram | None:
        """Return what was proven of a program for batches with the same padded dimensions."""
        return self._proven.get(program, {}).get(self._key(batch))

    def _with_other_sizes(
        self, trace: Trace, batch: PaddedBatch
    ) -> tuple[dict[str, Dimension], StepModule]:
        """Capture with the second sizes: the shortest ones with which the step can be captured.

        Raises:
            PaddingError: neither can be captured.
        """
        for offset in batch.offsets():
            dimensions = batch.dimensions(offset)
            try:
                return dimensions, trace(batch.example(dimensions))
            except CaptureError as error:
                failure = error
        tried = ", ".join(f"{one.other_size} for {name}" for name, one in dimensions.items())
        why = hint_of_sizes(self._options, batch) or (
            "Tensors that are used together need one length in each call, which is here "
            f"{batch.lengths_text()}"
        )
        raise PaddingError(
            f"the step cannot be captured with other lengths ({tried}), so that nothing can be "
            f"proven of its padding: {failure.failure or failure}. {why}"
        ) from failure

    def _key(self, batch: PaddedBatch) -> object:
        """Return what a proof is for: numbers show nothing of dimensions without padding."""
        is_proof = self._options.check == "proof"
        return batch.places, None if is_proof else batch.padded_dimensions


def _inert_padding(
    step: StepModule,
    trace: Trace,
    batch: PaddedBatch,
    dimensions: dict[str, Dimension],
    other: StepModule,
) -> InertPadding:
    """Prove that padding is inert, at another second size where the first one fails.

    Of 2 entries `x[:, :-1]` leaves 1, with which PyTorch computes in other ways.

    Raises:
        PaddingError: it may not be.
    """
    try:
        padding = check_padding(step, other, batch.inputs(dimensions))
    except PaddingError:
        if batch.has_shorter(dimensions):
            # The step may do something else at lengths that this size is not chosen for.
            again = batch.dimensions(only_served=True)
        elif any(one.other_size == 2 for one in dimensions.values()):
            again = batch.dimensions(shortest=3)
        else:
            raise
        found = _proven_or_none(step, trace, batch, again)
        if found is None:
            raise
        padding, dimensions = found, again
    return padding.for_lengths_from(dimensions.values())


def _proven_or_none(
    step: StepModule, trace: Trace, batch: PaddedBatch, dimensions: dict[str, Dimension]
) -> InertPadding | None:
    try:
        other = trace(batch.example(dimensions))
        _refuse_plain_values(step, other)
        return check_padding(step, other, batch.inputs(dimensions))
    except (CaptureError, PaddingError):
        return None  # the error of the shortest length says it


def _refuse_plain_values(step: StepModule, other: StepModule) -> None:
    """Refuse a step that returns its length as a plain number, or leaves it in an object.

    Raises:
        PaddingError: it does.
    """
    results, others = structures_of(step.signature)[1], structures_of(other.signature)[1]
    pairs = zip(results.constants, others.constants, strict=False)
    found = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if results.spec != others.spec or found is not None:
        values = "" if found is None else f" ({found[0]!r}, or {found[1]!r})"
        raise PaddingError(
            f"a plain value that the step returns depends on the padded length{values}; return "
            "tensors, or take it from the batch"
        )
    for name, value in step.hooks.left.items():
        other_value = other.hooks.left.get(name, "nothing")
        if value != other_value:
            raise PaddingError(
                f"what the step leaves in {name} depends on the padded length ({value[:60]}, or "
                f"{other_value[:60]}); do not store it in the step, set it before, from the batch"
            )


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [one for one in leaves_of(args) if isinstance(one, torch.Tensor)]
