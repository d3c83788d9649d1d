# SPDX-License-Identifier: Apache-2.0
"""The index checks of a compiled step: those made on the host, and those the step reports."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from tvm import relax

from amp_ir.errors import IndexOutOfRangeError, RankFailedError, SequenceLengthError
from amp_ir.ir.dataflow import op_name
from amp_ir.ir.index_check import IndexCheck, error_of
from amp_ir.ir.interpreter import evaluate
from amp_ir.ir.static_shape import shape_of

# Each element of the result is one of the argument's, and none is lost.
SAME_VALUES = ("relax.reshape", "relax.permute_dims", "relax.broadcast_to", "relax.flip")
# Each element of the result is one of the argument's.
_MOVES = (*SAME_VALUES, "relax.strided_slice")


@attrs.frozen(eq=False)
class HostCheck:
    """A check of indices among the inputs, made before the step.

    `names` and `positions` are those inputs; `bindings` compute `ids` from `parameters`, which
    stand for them. Without bindings `ids` is the one parameter. `is_of_state`: none of them is of
    the batch.
    """

    check: IndexCheck
    names: tuple[str, ...]
    positions: tuple[int, ...]
    parameters: tuple[relax.Var, ...]
    bindings: Sequence[relax.Binding]
    ids: relax.Var
    is_of_state: bool = False
    # What passed last: buffers of positions stay as they are, and comparing is quicker.
    _passed: list[torch.Tensor] = attrs.field(factory=list, init=False, repr=False)

    def error(self, inputs: Sequence[Any]) -> str | None:
        """Describe what is wrong with the inputs, all of the step's; None where nothing is."""
        given = [inputs[position] for position in self.positions]
        if self._passed and all(map(torch.equal, given, self._passed)):
            return None
        indices = given[0]
        if self._moved_from is not None:
            indices = torch.take(indices, self._moved_from)
        elif self.bindings:
            values = dict(zip(self.parameters, given, strict=True))
            try:
                indices = evaluate(self.ids, self.bindings, values)
            except (IndexOutOfRangeError, SequenceLengthError):
                # Looked up by an index that is itself out of range, as its own check says.
                return None
        wrong = self.check.wrong_value(self.check.extremes_of(indices))
        if wrong is None:
            if self.is_of_state:
                self._passed[:] = [one.clone() for one in given]
            return None
        names = " and ".join(self.names)
        subject = (
            f"an index computed from {names} is" if self.bindings else f"{names} holds the index"
        )
        return self.check.describe(subject, wrong)

    @functools.cached_property
    def _moved_from(self) -> torch.Tensor | None:
        """The positions in the one input that `ids` are moved from, flat; None where it computes.

        To read these takes 15 microseconds where to evaluate a slice takes 170, in each step.
        """
        if not self.bindings or any(op_name(one.value) not in _MOVES for one in self.bindings):
            return None
        (parameter,) = self.parameters
        shape, dtype = shape_of(parameter), str(parameter.ty.dtype)
        if dtype not in ("int32", "int64"):
            return None  # its numbers may be too few for the positions
        every = torch.arange(math.prod(shape), dtype=getattr(torch, dtype)).reshape(shape)
        return evaluate(self.ids, self.bindings, {parameter: every}).flatten().long()


@attrs.frozen
class PlannedChecks:
    """All checks of a step: before it on the host, and those whose extremes it returns."""

    on_host: tuple[HostCheck, ...] = attrs.field(default=(), eq=False)
    in_step: tuple[IndexCheck, ...] = ()

    def check_inputs(self, inputs: Sequence[Any]) -> None:
        """Refuse inputs (all of the step's, in order) with indices out of range.

        Raises:
            IndexOutOfRangeError: names every such input, the index, what was expected, and the op.
            DivisionByZeroError: an integer divisor holds 0.
            SequenceLengthError: lengths of sequences are not what the step takes.
        """
        errors = [
            (one.check, error) for one in self.on_host if (error := one.error(inputs)) is not None
        ]
        if errors:
            what = "; ".join(dict.fromkeys(error for _, error in errors))
            message = f"{what}. Nothing was run and nothing has changed"
            raise error_of([check for check, _ in errors], message)

    def check_extremes(self, extremes: torch.Tensor) -> None:
        """Raise the error for what a step has found: `extremes` int64[2 * checks], on the host.

        A step of several ranks has one more number: on how many of them an index is out of range.

        Raises:
            IndexOutOfRangeError: the step used an index out of range, and was rolled back.
            DivisionByZeroError: it divided an integer by 0, and was rolled back.
            SequenceLengthError: it computed such lengths, and was rolled back.
            RankFailedError: another rank found that; all have rolled back.
        """
        numbers, count = extremes.tolist(), len(self.in_step)
        pairs = zip(numbers[:count], numbers[count : 2 * count], strict=True)
        errors = [
            (check, check.describe("the step computed the index", wrong))
            for check, pair in zip(self.in_step, pairs, strict=True)
            if (wrong := check.wrong_value(pair)) is not None
        ]
        if errors:
            what = "; ".join(dict.fromkeys(error for _, error in errors))
            message = f"{what}. The step was rolled back: nothing has changed"
            raise error_of([check for check, _ in errors], message)
        if any(numbers[2 * count :]):
            raise RankFailedError(
                "another rank's step computed a number that its checks refuse, as an index out of "
                "range; its error says which. The step was rolled back on all ranks: nothing has "
                "changed, and they may go on together"
            )
