# SPDX-License-Identifier: Apache-2.0
"""Ops that share a kernel: from fusion, or from an estimate where fusion has not run.

`kernels_from` takes the numbers that fusion gives the step before any cast.

`kernels_of` estimates. A library call (matmul, convolution, attention, an LSTM) or a kernel of its
own kind (scatter, sort) reads and writes memory: it shares a kernel with no other op. Everything
else becomes loops, and loops over the same number of elements that follow each other fuse,
reductions over trailing dimensions included; a reduction over leading dimensions ends a kernel.
Two ops share a kernel when they are neighbours of this kind at the same depth, the number of
kernel boundaries on the longest path from the inputs (an op that begins a kernel waits for the
readers it may join). Equal depth makes kernels acyclic, and the result does not depend on the
order in which ops are written.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence

import tvm
from tvm import relax

from amp_ir.ir.step_graph import Op, StepGraph

# Returns for a module, without optimizer, the kernel or library call that computes each variable. A
# missing one is recomputed by the kernels that read it, or by the library call that follows.
FindKernels = Callable[[tvm.IRModule], Mapping[relax.Var, int]]
# The kernels in which each op is computed.
Places = Sequence[frozenset[int]]
COMPUTED_BY_READERS = -1


class Kind(enum.Enum):
    """The kind of kernel that an op becomes."""

    LIBRARY = "library"
    OPAQUE = "opaque"
    LOOP = "loop"
    VIEW = "view"


# Calls that state the dtype of their result in an option, whatever that of their arguments.
SET_BY_OPTION = frozenset(
    {
        "relax.matmul",
        "relax.nn.conv1d",
        "relax.nn.conv2d",
        "relax.nn.conv3d",
        "amp_ir.conv",
        "amp_ir.conv_transpose",
        "amp_ir.conv_backward_input",
        "amp_ir.conv_backward_weight",
    }
)
# Calls of a library: low arguments make their arithmetic cheaper, too.
LIBRARY = SET_BY_OPTION | frozenset(
    {
        "amp_ir.attention",
        "amp_ir.attention_backward",
        "amp_ir.lstm",
        "amp_ir.lstm_backward",
        "amp_ir.gru",
        "amp_ir.gru_backward",
        "amp_ir.rnn_tanh",
        "amp_ir.rnn_tanh_backward",
        "amp_ir.rnn_relu",
        "amp_ir.rnn_relu_backward",
    }
)
_OPAQUE = frozenset(
    {
        "relax.scatter_elements",
        "relax.argsort",
        "relax.sort",
        "relax.topk",
        "relax.cumsum",
        "relax.cumprod",
        "amp_ir.scatter_add",
        "amp_ir.index_put",
        "amp_ir.embedding_backward",
        "amp_ir.max_pool_backward",
        "amp_ir.all_reduce_start",
        "amp_ir.all_reduce_wait",
        "amp_ir.broadcast_start",
        "amp_ir.broadcast_wait",
        "amp_ir.reduce_scatter_start",
        "amp_ir.reduce_scatter_wait",
        "amp_ir.all_gather_start",
        "amp_ir.all_gather_wait",
        "amp_ir.loop",
    }
)
_REDUCTIONS = frozenset(
    {"relax.sum", "relax.mean", "relax.max", "relax.min", "relax.prod", "relax.variance"}
)
# Results that sum over the batch, for each of many columns: a kernel ends with them.
_COLUMN_REDUCTIONS = frozenset(
    {
        "amp_ir.layer_norm_backward_weight",
        "amp_ir.rms_norm_backward_weight",
        "amp_ir.group_norm_backward_weight",
        "amp_ir.nll_loss",
        "amp_ir.mse_loss",
        "amp_ir.batch_norm",
        "amp_ir.batch_norm_backward",
    }
)


def kind_of(op: Op) -> Kind:
    """Return the kind of kernel that the op becomes."""
    if op.is_view:
        return Kind.VIEW
    if op.name in LIBRARY:
        return Kind.LIBRARY
    return Kind.OPAQUE if op.name in _OPAQUE else Kind.LOOP


def kernels_from(graph: StepGraph, numbers: Mapping[relax.Var, int]) -> list[int]:
    """Return a number for each op, from fusion; COMPUTED_BY_READERS where fusion has none.

    Ops of the optimizer, and those that fusion decomposes (attention), get numbers of their own.
    """
    fresh = itertools.count(1 + max(numbers.values(), default=0))
    kernels = []
    for op in graph.ops:
        number = numbers.get(op.variable, COMPUTED_BY_READERS)
        stands_alone = kind_of(op) in (Kind.LIBRARY, Kind.OPAQUE) and op.name != "relax.matmul"
        if number < 0 and (op.location.phase == "optimizer" or stands_alone):
            number = next(fresh)
        kernels.append(number)
    return kernels


def places_of(graph: StepGraph, kernels: Sequence[int]) -> list[frozenset[int]]:
    """Return the kernels that compute each op: its own, or those of all its readers."""
    places: list[frozenset[int]] = [frozenset()] * len(graph.ops)
    outside = frozenset({1 + max(kernels, default=0)})
    for op in reversed(graph.ops):
        if kernels[op.position] != COMPUTED_BY_READERS:
            places[op.position] = frozenset({kernels[op.position]})
            continue
        readers = {reader for leaf in op.results for reader in graph.values[leaf].readers}
        found = frozenset().union(*(places[reader] for reader in readers))
        places[op.position] = found or outside
    return places


def kernels_of(graph: StepGraph) -> list[int]:
    """Return an estimated number for each op; ops with the same number share a kernel."""
    joins = _joining_sources(graph)
    depths = _depths(graph, joins)
    parent = list(range(len(graph.ops)))
    for op in graph.ops:
        for source in joins[op.position]:
            if depths[source] == depths[op.position]:
                parent[_find(parent, source)] = _find(parent, op.position)
    return [_find(parent, position) for position in range(len(graph.ops))]


def _joining_sources(graph: StepGraph) -> list[set[int]]:
    """Return, for each op, the ops it reads from with which it may share a kernel."""
    kinds = [kind_of(op) for op in graph.ops]
    domains = [_domain(graph, op) for op in graph.ops]
    ends = [_ends_kernel(op, graph) for op in graph.ops]
    return [
        {
            source
            for source in _sources(graph, op)
            if kinds[source] is Kind.LOOP is kinds[op.position]
            and domains[source] == domains[op.position]
            and not ends[source]
        }
        for op in graph.ops
    ]


def _depths(graph: StepGraph, joins: list[set[int]]) -> list[int]:
    """Return the depth of each op; one that begins a kernel waits for the readers it may join."""
    depths = [0] * len(graph.ops)
    begins = [True] * len(graph.ops)
    for op in graph.ops:
        for source in _sources(graph, op):
            beyond = source not in joins[op.position]
            depths[op.position] = max(depths[op.position], depths[source] + beyond)
        begins[op.position] = all(
            depths[source] < depths[op.position] for source in joins[op.position]
        )
    latest: list[int | None] = [None] * len(graph.ops)
    for op in reversed(graph.ops):
        limit = latest[op.position]
        if begins[op.position] and limit is not None and not op.is_view:
            depths[op.position] = max(depths[op.position], limit)
        for source in _sources(graph, op):
            bound = depths[op.position] - (source not in joins[op.position])
            known = latest[source]
            latest[source] = bound if known is None else min(known, bound)
    return depths


def _sources(graph: StepGraph, op: Op) -> set[int]:
    """Return the ops, views looked through, whose results `op` reads."""
    values = graph.values
    return {values[values[leaf].root].op for leaf in op.reads if values[values[leaf].root].op >= 0}


def _find(parent: list[int], position: int) -> int:
    while parent[position] != position:
        parent[position] = parent[parent[position]]
        position = parent[position]
    return position


def _domain(graph: StepGraph, op: Op) -> int:
    """Return the number of elements the op loops over."""
    leaves = op.reads if op.name in _REDUCTIONS else op.results
    return max((graph.values[leaf].size for leaf in leaves), default=0)


def _ends_kernel(op: Op, graph: StepGraph) -> bool:
    if op.name in _COLUMN_REDUCTIONS:
        return True
    if op.name not in _REDUCTIONS:
        return False
    axes = op.call.attrs.axis if isinstance(op.call, relax.Call) else None
    if axes is None:
        return True
    ndim = len(graph.values[op.reads[0]].shape)
    return ndim - 1 not in {int(axis) % ndim for axis in axes}
