# SPDX-License-Identifier: Apache-2.0
"""What of a step a pattern that matches nothing may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

import attrs

_MOST = 3
# PyTorch's names of functions and ours, where they differ.
OP_OF_FUNCTION = {
    "linear": "matmul", "mm": "matmul", "bmm": "matmul", "addmm": "matmul", "baddbmm": "matmul",
    "einsum": "matmul", "convolution": "conv", "scaled_dot_product_attention": "attention",
    "mul": "multiply", "sub": "subtract", "div": "divide", "neg": "negative", "pow": "power",
    "cat": "concat", "transpose": "permute_dims", "permute": "permute_dims", "view": "reshape",
    "expand": "broadcast_to", "clamp": "clip", "leaky_relu": "leakyrelu", "var": "variance",
    "logsigmoid": "log_sigmoid", "logsoftmax": "log_softmax", "eq": "equal", "ne": "not_equal",
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "index_select": "take", "gather": "gather_elements", "fmod": "mod", "remainder": "floor_mod",
    "native_batch_norm": "batch_norm", "native_layer_norm": "layer_norm",
}  # fmt: skip


def near_names(pattern: str, known: Collection[str]) -> str:
    """Return "; near: 'a', 'b'", the names that are most like a glob; "" where none is."""
    stem = pattern.strip("*").rpartition("::")[2]
    stem = OP_OF_FUNCTION.get(stem.rpartition(".")[2], stem)
    inside = [one for one in known if stem and stem in one]
    alike = difflib.get_close_matches(pattern, known, n=_MOST, cutoff=0.4)
    near = (sorted(inside, key=len) or alike)[:_MOST]
    return f"; near: {', '.join(map(repr, near))}" if near else ""


@attrs.frozen
class _Inside:
    """Ops that are part of another one, in which they have no dtype that a user could change."""

    ops: tuple[str, ...]
    how: str


_ATTENTION = _Inside(
    ("relax.nn.softmax",),
    "its scores and its softmax are float32 already, and only what its matmuls read is low",
)
_RECURRENT = _Inside(
    ("relax.sigmoid", "relax.tanh"),
    "its gates are computed in float32 already, and only what its matmuls read is low",
)
_NORM = _Inside(
    ("relax.mean", "relax.variance", "relax.rsqrt"),
    "its mean and its variance are computed in float32 already",
)
_INSIDE_OF = {
    "amp_ir.attention": _ATTENTION,
    **dict.fromkeys(("amp_ir.lstm", "amp_ir.gru", "amp_ir.rnn_tanh"), _RECURRENT),
    **dict.fromkeys((f"amp_ir.{one}_norm" for one in ("layer", "rms", "group", "batch")), _NORM),
}


def inside_of_others(pattern: str, ops: Iterable[str]) -> list[str]:
    """Return a sentence for each op of a step that does inside what a pattern names."""
    return [
        f"{one} does {' and '.join(found)} inside: {_INSIDE_OF[one].how}; "
        f'Override(op="{one}*", to="float32") keeps all of it in float32'
        for one in sorted(set(ops))
        if one in _INSIDE_OF and (found := _named(pattern, _INSIDE_OF[one].ops))
    ]


def _named(pattern: str, ops: Iterable[str]) -> list[str]:
    """Return the ops, without what precedes the last dot, that a pattern matches or just names."""
    return [
        name
        for op in ops
        for name in (op.rpartition(".")[2],)
        if pattern.strip("*") and (fnmatchcase(op, pattern) or pattern.strip("*.") == name)
    ]
