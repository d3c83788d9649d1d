# SPDX-License-Identifier: Apache-2.0
"""LU factors of matrices that are not contiguous, such as transposed ones.

PyTorch's `det`, `slogdet` and `solve` factor A^T where A is contiguous, which saves a copy, and A
where it is not; their gradients solve with the factors of the one or of the other, by the strides
that A had. In a compiled step every call is given contiguous tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

aten = torch.ops.aten
_SOLVE = aten._linalg_solve_ex.default
_DETERMINANTS = (aten._linalg_det.default, aten._linalg_slogdet.default)


def factor_by_strides(graph: fx.Graph) -> None:
    """Make calls that read other matrices give the same factors where they are contiguous.

    The values of nodes, in `meta["val"]`, are fake tensors with the strides of PyTorch.
    """
    for node in list(graph.nodes):
        if node.target is not _SOLVE and node.target not in _DETERMINANTS:
            continue
        matrix = _matrix(node).meta["val"]
        if matrix.is_contiguous() or matrix.is_complex():
            continue
        with graph.inserting_before(node):
            if node.target is _SOLVE:
                _solve(_Calls(node), node)
            else:
                _turn(_Calls(node), node)


def _matrix(node: fx.Node) -> fx.Node:
    matrix = node.args[0]
    assert isinstance(matrix, fx.Node)
    return matrix


class _Calls:
    """Calls in front of a node, with its metadata."""

    def __init__(self, node: fx.Node) -> None:
        self._node = node
        self._mode = _matrix(node).meta["val"].fake_mode

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Return a call, with the fake tensors that it makes."""
        made = self._node.graph.call_function(op, args, kwargs)
        fakes = pytree.tree_map_only(fx.Node, lambda one: one.meta["val"], (args, kwargs))
        with self._mode, torch.no_grad():
            made.meta = {**self._node.meta, "val": op(*fakes[0], **fakes[1])}
        return made


def _turn(call: _Calls, node: fx.Node) -> None:
    """Give the determinant a copy of A^T, of which it factors A: it is the same number."""
    turned = call(aten.transpose.int, node.args[0], -2, -1)
    node.update_arg(0, call(aten.clone.default, turned, memory_format=torch.contiguous_format))


def _solve(call: _Calls, node: fx.Node) -> None:
    arguments: Any = node.args
    matrix, right, *rest = arguments
    left = rest[0] if rest else node.kwargs.get("left", True)
    factored = call(aten.linalg_lu_factor_ex.default, matrix)
    factors, pivots, info = (call(operator.getitem, factored, k) for k in range(3))
    is_vector = _is_vector(matrix.meta["val"].shape, right.meta["val"].shape)
    columns = call(aten.unsqueeze.default, right, -1) if is_vector else right
    found = call(aten.linalg_lu_solve.default, factors, pivots, columns, left=left)
    results = call(aten.squeeze.dim, found, -1) if is_vector else found, factors, pivots, info
    for user in list(node.users):
        item: Any = user.args[1]
        user.replace_all_uses_with(results[item])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _is_vector(matrix: Sequence[int], right: Sequence[int]) -> bool:
    return len(right) == 1 or tuple(right) == tuple(matrix[:-1])
