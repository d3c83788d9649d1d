# SPDX-License-Identifier: Apache-2.0
"""Ops that stay in float32 for what they carry: `keep_full(graph, decisions, ...)`.

- constants that the low dtype cannot hold, and values that may leave its range (large_values.py);
- an exact argument (a phase, a step), and every op that leads to it;
- the new value of a tensor of the state, and every op that leads to it: what a low dtype rounds
  away there is missing in every later step;
- what comes from inputs alone, through nothing that rounds: an embedding, its dropout, a token that
  is a parameter. It begins the residual stream, and torch.autocast keeps it in float32;
- a matmul of state alone by a vector, as in the power iteration of spectral_norm, whose vectors are
  state;
- a matmul in the gradient of an op that runs as PyTorch's own, as those of torch.linalg do;
- what PyTorch promotes to float32, before what may cancel it (keep_promoted.py);
- a number, and a gradient that has one number for many elements, as the seed of a backward pass
  has: everything computed from it has its one rounding error, which no mean removes.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from amp_ir.amp.decisions import Decision, Mode
from amp_ir.amp.hints import FULL_DTYPE, LOW_DTYPES
from amp_ir.amp.keep_promoted import is_our_matmul, pin_promoted
from amp_ir.amp.large_values import pin_large_values
from amp_ir.dialect.external_call import NAME as EXTERNAL
from amp_ir.ir.step_graph import Op, StepGraph


@attrs.frozen
class Border:
    """The boundary of a step: the values that become state, and the inputs of a batch."""

    state: frozenset[int] = frozenset()
    batch: frozenset[int] = frozenset()


def keep_full(
    graph: StepGraph, decisions: Sequence[Decision], amp_dtype: str, border: Border
) -> None:
    """Label ops "full" for what they carry; `amp_dtype` determines what may be stored low."""
    # The range of bfloat16 is that of float32, and a batch is not the step's own doing.
    large = border.batch if amp_dtype == "float16" else frozenset()
    pin_large_values(graph, decisions, amp_dtype, large)
    _pin_before_exact_arguments(graph, decisions)
    _pin_state(graph, decisions, border.state)
    _pin_vectors_of_state(graph, decisions, border)
    _pin_external_gradients(graph, decisions)
    _pin_unrounded(graph, decisions)
    _pin_numbers(graph, decisions)
    pin_promoted(graph, decisions)


def _pin_before_exact_arguments(graph: StepGraph, decisions: Sequence[Decision]) -> None:
    """Keep free ops in float32 whose result reaches an exact argument through free ops."""
    exact: set[int] = set()
    for op in reversed(graph.ops):
        decision = decisions[op.position]
        if decision.exact:
            exact.update(op.reads)
        elif any(leaf in exact for leaf in op.results) and _is_transparent(op, decision):
            exact.update(op.reads)
            if decision.label == "free":
                decision.pin("exact", "An exact argument (a phase, a step) depends on this")


def _pin_state(graph: StepGraph, decisions: Sequence[Decision], state: frozenset[int]) -> None:
    """Keep free ops in float32 whose result becomes state through free ops.

    Optimizer ops keep their dtypes, and are looked through too: they add gradients to the state. An
    activation that a gradient's formula reads is not part of that sum. It may be stored low, as
    torch.autocast stores it: held in float32, the 49 ReLUs of ResNet-50 take 18 % of the peak.
    """
    wanted = set(state)
    for op in reversed(graph.ops):
        decision = decisions[op.position]
        if not any(leaf in wanted for leaf in op.results):
            continue
        if op.location.phase == "optimizer":
            wanted.update(op.reads)
        elif _is_transparent(op, decision) or _is_sum_of_update(op, decision):
            wanted.update(leaf for leaf in op.reads if not _is_activation_of(graph, op, leaf))
            if decision.label == "free":
                decision.pin("state", "A tensor of the state becomes this, and keeps its dtype")


def _is_activation_of(graph: StepGraph, gradient: Op, leaf: int) -> bool:
    maker = graph.values[leaf].op
    is_made_forward = maker >= 0 and graph.ops[maker].location.phase == "forward"
    return gradient.location.phase == "backward" and is_made_forward


def _is_sum_of_update(op: Op, decision: Decision) -> bool:
    """Return whether an op is a sum that a rule keeps in float32, outside of the backward pass.

    Of an update that the user writes himself, p - lr * g or a moving average, it is the last op;
    what it adds would be rounded otherwise.
    """
    is_sum = op.name in ("relax.add", "relax.subtract") and decision.label == "full"
    return is_sum and op.location.phase == "forward"


def _is_transparent(op: Op, decision: Decision) -> bool:
    is_free = decision.label == "free" and not decision.sets_result
    return op.is_view or is_free or decision.was_free


def _pin_vectors_of_state(graph: StepGraph, decisions: Sequence[Decision], border: Border) -> None:
    """Keep matmuls by a vector in float32 that no batch reaches.

    They read the matrix once, so that a low copy of it saves nothing. With spectral_norm, whose
    vectors are rounded by such a matmul in bfloat16, state is 1.8e-3 from float64 as a share of how
    far it moved in three steps, and else 4e-4: torch.autocast on a CPU, with mv in float32, 5e-4.
    """
    if not border.state:
        return  # Which inputs are a batch is not known.
    of_batch = set(border.batch)
    for op in graph.ops:
        decision = decisions[op.position]
        if not of_batch.isdisjoint(op.reads):
            # What an optimizer writes is state, of which a GAN's critic has a second forward pass.
            if op.location.phase != "optimizer":
                of_batch.update(op.results)
        elif is_our_matmul(op, decision) and _has_vector(graph, op):
            reason = "A matmul of state alone by a vector: a low copy of the matrix saves nothing"
            decision.pin("vector_of_state", reason)


def _has_vector(graph: StepGraph, op: Op) -> bool:
    first, second = (graph.values[leaf] for leaf in op.reads)
    return first.shape[-1] in (first.size, second.size)


def _pin_external_gradients(graph: StepGraph, decisions: Sequence[Decision]) -> None:
    """Keep matmuls in float32 that the gradient of an external call makes of its result.

    torch.autocast is around the forward pass, and the call's result is float32: U and V of an SVD
    enter its gradient as they are. Low, they make an error of 2e-3 in gradients that are otherwise
    exact to 1e-6. A matmul whose forward pass read the result low, as a layer's does, is none.
    """
    read_low: set[int] = set()
    of_calls: set[int] = set()
    for op in graph.ops:
        decision = decisions[op.position]
        sources = {_moved_from(graph, leaf) for leaf in op.reads}
        is_of_call = op.location.phase == "backward" and not of_calls.isdisjoint(sources)
        if op.name == EXTERNAL:
            of_calls.update(op.results)
        elif Mode.LOW not in decision.modes:
            of_calls.update(op.results if is_of_call else ())
        elif is_of_call and is_our_matmul(op, decision) and read_low.isdisjoint(sources):
            reason = "In the gradient of an op of PyTorch's, which autocast is not around"
            decision.pin("external_gradient", reason)
            of_calls.update(op.results)
        else:
            read_low.update(sources)


def _moved_from(graph: StepGraph, leaf: int) -> int:
    """Return the value that this one is a view or a transposed or repeated copy of."""
    maker = graph.maker(leaf)
    while maker is not None and (maker.is_view or maker.name == "relax.broadcast_to"):
        leaf = maker.reads[0]
        maker = graph.maker(leaf)
    return leaf


def _pin_unrounded(graph: StepGraph, decisions: Sequence[Decision]) -> None:
    """Keep free ops in float32 whose arguments are inputs of the step, or computed from such alone.

    Measured on T5 in bfloat16, whose residual stream begins with the embedding: the plan's gradient
    error is 1.06 to 1.10 times that of torch.autocast if that may be stored low, 1.00 if not. What
    a product has rounded already may be rounded again; masks and constants are no such input. A
    float64 input is one, whatever it is cast to: of a diffusion's table of noise, 1 - x is read.
    """
    wide = (FULL_DTYPE, "float64")
    unrounded = {leaf for leaf in graph.inputs if graph.values[leaf].dtype in wide}
    rounded = {n for n, value in enumerate(graph.values) if value.dtype in LOW_DTYPES}
    for op in graph.ops:
        decision = decisions[op.position]
        if Mode.LOW in decision.modes or not rounded.isdisjoint(op.reads):
            rounded.update(op.results)
        elif op.location.phase != "optimizer" and not unrounded.isdisjoint(op.reads):
            unrounded.update(op.results)
            if decision.label == "free" and not op.is_view:
                reason = "Computed from inputs alone: nothing has rounded this before"
                decision.pin("unrounded", reason)


# Ops whose results have few different numbers where their arguments have.
_ELEMENTWISE = frozenset(
    f"relax.{name}"
    for name in (
        "add", "subtract", "multiply", "divide", "negative", "abs", "where", "maximum", "minimum",
        "broadcast_to", "astype", "reshape", "permute_dims", "expand_dims", "squeeze",
    )
)  # fmt: skip


def _pin_numbers(graph: StepGraph, decisions: Sequence[Decision]) -> None:
    """Keep free ops in float32 that compute one number, or a gradient of few numbers."""
    few: set[int] = set()
    for op in graph.ops:
        if _leaves_few_numbers(graph, op, few):
            few.update(op.results)
        elif any(graph.values[leaf].size > 1 for leaf in op.results):
            continue
        decision = decisions[op.position]
        if decision.label == "free" and not op.is_view and not decision.sets_result:
            decision.pin("one_number", "One rounding would fall on all that is computed from this")


def _leaves_few_numbers(graph: StepGraph, op: Op, few: set[int]) -> bool:
    """Return whether a backward op gives a few numbers, repeated: a seed, masked or signed.

    In the forward pass such tensors are masks, of numbers that a low dtype holds.
    """
    if op.location.phase != "backward":
        return False
    if op.name == "relax.sign":
        return True
    return op.name in _ELEMENTWISE and all(
        leaf in few or value.size == 1 or not value.dtype.startswith(("float", "bfloat"))
        for leaf, value in ((leaf, graph.values[leaf]) for leaf in op.reads)
    )
