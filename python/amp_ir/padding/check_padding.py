# SPDX-License-Identifier: Apache-2.0
"""Proof that padding is inert: `check_padding(step, other, ...)`.

A step is captured with two sizes of each padded dimension. Both captures must be one program, and
every tensor of it must be, at its data, the tensor of the step without padding. The rule of each op
(the files beside this one) says what is known of its result's padding, or that padding reaches
data. What holds for every op holds for the state and the results: an abstract interpretation, in
the manner of the loss scale's proof.

Requires: steps as captured, before autocast, whose casts keep 0, -inf and masks.
Ensures:  no error means that data never depend on padding, whatever the lengths are; draws of
          dropout are other ones of the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy
import torch

import amp_ir.padding.class_loss_rules
import amp_ir.padding.collective_rules
import amp_ir.padding.concat_rule
import amp_ir.padding.convolution_rules
import amp_ir.padding.elementwise_rules
import amp_ir.padding.index_rules
import amp_ir.padding.layer_rules
import amp_ir.padding.ordering_rules
import amp_ir.padding.recurrence_rules
import amp_ir.padding.reduction_rules
import amp_ir.padding.sample_rules
import amp_ir.padding.shape_rules
import amp_ir.padding.softmax_rules  # noqa: F401  (register their rules)
from amp_ir.errors import ArgumentError, PaddingError
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.step_graph import Op, StepGraph, read_step
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.padding import pad_range
from amp_ir.padding.axes import Dimension, Limit, Pair, axis_of_sizes, padded, plain, sizes_of
from amp_ir.padding.batch_conditions import RequiredNumbers
from amp_ir.padding.compositions import refined
from amp_ir.padding.inert_padding import InertPadding, PaddedInput, PaddedResult
from amp_ir.padding.leak_text import cause_of, message_of
from amp_ir.padding.limits import lengths_among_constants
from amp_ir.padding.pad_range import FINITE, Range, of_dtype
from amp_ir.padding.padded_call import RULES, Leak, PaddedCall, PaddedTensor
from amp_ir.padding.whole_slices import with_whole_slices

_DIFFERS = "what the step computes depends on the padded length"
# Ops whose rules know of padding in front of data: the gradient of a cumulative sum.
_OF_REVERSED = ("relax.flip", "relax.cumsum")
# Ops that leave numbers in [least, length + past) as they are: by how much past, and the least.
_CLIPS: dict[str, tuple[int, int | None]] = {"relax.minimum": (1, None), "relax.floor_mod": (0, 0)}


def check_padding(
    step: StepModule, other: StepModule, inputs: Sequence[PaddedInput | None]
) -> InertPadding:
    """Prove that the padding of the batch reaches neither the state nor data of the results.

    `other` is the step captured with the other sizes of the dimensions; `inputs` has an entry for
    each tensor of the batch, None for one that is not padded.

    Raises:
        PaddingError: it may; the message lists every op by which it does.
    """
    proof = Proof(step, other, inputs)
    proof.run()
    return proof.conclusion()


class Proof:
    """One walk over the step, in program order; `tensors` says what is known of each value."""

    def __init__(
        self, step: StepModule, other: StepModule, inputs: Sequence[PaddedInput | None]
    ) -> None:
        self.step = step
        flow = Dataflow(with_whole_slices(step.ir, other.ir))
        self.graph = read_step(flow.ir)
        self.other = read_step(with_whole_slices(other.ir, step.ir))
        self.inputs = inputs
        known = {d.name: d for one in inputs if one for d in one.dimensions.values()}
        self.dimensions = list(known.values())
        _check_differences(self.dimensions)
        self.least_sizes = dict.fromkeys(known, 1)
        self.required = RequiredNumbers(flow, self.graph, step.signature)
        # Set once both are known to be one program.
        self.lengths: dict[int, Limit] = {}
        # None: padding has reached the value, which an error says already.
        self.tensors: list[PaddedTensor | None] = [None] * len(self.graph.values)
        # By their phase; those of the backward pass mostly follow from the others.
        self.leaks: dict[str, str] = {}
        self.leaked: list[str | None] = []

    def run(self) -> None:
        """Apply the rule of every op."""
        if not self._are_one_program():
            return
        self.lengths = lengths_among_constants(self.graph, self.other, self.dimensions)
        self._put_inputs()
        for leaf in range(len(self.graph.values)):
            if self.graph.values[leaf].is_constant:
                self.tensors[leaf] = self._constant(leaf)
        for op, other in zip(self.graph.ops, self.other.ops, strict=True):
            self._apply(op, other)

    def conclusion(self) -> InertPadding:
        """Return what was proven.

        Raises:
            PaddingError: nothing was.
        """
        if self.leaks:
            raise PaddingError(message_of(self.leaks))
        results = []
        for leaf, spec in zip(self.graph.outputs, self.step.signature.outputs, strict=True):
            tensor = self.tensors[leaf]
            if tensor is None:
                self._leak(f"{spec.name} depends on the padded length")
            elif spec.role is Role.RESULT:
                results.append(self._result(tensor))
            elif tensor.padded:
                self._leak(f"{spec.name}, which is kept for the next step, has a padded axis")
        if self.leaks:
            raise PaddingError(message_of(self.leaks))
        return InertPadding(
            tuple(results), self.least_sizes, tuple(self.required.conditions.values())
        )

    def _result(self, tensor: PaddedTensor) -> tuple[PaddedResult, ...]:
        found = []
        for k, axis in enumerate(tensor.axes):
            for one in axis:
                if not one.is_padded:
                    continue
                if one.dimension is None or one.is_reversed:
                    self._leak("a result of the step follows the padded length in an unknown way")
                    continue
                if len(axis) > 1:
                    self._leak(
                        f"a result of the step has {one.dimension.name} merged with another axis, "
                        "so that its data cannot be sliced out. Return it before it is flattened"
                    )
                found.append(PaddedResult(k, one.dimension, one.shift))
        return tuple(found)

    def _are_one_program(self) -> bool:
        """Return whether both captures have the same ops in the same order."""
        pairs = zip(self.graph.ops, self.other.ops, strict=False)
        for op, other in pairs:
            if (op.name, op.reads) != (other.name, other.reads):
                self._leak(f"{_DIFFERS} ({self._sizes_text()})", op)
                return False
        if len(self.graph.ops) != len(self.other.ops) or self.graph.outputs != self.other.outputs:
            self._leak(f"{_DIFFERS} ({self._sizes_text()})")
            return False
        return True

    def _sizes_text(self) -> str:
        known = (f"{one.size} or {one.other_size} for {one.name}" for one in self.dimensions)
        return ", ".join(known)

    def _put_inputs(self) -> None:
        given = iter(self.inputs)
        for leaf, spec in zip(self.graph.inputs, self.step.signature.inputs, strict=True):
            one = next(given) if spec.role is Role.BATCH else None
            axes = [plain(size) for size in spec.shape]
            if one is not None:
                pad = pad_range.constant(_as_held(one.number, spec.dtype))
                for axis, dimension in one.dimensions.items():
                    axes[axis] = (padded(dimension, 0, pad),)
            self.tensors[leaf] = PaddedTensor(tuple(axes), of_dtype(spec.dtype), spec.dtype)

    def _constant(self, leaf: int) -> PaddedTensor | None:
        value, other = self.graph.values[leaf], self.other.values[leaf]
        assert value.expr is not None and other.expr is not None
        numbers, others = value.expr.value.numpy(), other.expr.value.numpy()
        if numbers.shape == others.shape:
            if not numpy.array_equal(numbers, others, equal_nan=numbers.dtype.kind == "f"):
                return None
            axes = tuple(plain(size) for size in value.shape)
            return PaddedTensor(axes, _range_of(numbers), value.dtype, numbers.size == 1)
        shared = tuple(
            slice(0, min(pair)) for pair in zip(numbers.shape, others.shape, strict=True)
        )
        if not numpy.array_equal(numbers[shared], others[shared]):
            return None
        data = _range_of(numbers)
        pairs = zip(numbers.shape, others.shape, strict=True)
        found = [axis_of_sizes(pair, self.dimensions, data) for pair in pairs]
        if any(axis is None for axis in found):
            return None
        return PaddedTensor(tuple(axis or () for axis in found), data, value.dtype)

    def _apply(self, op: Op, other: Op) -> None:
        operands = [self.tensors[leaf] for leaf in op.reads]
        if self._is_clip(op):
            return
        for leaf, operand in zip(op.reads, operands, strict=True):
            if operand is None and self.graph.values[leaf].is_constant:
                self._leak(_of_length(_numbers(self.graph, leaf), _numbers(self.other, leaf)), op)
        known = [one for one in operands if one is not None]
        if len(known) < len(operands) or self._reads_reversed(op, known):
            return
        call = PaddedCall(
            op,
            other,
            known,
            [self._sizes(leaf) for leaf in op.results],
            [self.graph.values[leaf].dtype for leaf in op.results],
            self.dimensions,
            self._require_size,
            lambda leaf, limit, least: self.required.require(
                op, leaf, self._known(leaf), limit, least
            ),
            self.graph.maker,
            self.tensors.__getitem__,
            lambda leaf: self.graph.values[leaf].shape,
        )
        try:
            made = self._made(call)
        except Leak as leak:
            self._leak(str(leak) + cause_of(op, self.graph, self.tensors), op)
            return
        for leaf, tensor in zip(op.results, made, strict=True):
            data = _as_numbers(tensor, call)
            self.tensors[leaf] = attrs.evolve(tensor.with_sole_padding_closed(), data=data)
        if op.name == "amp_ir.embedding":
            # A step with a negative id is refused, with padding or without.
            ids = known[1]
            data = attrs.evolve(ids.data, low=max(ids.data.low, 0.0))
            self.tensors[op.reads[1]] = attrs.evolve(ids, data=data)

    def _reads_reversed(self, op: Op, operands: Sequence[PaddedTensor]) -> bool:
        """Return whether an op reads padding in front of data, which an error says at its flip."""
        if op.name in _OF_REVERSED:
            return False
        for leaf, tensor in zip(op.reads, operands, strict=True):
            name = next((one.name for one in tensor.factors if one.is_reversed), None)
            if name is not None:
                made = self.graph.maker(leaf)
                while made is not None and made.name != "relax.flip":
                    made = self.graph.maker(made.reads[0])
                self._leak(f"the order of {name} is reversed, which moves padding in front", made)
                return True
        return False

    def _is_clip(self, op: Op) -> bool:
        """Return whether an op changes no data, which are below a length that it takes.

        As min(x, length - 1) of places of data, or their remainder by the length.
        """
        if op.name not in _CLIPS or len(op.reads) != 2:
            return False
        for x, length in (op.reads, op.reads[::-1]):
            tensor, limit = self.tensors[x], self.lengths.get(length)
            made = self.graph.values[op.results[0]]
            if tensor is None or limit is None or not tensor.dtype.startswith("int"):
                continue
            if any(one.is_reversed for one in tensor.factors):
                continue
            if (made.shape, made.dtype) != (self.graph.values[x].shape, tensor.dtype):
                continue
            past, least = _CLIPS[op.name]
            limit = limit.moved(past)
            if tensor.is_inside(limit, least) or self.required.require(op, x, tensor, limit, least):
                axes = [tuple(one.with_pad(FINITE) for one in axis) for axis in tensor.axes]
                self.tensors[op.results[0]] = tensor.with_axes(axes)
                return True
        return False

    def _made(self, call: PaddedCall) -> Sequence[PaddedTensor]:
        call.check_options()
        rule = RULES.get(call.op.name)
        if rule is None:
            if any(one.padded for one in call.operands):
                raise Leak("this op has no rule for padding")
            return call.unpadded()
        made = rule(call)
        found = [refined(call, made)] if isinstance(made, PaddedTensor) else made
        for tensor, sizes in zip(found, call.result_sizes, strict=True):
            if [sizes_of(axis) for axis in tensor.axes] != list(sizes):
                raise Leak("the shape of its result follows the padded length in an unknown way")
        return found

    def _sizes(self, leaf: int) -> list[Pair]:
        shapes = self.graph.values[leaf].shape, self.other.values[leaf].shape
        return list(zip(*shapes, strict=True))

    def _require_size(self, dimension: Dimension, size: int) -> None:
        self.least_sizes[dimension.name] = max(self.least_sizes[dimension.name], size)

    def _known(self, leaf: int) -> PaddedTensor:
        tensor = self.tensors[leaf]
        assert tensor is not None
        return tensor

    def _leak(self, text: str, op: Op | None = None) -> None:
        where = "" if op is None else f"{op.location}: {op.label}: "
        self.leaks.setdefault(where + text, "" if op is None else op.location.phase)


def _as_numbers(tensor: PaddedTensor, call: PaddedCall) -> Range:
    """Return what is known of the data of a result.

    They are taken for numbers: where one is NaN, or infinite by a root or a quotient of finite
    ones, it is so without padding too.
    """
    is_finite = all(one.data.is_finite for one in call.operands)
    if is_finite and call.op.name in ("relax.sum", "relax.multiply"):
        return pad_range.known_finite(tensor.data)
    if not tensor.data.has_nan:
        return tensor.data
    if is_finite and call.op.name != "relax.log":
        return of_dtype(tensor.dtype)
    return attrs.evolve(tensor.data, has_nan=False)


def _check_differences(dimensions: Sequence[Dimension]) -> None:
    """Require that the extents of an axis tell which dimension it follows."""
    names: dict[int, str] = {}
    for one in dimensions:
        difference = one.size - one.other_size
        if difference in names:
            raise ArgumentError(
                f"{names[difference]} and {one.name} have sizes in the two captures that differ by "
                f"the same number, {difference}; an axis could follow either. Choose another size"
            )
        names[difference] = one.name


def _range_of(numbers: Any) -> Range:
    wide = numbers.astype(numpy.float64).reshape(-1)
    if not wide.size:
        return pad_range.FINITE
    if numpy.isnan(wide).any():
        return pad_range.ANY
    low, high = float(wide.min()), float(wide.max())
    return Range(low, high, low == -numpy.inf, high == numpy.inf)


def _as_held(number: float, dtype: str) -> float:
    """Return a number as a tensor of a dtype holds it: 0.1 is another number in float32."""
    return float(torch.full((), number, dtype=getattr(torch, dtype)))


def _numbers(graph: StepGraph, leaf: int) -> numpy.ndarray:
    expr = graph.values[leaf].expr
    assert expr is not None
    numbers: numpy.ndarray = expr.value.numpy().reshape(-1)
    return numbers


def _of_length(numbers: numpy.ndarray, others: numpy.ndarray) -> str:
    """Return what leaks by numbers that differ between the two captures."""
    if numbers.size > 1 and numbers.dtype.kind in "iu":
        return (
            "the places that it takes depend on the padded length, as those of x.unfold do. Take "
            "them by slices, such as x[:, :-1]"
        )
    found = (
        f"a number that it takes depends on the padded length ({numbers[0]}, or {others[0]}). "
        "Compute it from a mask"
    )
    if numbers.dtype.kind in "iu":
        found += "; in place of x.roll(1, 1), take F.pad(x[:, :-1], (0, 0, 1, 0))"
    return found
