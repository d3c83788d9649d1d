# SPDX-License-Identifier: Apache-2.0
"""Ops that stay in float32 where PyTorch's promotion has them there, before what may cancel.

torch.autocast runs a product of a low and a float32 tensor in float32: of 1000 + 3 * net(x) minus a
target, the difference is as exact as net(x). Stored low, 1000 is rounded to a multiple of 4. A
rounding of relative size u, which the rule of such a product allows, is none of the result's order
where a sum, a difference or a softmax follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_ir.amp import type_hints
from amp_ir.amp.decisions import OF_GRADIENT, Decision, Mode, adds_bias
from amp_ir.amp.hints import FULL_DTYPE, LOW_DTYPES, RULES, name_of, reason_of
from amp_ir.amp.policies import product_in_float32
from amp_ir.ir.step_graph import Op, StepGraph

_SUMS = frozenset(("relax.add", "relax.subtract"))
# What cancels or is steep for some arguments. Half of a unit in the last place of a logit of 150
# in bfloat16 is 0.5, which moves a probability by up to 65 %.
_SENSITIVE = frozenset(
    name
    for name, rule in RULES.items()
    if rule in (type_hints.loss, type_hints.softmax, type_hints.range_sensitive)
)
# In float32 by rule, and an error of an argument is one of the result's, be it ever so small.
_LINEAR = _SUMS | {"relax.sum", "relax.mean", "relax.cumsum"}
# In float32 by rule; torch.autocast runs them in the dtype of their data, which comes first.
_OF_FIRST = frozenset(
    name
    for name, rule in RULES.items()
    if rule in (type_hints.normalization, type_hints.batch_norm_backward)
)
_PRODUCTS = (type_hints.matmul, type_hints.convolution)
_OF_ALL = _SUMS | {"relax.mean"}
_RULES_OF_MATMULS = (type_hints.matmul, product_in_float32)
_NAMES_OF_MATMULS = {name_of(rule) for rule in _RULES_OF_MATMULS}
_REASONS_OF_MATMULS = {OF_GRADIENT, *(reason_of(rule) for rule in _RULES_OF_MATMULS)}


def pin_promoted(graph: StepGraph, decisions: Sequence[Decision]) -> None:
    """Keep free ops in float32 that PyTorch has there and what follows may cancel.

    Looked through are free ops and sums; low results of matmuls and what has no other float
    argument are low in PyTorch too.
    """
    low = _low_under_autocast(graph, decisions)
    wanted: set[int] = set()
    for op in reversed(graph.ops):
        decision = decisions[op.position]
        if op.location.phase == "optimizer":
            continue
        reads_wide = any(leaf in wanted for leaf in op.results) and not low.issuperset(op.results)
        is_free = decision.label == "free" and not decision.sets_result
        if reads_wide and (op.is_view or is_free or decision.was_free or _is_linear(op)):
            wanted.update(op.reads)
            if is_free and not op.is_view:
                decision.pin(
                    "promoted", "PyTorch promotes this to float32; what follows may cancel it"
                )
        if _may_cancel(graph, op) or decision.exact:
            wanted.update(op.reads)


def is_our_matmul(op: Op, decision: Decision) -> bool:
    """Return whether a rule of ours decided on a matmul; what a user's asks for is done."""
    is_ours = decision.rule in _NAMES_OF_MATMULS and decision.reason in _REASONS_OF_MATMULS
    return op.name == "relax.matmul" and is_ours


def _is_linear(op: Op) -> bool:
    # In the backward pass such sums are gradients of biases, beside matmuls that read them low.
    return op.name in _LINEAR and (op.name in _SUMS or op.location.phase != "backward")


def _may_cancel(graph: StepGraph, op: Op) -> bool:
    if op.name in _SENSITIVE or op.name == "relax.subtract":
        return True
    # A loss is a sum of losses: none of them is to cancel another.
    return op.name == "relax.add" and graph.values[op.results[0]].size > 1


def _low_under_autocast(graph: StepGraph, decisions: Sequence[Decision]) -> set[int]:
    """Return the values that torch.autocast has in the low dtype.

    Readers of what the user casts by `x.float()` have it in float32.

    Matmuls of a float32 matrix by a float32 vector are pinned on the way. On a CPU mv is on none of
    autocast's lists, and a low copy of a matrix that is read once saves nothing.
    """
    low = {leaf for leaf, value in enumerate(graph.values) if value.dtype in LOW_DTYPES}
    read_low = set(low)
    for op in graph.ops:
        decision = decisions[op.position]
        if op.location.phase == "optimizer":
            continue
        if is_our_matmul(op, decision) and len(graph.values[op.reads[1]].shape) == 1:
            if read_low.isdisjoint(op.reads):
                decision.pin("vector", "A matmul by a vector, of which PyTorch has both in float32")
        if _is_low(graph, op, decision, read_low):
            made = [leaf for leaf in op.results if graph.values[leaf].dtype == FULL_DTYPE]
            low.update(made)
            if op.location.precision != "widened":
                read_low.update(made)
    return low


def _is_low(graph: StepGraph, op: Op, decision: Decision, low: set[int]) -> bool:
    if Mode.LOW in decision.modes or _is_linear_layer(graph, op, low):
        return True
    if op.name in _OF_FIRST:
        return bool(op.reads) and op.reads[0] in low
    if decision.label == "full" and not decision.was_free and op.name not in _OF_ALL:
        return False
    floats = [leaf for leaf in op.reads if graph.values[leaf].dtype in (FULL_DTYPE, *LOW_DTYPES)]
    # A tensor without dimensions, as a number is, takes the dtype of those beside it.
    ranked = [leaf for leaf in floats if graph.values[leaf].shape]
    deciding = ranked or [leaf for leaf in floats if not graph.values[leaf].is_constant]
    return bool(deciding) and low.issuperset(deciding)


def _is_linear_layer(graph: StepGraph, op: Op, low: set[int]) -> bool:
    """Return whether an op adds its bias to a matmul or a convolution, as one op of PyTorch."""
    products = [leaf for leaf in op.reads if leaf in low and _is_product(graph, leaf)]
    return len(products) == 1 and adds_bias(graph, op, products[0])


def _is_product(graph: StepGraph, leaf: int) -> bool:
    maker = graph.maker(graph.values[leaf].root)
    return maker is not None and RULES.get(maker.name) in _PRODUCTS
