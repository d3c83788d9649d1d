# SPDX-License-Identifier: Apache-2.0
"""Scalars of a graph that represent symbolic floats, replaced by nodes that compute them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_ir.capture.symbolic_float import Expression, FloatTape, SymbolicFloat
from amp_ir.ir.location import META_KEY, Location

aten = torch.ops.aten

_UNARY_OPS = {
    "neg": aten.neg.default,
    "abs": aten.abs.default,
    "sqrt": aten.sqrt.default,
    "exp": aten.exp.default,
    "log": aten.log.default,
}
_BINARY_OPS = {
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "div": aten.div.Tensor,
    "pow": aten.pow.Tensor_Tensor,
    "mod": aten.remainder.Tensor,
}


class ScalarNodes:
    """A builder of float64 nodes of shape [] for expressions, each expression once.

    `read` are the nodes (f64[]) of the tensors whose values the step computed with.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        tape: FloatTape,
        read: list[torch.fx.Node],
        mode: FakeTensorMode,
    ) -> None:
        self._graph = graph
        self._tape = tape
        self._read = read
        self._inputs: list[torch.fx.Node] = []
        self._made: dict[Expression, torch.fx.Node] = {}
        with mode:
            self._value = torch.empty((), dtype=torch.float64)

    def add_inputs(self, names: Iterable[str], *, before: torch.fx.Node) -> list[torch.fx.Node]:
        """Add a placeholder for each hyper-parameter."""
        with self._graph.inserting_before(before):
            for name in names:
                node = self._graph.placeholder(re.sub(r"\W", "_", name))
                self._inputs.append(self._noted(node, Location()))
        return self._inputs

    def replace_all(self) -> None:
        """Replace every scalar of the graph that represents a symbolic float."""
        for node in list(self._graph.nodes):
            if node.op == "call_function" and self._has_symbol((node.args, node.kwargs)):
                node.args = tuple(self._replaced(value, node) for value in node.args)
                node.kwargs = {k: self._replaced(v, node) for k, v in node.kwargs.items()}

    def nodes_of(self, symbols: list[SymbolicFloat], before: torch.fx.Node) -> list[torch.fx.Node]:
        """Return the nodes of symbolic floats that are results."""
        return [self._node(symbol.expression, before) for symbol in symbols]

    def _has_symbol(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(self._has_symbol, value))
        if isinstance(value, dict):
            return any(map(self._has_symbol, value.values()))
        return self._tape.find(value) is not None

    def _replaced(self, value: Any, user: torch.fx.Node) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._replaced(item, user) for item in value)
        symbol = self._tape.find(value)
        if symbol is None:
            return value
        node = self._node(symbol.expression, user)
        return self._as_wide_as(user, node)

    def _as_wide_as(self, user: torch.fx.Node, node: torch.fx.Node) -> torch.fx.Node:
        """Cast a float64 operand of shape [] so that, as a Python float, it widens no result."""
        result = user.meta.get("val")
        if not isinstance(result, torch.Tensor) or result.dim() > 0:
            return node
        if result.dtype is torch.float64 or not result.is_floating_point():
            return node
        with self._graph.inserting_before(user):
            cast = self._graph.call_function(
                aten._to_copy.default, (node,), {"dtype": result.dtype}
            )
        self._noted(cast, user.meta.get(META_KEY, Location()))
        cast.meta["val"] = result
        return cast

    def _node(self, expression: Expression, before: torch.fx.Node) -> torch.fx.Node:
        if expression.op == "input":
            return self._inputs[expression.args[0]]
        if expression.op == "tensor":
            return self._read[expression.args[0]]
        made = self._made.get(expression)
        if made is None:
            made = self._made[expression] = self._make(expression, before)
        return made

    def _make(self, expression: Expression, before: torch.fx.Node) -> torch.fx.Node:
        location = before.meta.get(META_KEY, Location())
        target, args, kwargs = self._call_of(expression, before)
        with self._graph.inserting_before(before):
            return self._noted(self._graph.call_function(target, args, kwargs), location)

    def _call_of(
        self, expression: Expression, before: torch.fx.Node
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return the op, its arguments and options; a constant on the right stays a scalar."""
        if expression.op == "constant":
            return aten.full.default, ([], expression.args[0]), {"dtype": torch.float64}
        first = self._node(expression.args[0], before)
        if expression.op in _UNARY_OPS:
            return _UNARY_OPS[expression.op], (first,), {}
        second = expression.args[1]
        if second.op != "constant":
            return _BINARY_OPS[expression.op], (first, self._node(second, before)), {}
        exponent = second.args[0]
        if expression.op == "pow":
            if exponent == 0.5:
                return aten.sqrt.default, (first,), {}
            return aten.pow.Tensor_Scalar, (first, exponent), {}
        return _BINARY_OPS[expression.op], (first, exponent), {}

    def _noted(self, node: torch.fx.Node, location: Location) -> torch.fx.Node:
        node.meta["val"] = self._value
        node.meta[META_KEY] = location
        return node
