# SPDX-License-Identifier: Apache-2.0
"""Decisions of the rules about each op of a step, before placement: `decide(graph, ...)`.

A decision has a mode for every tensor that the op reads and a label, the dtype of its result:
"low", "full", or "free" where the placement chooses. Optimizer ops keep their dtypes, and
gradients of parameters are stored in float32. keep_full.py keeps further ops in float32 for what
they carry.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Literal

import attrs
from tvm import relax

from amp_ir.amp.hints import (
    FREE,
    FULL_DTYPE,
    Hint,
    PrimType,
    Rule,
    RuleResult,
    TupleType,
    apply_rule,
    name_of,
    reason_of,
)
from amp_ir.dialect.registry import DECLARATIONS, options_of
from amp_ir.errors import RuleError
from amp_ir.ir.step_graph import Op, StepGraph, Tree, leaves

OF_GRADIENT = "A gradient of a parameter leaves in float32, with no round trip"
# Rules that never look at the dtypes of arguments.
_OWN_RULES = ("amp_ir.amp.type_hints", "amp_ir.amp.policies")
FindRule = Callable[[str], "Rule | None"]


class Mode(enum.Enum):
    """The dtype in which an op reads a tensor.

    EITHER takes the low copy where there is one. VARY is EITHER where the op is labelled low and
    FULL where it is labelled full. KEEP is the dtype of the user's program.
    """

    FULL = "full"
    LOW = "low"
    EITHER = "either"
    VARY = "vary"
    KEEP = "keep"


Label = Literal["low", "full", "free"]


@attrs.define(eq=False)
class Decision:
    """The decision for one op.

    `follows` says which results take the label's dtype, `is_free` that the placement chose the
    dtype in which the result is stored, `was_free` that it would have, had nothing pinned the op.
    """

    rule: str
    reason: str
    modes: list[Mode]
    label: Label
    follows: list[bool]
    exact: bool = False
    is_unbounded: bool = False
    accumulate: str | None = None
    sets_result: bool = False
    is_free: bool = False
    was_free: bool = False

    def pin(self, rule: str, reason: str) -> None:
        """Keep the op in float32 for this reason."""
        self.was_free |= self.label == "free" and not self.sets_result
        self.rule, self.reason, self.label = rule, reason, "full"
        self.sets_result = False
        self.modes = [mode if mode is Mode.KEEP else Mode.FULL for mode in self.modes]


def decide(
    graph: StepGraph,
    find_rule: FindRule,
    amp_dtype: str,
    output_dtypes: Sequence[str],
    *,
    on_unknown: str = "error",
) -> list[Decision]:
    """Return one decision per op; `output_dtypes` has the dtype of each output of the step.

    Raises:
        RuleError: ops without a rule (all of them, with counts), or a rule with a wrong result.
    """
    _check_all_known(graph, find_rule, on_unknown)
    feeds_gradients_only = _values_that_feed_gradients_only(graph, output_dtypes)
    decisions = []
    for op in graph.ops:
        decision = _by_rule(graph, op, find_rule(op.name), amp_dtype)
        if decision.sets_result and _is_gradient(graph, op, feeds_gradients_only):
            decision.label = "full"
            decision.reason = OF_GRADIENT
        decisions.append(decision)
    return decisions


def _check_all_known(graph: StepGraph, find_rule: FindRule, on_unknown: str) -> None:
    missing: dict[str, list[Op]] = {}
    for op in graph.ops:
        if find_rule(op.name) is None and op.location.phase != "optimizer":
            missing.setdefault(op.name, []).append(op)
    if not missing or on_unknown == FULL_DTYPE:
        return
    listed = "; ".join(
        f"{name} ({len(ops)} {'call' if len(ops) == 1 else 'calls'}, first: "
        f"`{ops[0].variable.name}` in {ops[0].location})"
        for name, ops in sorted(missing.items())
    )
    names = ", ".join(f'"{name}"' for name in sorted(missing))
    raise RuleError(
        f"no type hint for {listed}. Add a rule with @amp_ir.amp.type_hint({names}), whose "
        'PrimType("float32") keeps an argument in float32, or pass on_unknown="float32"'
    )


def _by_rule(graph: StepGraph, op: Op, rule: Rule | None, amp_dtype: str) -> Decision:
    castable = [graph.values[leaf].dtype == FULL_DTYPE for leaf in op.reads]
    follows = [graph.values[leaf].dtype == FULL_DTYPE for leaf in op.results]
    untouched = _why_untouched(op, amp_dtype)
    if rule is None or untouched is not None:
        name, reason = untouched or ("on_unknown", 'No rule, and on_unknown="float32"')
        return Decision(name, reason, [Mode.KEEP] * len(castable), "full", follows)
    hints = _apply(graph, op, rule, amp_dtype)
    hints_of_leaves = _leaf_hints(op, hints)
    modes = [
        _mode(hint) if is_castable else Mode.KEEP
        for hint, is_castable in zip(hints_of_leaves, castable, strict=True)
    ]
    decision = Decision(name_of(rule), reason_of(rule), modes, "full", follows)
    decision.exact = any(isinstance(hint, PrimType) and hint.exact for hint in hints_of_leaves)
    decision.accumulate = hints.accumulate
    decision.is_unbounded = hints.is_unbounded
    _set_label(graph, op, decision, hints, amp_dtype)
    return decision


def _why_untouched(op: Op, amp_dtype: str) -> tuple[str, str] | None:
    if amp_dtype == FULL_DTYPE:
        return "amp_dtype", "Left as it was: amp_dtype is float32"
    if op.location.phase == "optimizer":
        return "optimizer", "Left as it was: the optimizer and its state stay in float32"
    if op.location.precision == "off":
        return "autocast_off", "Left as it was: the user switched autocast off here"
    return None


def _apply(graph: StepGraph, op: Op, rule: Rule, amp_dtype: str) -> RuleResult:
    """Apply a rule; one that looks at the dtypes of its arguments is called twice.

    A rule such as RAF's `cast_bias_add` follows its data: it returns float32 for float32 arguments
    and low for low ones. Called with both, it shows that the op may be either: FREE.
    """
    ty = op.variable.ty
    hints = apply_rule(rule, op.name, op.call.args, ty, amp_dtype)
    if rule.__module__ in _OWN_RULES or FREE in hints.args:
        return hints
    low_args = [_with_low_type(argument, amp_dtype) for argument in op.call.args]
    with_low = apply_rule(rule, op.name, low_args, ty, amp_dtype)
    if with_low == hints:
        return hints
    merged = [
        one if one == other else FREE for one, other in zip(hints.args, with_low.args, strict=True)
    ]
    return attrs.evolve(hints, args=merged)


def _with_low_type(argument: relax.Expr, amp_dtype: str) -> relax.Expr:
    ty = _low_type(argument.ty, amp_dtype)
    return argument if ty is argument.ty else relax.Var("argument", ty)


def _low_type(ty: relax.Type, amp_dtype: str) -> relax.Type:
    if isinstance(ty, relax.TupleType):
        return relax.TupleType([_low_type(field, amp_dtype) for field in ty.fields])
    if isinstance(ty, relax.TensorType) and str(ty.dtype) == FULL_DTYPE:
        return relax.TensorType(ty.shape, amp_dtype)
    return ty


def _leaf_hints(op: Op, hints: RuleResult) -> list[Hint]:
    hints_of_leaves: list[Hint] = []
    for tree, hint in zip(op.args, hints.args, strict=True):
        hints_of_leaves.extend(_spread(tree, hint))
    return hints_of_leaves


def _spread(tree: Tree, hint: Hint) -> list[Hint]:
    """Return the hint for each tensor of an argument; a single hint holds for a whole tuple."""
    if isinstance(tree, tuple):
        if isinstance(hint, TupleType):
            pairs = zip(tree, hint.fields, strict=True)
            return [hint for field, inner in pairs for hint in _spread(field, inner)]
        return [hint] * len(leaves(tree))
    return [hint] if isinstance(tree, int) else []


def _mode(hint: Hint) -> Mode:
    if hint is FREE:
        return Mode.VARY
    assert isinstance(hint, PrimType)
    if hint.dtype is None:
        return Mode.KEEP
    return Mode.FULL if hint.dtype == FULL_DTYPE else Mode.LOW


def _set_label(
    graph: StepGraph, op: Op, decision: Decision, hints: RuleResult, amp_dtype: str
) -> None:
    has_result = any(decision.follows)
    varies = Mode.VARY in decision.modes
    if varies and not (has_result and hints.result is None):
        decision.modes = [Mode.EITHER if m is Mode.VARY else m for m in decision.modes]
    if not has_result:
        return
    if hints.result is FREE:
        decision.label = "free"
        decision.sets_result = hints.gradient is not None
        decision.follows = [f and number == 0 for number, f in enumerate(decision.follows)]
    elif isinstance(hints.result, PrimType) and hints.result.dtype is not None:
        decision.label = "full" if hints.result.dtype == FULL_DTYPE else "low"
    elif varies:
        decision.label = "free"
        decision.follows = following(graph, op, decision, amp_dtype)
    else:
        first = next((m for m in decision.modes if m is not Mode.KEEP), Mode.KEEP)
        decision.label = "low" if first is Mode.LOW else "full"
        if decision.label == "low":
            decision.follows = following(graph, op, decision, amp_dtype)


def following(graph: StepGraph, op: Op, decision: Decision, amp_dtype: str) -> list[bool]:
    """Return which results are low when the op runs low (statistics, for one, are not)."""
    if op.name not in DECLARATIONS or len(op.results) == 1:
        return decision.follows
    reads_low = [mode in (Mode.LOW, Mode.VARY) for mode in decision.modes]
    types = [
        relax.TensorType(graph.values[leaf].shape, amp_dtype) if low else graph.values[leaf].ty
        for leaf, low in zip(op.reads, reads_low, strict=True)
    ]
    ty = DECLARATIONS[op.name].infer(*types, **options_of(op.call))
    return [
        was and str(field.dtype) == amp_dtype
        for was, field in zip(decision.follows, ty.fields, strict=True)
    ]


# Ops that carry a gradient to the optimizer without using it in a computation of their own.
_GRADIENT_PATH = frozenset(
    f"relax.{name}"
    for name in (
        "add", "subtract", "multiply", "divide", "negative", "abs", "square", "sum", "mean",
        "max", "reshape", "permute_dims", "broadcast_to", "concat", "strided_slice", "astype",
        "isfinite", "isnan", "isinf", "where",
    )
) | {
    "amp_ir.all_reduce_start", "amp_ir.all_reduce_wait", "amp_ir.reduce_scatter_start",
    "amp_ir.reduce_scatter_wait", "amp_ir.average",
}  # fmt: skip


def _values_that_feed_gradients_only(graph: StepGraph, output_dtypes: Sequence[str]) -> list[bool]:
    """Return, per value, whether only optimizer ops, sums, norms, checks and outputs use it."""
    only = [True] * len(graph.values)
    for leaf, dtype in zip(graph.outputs, output_dtypes, strict=True):
        only[leaf] = dtype == graph.values[leaf].dtype
    for op in reversed(graph.ops):
        if op.location.phase == "optimizer":
            continue
        passes = op.name in _GRADIENT_PATH and all(
            graph.values[leaf].size == 1 or only[leaf] for leaf in op.results
        )
        if not passes:
            for leaf in op.reads:
                only[leaf] = False
    return only


def _is_gradient(graph: StepGraph, op: Op, feeds_gradients_only: Sequence[bool]) -> bool:
    if graph.has_locations and op.location.phase == "forward":
        return False
    outputs = set(graph.outputs)
    return all(
        feeds_gradients_only[leaf] and (graph.values[leaf].readers or leaf in outputs)
        for leaf in op.results
    )


def round_after_convolution(graph: StepGraph, decisions: Sequence[Decision]) -> None:
    """Leave convolutions in float32 where that is cheap and what follows rounds again.

    That is one that is used only to add a bias to it, and one before a batch normalization over
    few elements. Matmuls need no such care: their library call adds the bias, as the placement
    knows.
    """
    for op in graph.ops:
        decision = decisions[op.position]
        if decision.sets_result and decision.label == "free" and op.name in _CONVOLUTIONS:
            readers = [graph.ops[reader] for reader in graph.values[op.results[0]].readers]
            reason = _why_round_later(graph, op.results[0], readers)
            if reason is not None:
                decision.label, decision.sets_result, decision.reason = "full", False, reason


_CONVOLUTIONS = frozenset({"amp_ir.conv", "amp_ir.conv_transpose"})
_BATCH_NORM = frozenset({"amp_ir.batch_norm", "amp_ir.batch_norm_backward"})
# Elements a channel. Measured on ResNet-50 and SSD in bfloat16, whose gradients are otherwise as
# far from float64 as those of torch.autocast; it costs ResNet-50 1 to 2 % of its time.
_FEW_ELEMENTS = 512


def _why_round_later(graph: StepGraph, product: int, readers: Sequence[Op]) -> str | None:
    if len(readers) == 1 and adds_bias(graph, readers[0], product):
        return "The bias is added before the one rounding, as libraries do"
    shape = graph.values[product].shape
    if readers and all(reader.name in _BATCH_NORM for reader in readers):
        if math.prod(shape) // shape[1] <= _FEW_ELEMENTS:
            return (
                f"Statistics over at most {_FEW_ELEMENTS} elements a channel average little of a "
                "rounding away, and the result is rounded again"
            )
    return None


def adds_bias(graph: StepGraph, op: Op, product: int) -> bool:
    """Return whether an op adds a vector to this value, and nothing else."""
    others = [graph.values[leaf] for leaf in op.reads if leaf != product]
    return (
        op.name == "relax.add"
        and len(others) == 1
        and sum(extent > 1 for extent in others[0].shape) <= 1
        and others[0].size < graph.values[product].size
    )
