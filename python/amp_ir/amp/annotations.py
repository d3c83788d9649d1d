# SPDX-License-Identifier: Apache-2.0
"""What the user says of functions and of custom ops: `half_function`, `register_autocast` etc."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tvm import relax

from amp_ir.amp.decisions import Decision, Label, Mode, following
from amp_ir.amp.hints import FULL_DTYPE
from amp_ir.dialect.external_call import NAME, external_call, external_op
from amp_ir.dialect.registry import options_of
from amp_ir.errors import RuleError
from amp_ir.ir.step_graph import Op, StepGraph

_Wish = Literal["low", "float32", "promote"]
_RULES: dict[_Wish, tuple[str, str]] = {
    "low": ("half_function", "The user has it run low here"),
    "float32": ("float_function", "The user has it run in float32 here"),
    "promote": ("promote_function", "The user has it run in the widest dtype of what it reads"),
}


def apply_annotations(graph: StepGraph, decisions: Sequence[Decision], amp_dtype: str) -> None:
    """Change the decisions on ops of annotated functions, and of custom ops with an autocast.

    Requires: the rules have decided, and the placement has not.
    Ensures:  ops of the optimizer and of regions without autocast stay as they are, and so does the
              dtype in which a gradient of a parameter leaves.
    Errors:   RuleError, listing every custom op whose autocast casts to another low dtype.
    """
    strange: dict[str, str] = {}
    for op in graph.ops:
        decision = decisions[op.position]
        precision = op.location.precision
        if op.is_view or op.location.phase == "optimizer" or precision == "off":
            continue
        if precision in _RULES:
            _follow(graph, decisions, op, precision, amp_dtype)
            decision.rule, decision.reason = _RULES[precision]
        elif op.name == NAME:
            dtype = str(options_of(op.call)["autocast"])
            wish = {"low": "low", amp_dtype: "low", FULL_DTYPE: "float32"}.get(dtype)
            if wish is not None:
                _follow(graph, decisions, op, wish, amp_dtype)  # type: ignore[arg-type]
                decision.rule = "register_autocast"
                decision.reason = f"Its registered autocast casts to {dtype}"
            elif dtype:
                strange[external_op(op.call)] = dtype
    if strange:
        listed = ", ".join(f"{name} to {dtype}" for name, dtype in sorted(strange.items()))
        raise RuleError(
            f"torch.library.register_autocast casts {listed}, and the low dtype of the step is "
            f'{amp_dtype}: register it for that, or pass amp_dtype="{next(iter(strange.values()))}"'
        )


def _follow(
    graph: StepGraph, decisions: Sequence[Decision], op: Op, wish: _Wish, amp_dtype: str
) -> None:
    decision = decisions[op.position]
    castable = [graph.values[leaf].dtype == FULL_DTYPE for leaf in op.reads]
    has_result = any(graph.values[leaf].dtype == FULL_DTYPE for leaf in op.results)
    if wish == "promote":
        known = _widest(graph, decisions, op, castable)
        if known is None:
            return
        mode, label = known
    else:
        mode, label = (Mode.LOW, "low") if wish == "low" else (Mode.FULL, "full")
    if mode is Mode.VARY and not has_result:
        mode = Mode.EITHER
    is_gradient = decision.sets_result and decision.label == "full"
    decision.modes = [mode if can else Mode.KEEP for can in castable]
    decision.label = label if has_result and not is_gradient else "full"
    decision.sets_result = False
    if decision.label != "full":
        decision.follows = _following(graph, op, decision, amp_dtype)


def _widest(
    graph: StepGraph, decisions: Sequence[Decision], op: Op, castable: Sequence[bool]
) -> tuple[Mode, Label] | None:
    """Return how an op runs in the widest dtype of what it reads; None where it reads no float."""
    labels = set()
    for leaf, can in zip(op.reads, castable, strict=True):
        root = graph.values[graph.values[leaf].root]
        if not can or (root.is_constant and root.size == 1):
            continue  # a number takes the dtype of the tensors beside it
        labels.add(_label_of(graph, decisions, root.op, graph.values[leaf].root))
    if not labels:
        return None
    if "full" in labels:
        return Mode.FULL, "full"
    return (Mode.VARY, "free") if "free" in labels else (Mode.LOW, "low")


def _label_of(graph: StepGraph, decisions: Sequence[Decision], position: int, leaf: int) -> Label:
    """Return in which dtype a value is stored: "full" for inputs and constants."""
    if position < 0:
        return "full"
    decision = decisions[position]
    follows = decision.follows[graph.ops[position].results.index(leaf)]
    return decision.label if follows else "full"


def _following(graph: StepGraph, op: Op, decision: Decision, amp_dtype: str) -> list[bool]:
    """Return which results take the label's dtype; of a custom op those that it makes low."""
    if op.name != NAME:
        return following(graph, op, decision, amp_dtype)
    types = [
        relax.TensorType(graph.values[leaf].shape, amp_dtype)
        if mode is not Mode.KEEP
        else graph.values[leaf].ty
        for leaf, mode in zip(op.reads, decision.modes, strict=True)
    ]
    made = external_call(*types, **options_of(op.call))
    fields = made.fields if isinstance(made, relax.TupleType) else [made]
    return [str(field.dtype) == amp_dtype for field in fields]
