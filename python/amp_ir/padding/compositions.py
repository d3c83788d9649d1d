# SPDX-License-Identifier: Apache-2.0
"""What holds of compositions of ops, as losses are made of, and intervals do not show.

Each function takes a call and what intervals show of its result, and returns what is known besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from amp_ir.ir.step_graph import Op
from amp_ir.padding import pad_range
from amp_ir.padding.pad_range import ZERO, Range
from amp_ir.padding.padded_call import PaddedCall, PaddedTensor


def refined(call: PaddedCall, made: PaddedTensor) -> PaddedTensor:
    """Return a result with what is known of it by the ops that made its operands."""
    function = _COMPOSITIONS.get(call.op.name)
    return made if function is None else function(call, made)


def _made_by(call: PaddedCall, leaf: int, name: str) -> Op | None:
    """Return the op that makes a tensor where it has this name."""
    op = call.maker(leaf)
    return op if op is not None and op.name == name else None


def _is_number(call: PaddedCall, leaf: int, number: float) -> bool:
    known = call.tensor(leaf)
    return known is not None and known.is_uniform and known.data.constant == number


def _are_same(call: PaddedCall, leaf: int, other: int) -> bool:
    """Return whether two tensors are one, or negatives of one."""
    if leaf == other:
        return True
    ops = [_made_by(call, one, "relax.negative") for one in (leaf, other)]
    return ops[0] is not None and ops[1] is not None and ops[0].reads == ops[1].reads


def _is_finite(call: PaddedCall, leaf: int) -> bool:
    known = call.tensor(leaf)
    return known is not None and known.everything.is_finite


def _maximum_over(call: PaddedCall, leaf: int, source: int, name: str = "relax.max") -> list[int]:
    """Return the axes over which a tensor is the largest of another one's elements; [] for none.

    Those axes have extent 1. Where the largest is infinite it may be another number, as in
    logsumexp.
    """
    shape = list(call.shape(leaf))
    op = call.maker(leaf)
    while op is not None and op.name in _VIEWS:
        op = call.maker(op.reads[0])
    if op is not None and op.name == "relax.where" and _is_infinite(call, *op.reads[::2]):
        op = call.maker(op.reads[2])
    if op is None or op.name != name or op.reads[0] != source:
        return []
    whole, given = list(call.shape(source)), op.call.attrs.axis
    listed = range(len(whole)) if given is None else [given] if isinstance(given, int) else given
    axes = [int(one) % len(whole) for one in listed]
    kept = [1 if k in axes else extent for k, extent in enumerate(whole)]
    return axes if shape == kept else []


def _difference(call: PaddedCall, made: PaddedTensor) -> PaddedTensor:
    """Know of a - max(a, b) and of a - max(a, axis) that it is not above 0.

    Where a mask hides a, it is far below: as in the rule of the maximum, some data are not hidden.
    """
    a, b = call.op.reads
    source = call.operands[0]
    if _is_logsumexp(call, b, a):
        return made.known_as(lambda one: one if one.has_nan else _not_above_0(one))
    largest, axes = _made_by(call, b, "relax.maximum"), _maximum_over(call, b, a)
    is_one = axes or (largest is not None and a in largest.reads)
    if not is_one or source.everything.has_nan or source.everything.has_plus_inf:
        return made
    made = made.known_as(lambda one: one if one.has_nan else _not_above_0(one))
    return _hidden(made, source, axes, _far_below)


def _far_below(pad: Range, hidden: Range) -> Range:
    """Return the range of hidden numbers less one that is not: -inf, or far below 0."""
    is_inf = hidden.constant == -math.inf
    return hidden if is_inf else attrs.evolve(pad, is_offset=not pad.has_nan)


def _not_above_0(known: Range) -> Range:
    return attrs.evolve(known, high=min(known.high, 0.0), has_plus_inf=False)


def _hidden(
    made: PaddedTensor,
    source: PaddedTensor,
    axes: list[int],
    known: Callable[[Range, Range], Range],
) -> PaddedTensor:
    """Return a tensor with what is known of it where the source's padding of axes is hidden."""
    if len(source.axes) != len(made.axes):
        return made
    found = list(made.axes)
    for k in axes:
        rest = [one for i, axis in enumerate(made.axes) if i != k for one in axis]
        found[k] = tuple(
            attrs.evolve(
                one.with_pad(known(one.pad, own.pad)),
                is_open=any(other.is_padded for other in rest),
            )
            if one.is_padded and own.pad.is_hidden
            else one
            for one, own in zip(made.axes[k], source.axes[k], strict=True)
        )
    return made.with_axes(found)


def _is_logsumexp(call: PaddedCall, leaf: int, source: int) -> bool:
    """Return whether a tensor is log(sum(e^(x - max(x)))) + max(x) of a finite tensor x."""
    op = call.maker(_without_views(call, leaf))
    if op is None or op.name != "relax.add":
        return False
    for one, other in (op.reads, op.reads[::-1]):
        log = _made_by(call, one, "relax.log")
        total = None if log is None else call.maker(_without_views(call, log.reads[0]))
        if total is None or not _is_sum_of_powers(call, total):
            continue
        power = call.maker(total.reads[0])
        difference = None if power is None else call.maker(power.reads[0])
        if difference is None or difference.reads[0] != source:
            continue
        largest = difference.reads[1]
        is_same = _without_views(call, other) == _without_views(call, largest)
        if is_same and call.shape(leaf) == call.shape(largest):
            return True
    return False


def _without_views(call: PaddedCall, leaf: int) -> int:
    op = call.maker(leaf)
    while op is not None and op.name in _VIEWS:
        leaf = op.reads[0]
        op = call.maker(leaf)
    return leaf


def _is_infinite(call: PaddedCall, condition: int, leaf: int) -> bool:
    """Return whether a condition is that a tensor is infinite."""
    op = call.maker(condition)
    if op is None or op.name != "relax.equal":
        return op is not None and op.name == "relax.isinf" and op.reads[0] == leaf
    size = _made_by(call, op.reads[0], "relax.abs")
    is_of_it = size is not None and size.reads[0] == leaf
    return is_of_it and _is_number(call, op.reads[1], math.inf)


def _choice(call: PaddedCall, made: PaddedTensor) -> PaddedTensor:
    """Know of a choice what its condition says of a branch."""
    condition, number, other = call.op.reads
    if _is_infinite(call, condition, other) and call.operands[1].everything.is_finite:
        return made.known_as(lambda one: one if one.has_nan else pad_range.known_finite(one))
    if _is_number(call, number, 0.0) and _is_product_with_log(call, condition, other):
        # t log(t) is at least -1 / e, and 0 at 0.
        return made.known_as(lambda _: Range(-0.5))
    if call.operands[1].everything.is_finite and _is_quotient(call, condition, other):
        return made.known_as(pad_range.known_finite)
    return made


def _is_quotient(call: PaddedCall, condition: int, leaf: int) -> bool:
    """Return whether a tensor is x / t of finite x and t, and a condition is t == 0."""
    quotient, is_zero = (
        _made_by(call, leaf, "relax.divide"),
        _made_by(call, condition, "relax.equal"),
    )
    if quotient is None or is_zero is None or not _is_number(call, is_zero.reads[1], 0.0):
        return False
    x, t = quotient.reads
    return t == is_zero.reads[0] and _is_finite(call, x) and _is_finite(call, t)


def _is_product_with_log(call: PaddedCall, condition: int, leaf: int) -> bool:
    """Return whether a tensor is t * log(t) of finite t from 0 on, and a condition is t == 0."""
    product, is_zero = (
        _made_by(call, leaf, "relax.multiply"),
        _made_by(call, condition, "relax.equal"),
    )
    if product is None or is_zero is None or not _is_number(call, is_zero.reads[1], 0.0):
        return False
    t = is_zero.reads[0]
    makers = [_made_by(call, one, "relax.log") for one in product.reads if one != t]
    known = call.tensor(t)
    return (
        len(makers) == 1
        and makers[0] is not None
        and makers[0].reads[0] == t
        and known is not None
        and known.everything.is_finite
        and known.everything.low >= 0.0
    )


def _logarithm(call: PaddedCall, made: PaddedTensor) -> PaddedTensor:
    """Know of the logarithm of a sum of powers of which one is 1 that it is not below 0."""
    total = call.maker(call.op.reads[0])
    while total is not None and total.name in _VIEWS:
        total = call.maker(total.reads[0])
    if total is None or not (_is_softplus(call, total) or _is_sum_of_powers(call, total)):
        return made
    return made.known_as(lambda _: Range(0.0))


def _is_softplus(call: PaddedCall, total: Op) -> bool:
    """Return whether a sum is e^-m + e^(a - m) with m = max(a, 0), of finite a."""
    powers = [_made_by(call, one, "relax.exp") for one in total.reads]
    if total.name != "relax.add" or powers[0] is None or powers[1] is None:
        return False
    exponents = powers[0].reads[0], powers[1].reads[0]
    for one, other in (exponents, exponents[::-1]):
        negative = _made_by(call, one, "relax.negative")
        difference = _made_by(call, other, "relax.subtract")
        if negative is None or difference is None or negative.reads[0] != difference.reads[1]:
            continue
        a, m = difference.reads
        largest = _made_by(call, m, "relax.maximum")
        if largest is None or not _is_finite(call, a):
            continue
        pairs = (largest.reads, largest.reads[::-1])
        if any(_are_same(call, x, a) and _is_number(call, zero, 0.0) for x, zero in pairs):
            return True
    return False


def _is_sum_of_powers(call: PaddedCall, total: Op) -> bool:
    """Return whether a sum is that of e^(x - max(x)) over the axes of the maximum, of finite x."""
    power = _made_by(call, total.reads[0], "relax.exp")
    difference = None if power is None else _made_by(call, power.reads[0], "relax.subtract")
    if total.name != "relax.sum" or difference is None:
        return False
    x, largest = difference.reads
    axes, given = _maximum_over(call, largest, x), total.call.attrs.axis
    listed = [given] if isinstance(given, int) else given
    same = given is not None and sorted(int(k) % len(call.shape(x)) for k in listed) == sorted(axes)
    return bool(axes) and same and _is_finite(call, x)


def _sum(call: PaddedCall, made: PaddedTensor) -> PaddedTensor:
    """Know a + (max(a, c) - a), as a clamp without a gradient is written, for a from 0 on."""
    for a, rest in (call.op.reads, call.op.reads[::-1]):
        least = _least_of_clamp(call, a, rest)
        if least > 0.0:
            # Rounded, the sum is c less a few units in the last place where a is below c.
            return made.known_as(lambda one, least=least: attrs.evolve(one, low=least / 2))  # type: ignore[misc]
    return made


def _least_of_clamp(call: PaddedCall, a: int, rest: int) -> float:
    """Return c where `rest` is max(a, c) - a, and a is finite and from 0 on; 0 where it is not."""
    difference = _made_by(call, rest, "relax.subtract")
    if difference is None or difference.reads[1] != a:
        return 0.0
    largest, known = _made_by(call, difference.reads[0], "relax.maximum"), call.tensor(a)
    if largest is None or a not in largest.reads or known is None:
        return 0.0
    (least, *_) = [call.tensor(one) for one in largest.reads if one != a] or [None]
    is_fit = known.everything.is_finite and known.everything.low >= 0.0
    return (
        (least.data.constant or 0.0) if is_fit and least is not None and least.is_uniform else 0.0
    )


def _equality(call: PaddedCall, made: PaddedTensor) -> PaddedTensor:
    """Know of x == max(x, axis) that it does not hold where a mask hides x.

    As in the rule of the maximum, some data are not hidden. So too of the minimum.
    """
    for x, other in (call.op.reads, call.op.reads[::-1]):
        source = call.tensor(x)
        if source is None:
            continue
        for name, known in (
            ("relax.max", source),
            ("relax.min", source.known_as(pad_range.negative)),
        ):
            axes = _maximum_over(call, other, x, name)
            if axes:
                return _hidden(made, known, axes, lambda _pad, _hidden: ZERO)
    return made


def _test(call: PaddedCall, made: PaddedTensor) -> PaddedTensor:
    """Know of tests for infinities and NaN what they say of finite padding."""
    (x,) = call.operands
    known = pad_range.constant(1.0) if call.op.name == "relax.isfinite" else ZERO
    axes = [
        tuple(
            one.with_pad(known) if own.pad.is_finite else one
            for one, own in zip(axis, own_axis, strict=True)
        )
        for axis, own_axis in zip(made.axes, x.axes, strict=True)
    ]
    return made.with_axes(axes)


_VIEWS = ("relax.reshape", "relax.expand_dims", "relax.squeeze")
_COMPOSITIONS: dict[str, Callable[[PaddedCall, PaddedTensor], PaddedTensor]] = {
    "relax.subtract": _difference,
    "relax.where": _choice,
    "relax.log": _logarithm,
    "relax.add": _sum,
    "relax.equal": _equality,
    **dict.fromkeys(("relax.isnan", "relax.isinf", "relax.isfinite"), _test),
}
