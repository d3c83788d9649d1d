# SPDX-License-Identifier: Apache-2.0
"""Padding rules of LSTM, GRU and plain RNN: tensors are [time, rows, width], or [rows, width].

Rows are computed each by itself. Forward in time padding comes after all data, so that no step of
data sees it; back in time the gradient of padding is 0, and what is carried to data stays 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from amp_ir.dialect.registry import options_of
from amp_ir.padding import pad_range
from amp_ir.padding.axes import Axis, Limit, Pair, plain
from amp_ir.padding.pad_range import ANY, FINITE, ZERO, Range
from amp_ir.padding.padded_call import (
    Leak,
    PaddedCall,
    PaddedTensor,
    aligned,
    require_data,
    rule_for,
)


@rule_for("amp_ir.checked_lengths")
def checked_lengths(call: PaddedCall) -> PaddedTensor:
    """Return lengths of packed sequences, which are 1 or more and at most that of the data."""
    lengths, checked = call.operands
    least, extent = (_limits(call, name) for name in ("least", "extent"))
    if least[0] != least[1]:
        raise Leak(
            "pad_packed_sequence makes as many steps as the longest sequence has; pass "
            "total_length=, the number of steps that pack_padded_sequence was given"
        )
    is_own = call.op.reads[0] == call.op.reads[1]
    for one in checked.padded:
        if one.pad.low < least[0] or one.pad.high >= min(extent):
            raise Leak(
                f"lengths are checked, and their padding over {one.name} may not be in "
                f"{least[0]} to {min(extent) - 1}: give pad= such a number for the lengths"
            )
    if extent[0] == extent[1]:
        return lengths
    limit = next(
        (
            Limit(one, extent[0] - one.size)
            for one in call.dimensions
            if extent[0] - extent[1] == one.size - one.other_size
        ),
        None,
    )
    if limit is None or not call.are_inside(1, limit, least[0]):
        raise Leak("lengths are checked, and do not come from the batch alone")
    if not is_own:
        return lengths
    data = attrs.evolve(lengths.data, low=max(lengths.data.low, float(least[0])))
    return attrs.evolve(lengths, data=data, limit=limit)


def _limits(call: PaddedCall, name: str) -> Pair:
    return int(options_of(call.op.call)[name]), int(options_of(call.other.call)[name])


@rule_for("amp_ir.lstm", "amp_ir.gru", "amp_ir.rnn_tanh", "amp_ir.rnn_relu")
def recurrence(call: PaddedCall) -> list[PaddedTensor]:
    """Run all steps. The states have one entry more than time: the first is data."""
    steps, weight, *rest = call.operands
    weights = [weight, *rest[:1]] if "gru" in call.op.name else [weight]
    first = rest[len(weights) - 1 :]
    time, rows = _time_and_rows(call, [steps], first, weights)
    if time and "relu" in call.op.name:
        raise Leak(f"states may grow without bound over {time[0].name}")
    gates, *others = (one.everything for one in call.operands)
    if call.op.name == "amp_ir.lstm" and not gates.has_nan:
        # Infinite ones open a gate or close it, as past the end of a packed sequence.
        gates = FINITE
    pad = pad_range.finite_of(gates, *others)
    # States, and an LSTM's cells.
    longer = 2 if call.op.name == "amp_ir.lstm" else 1
    return [
        _result(call, k, (_longer(time) if k < longer else time, rows), pad, pad)
        for k in range(len(call.result_sizes))
    ]


@rule_for(
    "amp_ir.lstm_backward",
    "amp_ir.gru_backward",
    "amp_ir.rnn_tanh_backward",
    "amp_ir.rnn_relu_backward",
)
def recurrence_backward(call: PaddedCall) -> list[PaddedTensor]:
    """Apply a form that is linear in the gradients, back in time."""
    count = 3 if "lstm" in call.op.name else 2
    grad, *last = call.operands[:count]
    *steps, weight = call.operands[count:]
    time, rows = _time_and_rows(call, [grad, *steps[:-1]], last, [weight], steps[-1])
    is_finite = _finite(call.operands).is_finite
    for factor in time:
        is_zero = factor.pad.is_zero and all(one.everything.is_zero for one in last)
        if not (is_zero and is_finite):
            raise Leak(f"gradients are carried from the padding of {factor.name} to data")
    has_zeros = is_finite and all(_is_zero_row(one, len(one.axes) - 2) for one in (grad, *last))
    pad = ZERO if has_zeros else FINITE if is_finite else ANY
    return [
        _result(call, k, (time, rows) if len(sizes) == 3 else (rows,), ZERO, pad)
        for k, sizes in enumerate(call.result_sizes)
    ]


def _is_zero_row(tensor: PaddedTensor, axis: int) -> bool:
    return tensor.is_uniform or all(one.pad.is_zero for one in tensor.axes[axis] if one.is_padded)


def _finite(tensors: Sequence[PaddedTensor]) -> Range:
    return pad_range.finite_of(*(one.everything for one in tensors))


def _time_and_rows(
    call: PaddedCall,
    sequences: Sequence[PaddedTensor],
    vectors: Sequence[PaddedTensor],
    weights: Sequence[PaddedTensor],
    states: PaddedTensor | None = None,
) -> tuple[Axis, Axis]:
    """Return the padded factors of time, and the rows, of [time, rows, width] and [rows, width].

    `states` have one entry more than the time.

    Raises:
        Leak: they are padded differently, or in a way that reaches data.
    """
    for one in weights:
        require_data(one, range(len(one.axes)), "each row is computed with all of")
    everything = [*sequences, *vectors, *([] if states is None else [states])]
    for one in everything:
        require_data(one, [-1], "each step adds products over")
        if any(factor.is_open for factor in one.factors):
            raise Leak("a tensor that is masked where two axes are padding runs through time")
    aligned([PaddedTensor(one.axes[-2:-1], one.data, one.dtype) for one in everything])
    aligned([PaddedTensor(one.axes[:1], one.data, one.dtype) for one in sequences])
    time, rows = sequences[0].axes[:2]
    if any(one.is_padded for one in time):
        if bool(call.option("reverse")):
            raise Leak(f"time runs backwards over {_padded_name(time)}, padding first")
        if len(time) != 1 or time[0].dimension is None:
            raise Leak(f"time is an axis into which {_padded_name(time)} is merged")
        if states is not None:
            aligned(
                [
                    PaddedTensor((axis,), FINITE, "float32")
                    for axis in (_longer(time), states.axes[0])
                ]
            )
        return time, rows
    return (), rows


def _padded_name(axis: Axis) -> str:
    return next(one.name for one in axis if one.is_padded)


def _longer(time: Axis) -> Axis:
    return tuple(
        attrs.evolve(
            one, size=one.size + 1, other_size=one.other_size + 1, shift=one.shift + 1, pad=FINITE
        )
        for one in time
    )


def _result(
    call: PaddedCall, position: int, axes: Sequence[Axis], of_time: Range, of_rows: Range
) -> PaddedTensor:
    """Return a result with these time and rows; time () is not padded."""
    sizes = call.result_sizes[position]
    made: list[Axis] = []
    for k, (axis, (size, _)) in enumerate(zip(axes, sizes, strict=False)):
        pad = of_time if len(axes) == 2 and k == 0 else of_rows
        made.append(tuple(one.with_pad(pad) for one in axis) if axis else plain(size))
    return call.result([*made, plain(sizes[-1][0])], FINITE, position)
