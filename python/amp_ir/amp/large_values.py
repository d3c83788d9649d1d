# SPDX-License-Identifier: Apache-2.0
"""Ops that stay in float32 since their result may leave the range of the low dtype.

Powers, exponentials and sums are such values, and whatever is multiplied by the loss scale; so is
what has a constant that the low dtype cannot hold. Ops that carry them on stay in float32 up to the
first that bounds them, as PyTorch's promotion keeps them.

The range of bfloat16 is that of float32. In float16 products of a value with itself count as
powers, and 1 / x too: torch.autocast on a GPU runs `x ** 2`, `x ** 3`, `x.square()` and
`x.reciprocal()` in float32, which the importer writes with multiplications and divisions. So do
the results of regions that are to run in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_ir.amp.constants import Holds, holds
from amp_ir.amp.decisions import Decision
from amp_ir.amp.hints import FULL_DTYPE
from amp_ir.ir.step_graph import Op, StepGraph

# Ops whose result may be as large as an argument, or as a product of arguments.
_CARRIES_MAGNITUDE = frozenset(
    f"relax.{name}"
    for name in (
        "add", "subtract", "multiply", "divide", "negative", "abs", "where", "maximum", "minimum",
        "concat", "reshape", "permute_dims", "broadcast_to", "strided_slice", "expand_dims",
        "squeeze", "flip", "take", "split", "full", "sum", "mean",
    )
)  # fmt: skip

# More of them, where leaving the range is more than a rounding: in float16. A clip is none, since
# its limits are constants, and neither are pools of attention and normalizations.
_CARRIES_RANGE = _CARRIES_MAGNITUDE | frozenset(
    {
        *(
            f"relax.{name}"
            for name in (
                "max", "min", "sqrt", "gather_elements", "scatter_elements", "tril", "triu",
                "flatten", "stack", "repeat", "tile", "sort", "cumsum", "floor", "ceil", "round",
                "trunc", "nn.relu", "nn.leakyrelu", "nn.gelu", "nn.gelu_tanh", "nn.silu",
            )
        ),
        *(
            f"amp_ir.{name}"
            for name in (
                "index", "dropout", "elu", "softplus", "mish", "log_sigmoid", "softshrink",
                "max_pool", "adaptive_max_pool", "avg_pool", "adaptive_avg_pool",
            )
        ),
    }
)  # fmt: skip

_ARGUMENT = "An argument may be out of the low range: a power, a sum, a scaled loss"
_POWER = "A square or a reciprocal leaves float16's range for harmless numbers"
_SLOPE = "Its slope is computed from a value out of float16's range"

# Of an infinite number their slopes are 0 * inf. The results are as large as gradients.
_SLOPES = frozenset(f"amp_ir.{name}_backward" for name in ("gelu", "silu", "mish"))


def pin_large_values(
    graph: StepGraph, decisions: Sequence[Decision], amp_dtype: str, large: frozenset[int]
) -> None:
    """Keep ops with constants out of the low range, and what carries large values, in float32.

    `large` are inputs that may be large.
    """
    is_large: set[int] = set(large)
    is_narrow = amp_dtype == "float16"
    carriers = _CARRIES_RANGE if is_narrow else _CARRIES_MAGNITUDE
    for op, decision in zip(graph.ops, decisions, strict=True):
        if op.location.phase == "optimizer":
            continue
        worst = _worst_constant(graph, op, amp_dtype)
        carries = op.name in carriers
        reads_large = any(leaf in is_large for leaf in op.reads)
        if is_narrow and reads_large and op.name in _SLOPES and decision.label != "full":
            decision.pin("large_values", _SLOPE)
        reads_large = reads_large and carries
        is_power = is_narrow and _is_power(graph, op)
        is_wide = is_narrow and op.location.precision == "float32"
        makes_large = decision.is_unbounded or is_power or is_wide
        if reads_large or makes_large or (carries and worst is Holds.OVERFLOWS):
            is_large.update(op.results)
        if decision.label == "full" or op.is_view:
            continue
        if worst is Holds.OVERFLOWS:
            decision.pin("constants", f"A constant here is infinite in {amp_dtype}")
        elif worst is Holds.UNDERFLOWS:
            decision.pin("constants", f"A constant here is below the normal range of {amp_dtype}")
        elif reads_large or is_power:
            decision.pin("large_values", _ARGUMENT if reads_large else _POWER)


def _is_power(graph: StepGraph, op: Op) -> bool:
    """Return whether an op is x * x, x * |x| or a constant divided by a tensor."""
    if op.name == "relax.multiply":
        return len({_magnitude(graph, leaf) for leaf in op.reads}) == 1
    return op.name == "relax.divide" and graph.values[op.reads[0]].is_constant


def _magnitude(graph: StepGraph, leaf: int) -> int:
    """Return the value whose absolute value, negative or view `leaf` is."""
    maker = graph.values[leaf].op
    while maker >= 0:
        op = graph.ops[maker]
        if not op.is_view and op.name not in ("relax.abs", "relax.negative"):
            break
        leaf = op.reads[0]
        maker = graph.values[leaf].op
    return leaf


def _worst_constant(graph: StepGraph, op: Op, amp_dtype: str) -> Holds | None:
    found = [
        holds(value.expr.value.numpy(), amp_dtype)
        for value in (graph.values[leaf] for leaf in op.reads)
        if value.is_constant and value.dtype == FULL_DTYPE and value.expr is not None
    ]
    for worst in (Holds.OVERFLOWS, Holds.UNDERFLOWS):
        if worst in found:
            return worst
    return None
