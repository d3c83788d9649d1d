# SPDX-License-Identifier: Apache-2.0
"""Comparison of one padded step with the step without padding: `compare_padding`.

Where padding cannot be proven inert, numbers say whether it was at one batch, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import tvm
from tvm import relax

from amp_ir.dialect.registry import call_op, options_of
from amp_ir.errors import PaddingError
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.step_module import OutputSpec, Role, StepModule
from amp_ir.padding.axes import Dimension
from amp_ir.padding.inert_padding import InertPadding, PaddedResult

# Both are computed in float64; a sum over 10**6 numbers in another order differs by less.
TOLERANCE = 1e-8
_DRAWS = ("amp_ir.random_uniform", "amp_ir.random_normal")
# The option of each op that drops elements.
_PROBABILITIES = {
    "amp_ir.dropout": "p",
    "amp_ir.attention": "dropout_p",
    "amp_ir.attention_backward": "dropout_p",
    "amp_ir.attention_probabilities": "dropout_p",
    "amp_ir.attention_weights": "dropout_p",
    "amp_ir.attention_score_gradient": "dropout_p",
}
_SHOWN = 8


def compare_padding(
    step: StepModule,
    exact: StepModule,
    other: StepModule,
    batch: Sequence[torch.Tensor],
    exact_batch: Sequence[torch.Tensor],
    lengths: Sequence[tuple[Dimension, int]],
) -> InertPadding:
    """Run a step padded and not, in float64 and without dropout, and compare state and results.

    Nothing of the user's state is written. `lengths` are the padded dimensions, each with its
    length in `exact_batch`; `other` is the step captured with their second sizes, which tell what
    each axis of a result follows.

    Raises:
        PaddingError: they differ, or cannot be compared; the message lists every output.
    """
    found = _outputs(step, batch)
    expected = _outputs(exact, exact_batch)
    results, errors = [], []
    specs = zip(step.signature.outputs, other.signature.outputs, strict=True)
    for (spec, other_spec), one, exact_one in zip(specs, found, expected, strict=True):
        axes = _padded_axes(spec, other_spec, exact_one, lengths)
        if spec.role is Role.RESULT:
            results.append(axes)
        elif axes:
            errors.append(f"{spec.name} has a padded axis")
        for axis in axes:
            one = one.narrow(axis.axis, 0, exact_one.shape[axis.axis])
        error = _difference(spec, one, exact_one)
        if error:
            errors.append(error)
    if errors:
        more = [f"and {len(errors) - _SHOWN} more"] if len(errors) > _SHOWN else []
        raise PaddingError(
            "padding changes what the step computes, by the numbers of this batch:\n  "
            + "\n  ".join([*errors[:_SHOWN], *more])
            + '\nWithout pad_check="values" the error says by which ops padding reaches them'
        )
    return InertPadding(tuple(results), {one.name: 1 for one, _ in lengths})


def _outputs(step: StepModule, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    given = iter(batch)
    inputs = []
    for spec in step.signature.inputs:
        value = next(given) if spec.role is Role.BATCH else step.state[spec.name]
        inputs.append(value if isinstance(value, torch.Tensor) else value())
    return interpret(_without_dropout(step.ir), inputs, float_dtype=torch.float64)


def _without_dropout(ir: tvm.IRModule) -> tvm.IRModule:
    """Return a program that keeps every element, so that two runs of it can be compared."""
    flow = Dataflow(ir)
    bindings = []
    for binding in flow.bindings:
        name, call = op_name(binding.value), binding.value
        if name in _DRAWS:
            raise PaddingError(
                'pad_check="values" cannot compare this step: it draws random numbers, which are '
                "other ones with padding than without. Draw them before the step and pass them"
            )
        if name in _PROBABILITIES:
            option, options = _PROBABILITIES[name], options_of(call)
            # Attention without dropout takes no random state, its last argument.
            has_state = option == "dropout_p" and options[option] > 0
            args = list(call.args)[: -1 if has_state else None]
            kept = call_op(name, args, call.span, **{**options, option: 0.0})
            relax.expr._update_type(kept, call.ty)
            binding = relax.VarBinding(binding.var, kept)
        bindings.append(binding)
    return flow.finish(bindings)


def _padded_axes(
    spec: OutputSpec,
    other: OutputSpec,
    expected: torch.Tensor,
    lengths: Sequence[tuple[Dimension, int]],
) -> tuple[PaddedResult, ...]:
    """Return the axes that follow a padded dimension, by the shapes in two captures."""
    axes = []
    extents = zip(spec.shape, other.shape, expected.shape, strict=True)
    for axis, (size, other_size, without) in enumerate(extents):
        fitting = [one for one in lengths if one[0].size - one[0].other_size == size - other_size]
        shift = size - fitting[0][0].size if fitting else 0
        if without != (fitting[0][1] + shift if fitting else size):
            raise PaddingError(
                f"axis {axis} of a result has {size} entries with padding and {without} without, "
                "so that its data cannot be sliced out. Return it as it was before the axis was "
                "flattened, joined or pooled"
            )
        if fitting:
            axes.append(PaddedResult(axis, fitting[0][0], shift))
        elif size != other_size:
            raise PaddingError(
                f"axis {axis} of a result has {size} entries, or {other_size} where the batch is "
                "padded to another size, so that its data cannot be sliced out. Return it as it "
                "was before the axis was flattened, joined or pooled"
            )
    return tuple(axes)


def _difference(spec: OutputSpec, found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return how an output differs; "" where it does not."""
    if not expected.is_floating_point():
        same = torch.equal(found, expected)
        return "" if same else f"{spec.name} differs"
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    if torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True):
        return ""
    error = float((found - expected).abs().max())
    return f"{spec.name} differs by {error:.2g}, where its largest number is {scale:.2g}"
