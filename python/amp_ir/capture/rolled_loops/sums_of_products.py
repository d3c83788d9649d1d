# SPDX-License-Identifier: Apache-2.0
"""Sums over the steps of a loop of matrix products, as gradients of weights are: one product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import attrs
import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import GraphWriter, arguments, place, value
from amp_ir.capture.rolled_loops.repeated_ops import Carried, FromEntry, Inside, RepeatedOps, reads

aten = torch.ops.aten
# A step then stores its factors instead of reading and writing the sum: more bytes than this share
# of the sum's are not worth it.
_MOST_STORED = 2.0


@attrs.frozen
class Factor:
    """A factor of each step's product, or with `is_transposed` its transpose.

    It is the value of the op at a position, or an entry of a tensor from outside.
    """

    source: Inside | FromEntry
    is_transposed: bool
    rows: int
    columns: int


@attrs.frozen
class SumOfProducts:
    """The op at `position` adds `left @ right`, moved by `moves`, to what it was a step before.

    `product` is the position of the matmul, `moves` are those of the permutations after it.
    """

    position: int
    product: int
    moves: tuple[int, ...]
    left: Factor
    right: Factor


def sums_of_products(
    ops: RepeatedOps, users_outside: Callable[[int, int], list[Node]], constant: set[int]
) -> dict[int, SumOfProducts]:
    """Return the sums of products of a loop, by position, that only the last step's readers see."""
    readers: Counter[int] = Counter()
    for sources in ops.sources:
        readers.update(one.position for one in sources or () if isinstance(one, (Inside, Carried)))
    found = {}
    for position, sources in enumerate(ops.sources):
        one = _sum_at(ops, position, constant)
        if one is None or sources is None or readers[position] != 1:
            continue
        if not any(users_outside(j, position) for j in range(ops.length - 1)):
            found[position] = one
    return found


def _sum_at(ops: RepeatedOps, position: int, constant: set[int]) -> SumOfProducts | None:
    node, sources = ops.node(1, position), ops.sources[position]
    if node.target is not aten.add.Tensor or node.kwargs or sources is None or len(sources) != 2:
        return None
    terms = [one for one in sources if isinstance(one, Inside)]
    if Carried(position) not in sources or len(terms) != 1:
        return None
    at, moves = terms[0].position, []
    while ops.node(1, at).target is aten.permute.default:
        moves.append(at)
        above = ops.sources[at]
        if not above or not isinstance(above[0], Inside):
            return None
        at = above[0].position
    product = ops.node(1, at)
    if product.target is not aten.mm.default or value(product).dtype != value(node).dtype:
        return None
    if value(ops.node(1, terms[0].position)).shape != value(node).shape:
        return None
    left, right = (_factor(ops, at, side, constant) for side in (0, 1))
    if left is None or right is None:
        return None
    stored = sum(one.rows * one.columns for one in (left, right) if isinstance(one.source, Inside))
    if stored > _MOST_STORED * value(product).numel():
        return None
    return SumOfProducts(position, at, tuple(moves[::-1]), left, right)


def _factor(ops: RepeatedOps, product: int, side: int, constant: set[int]) -> Factor | None:
    sources = ops.sources[product]
    if sources is None or len(sources) != 2:
        return None
    source = sources[side]
    rows, columns = value(reads(ops.node(1, product))[side]).shape
    is_transposed = False
    if isinstance(source, Inside) and ops.node(1, source.position).target is aten.permute.default:
        above = ops.sources[source.position]
        if above is not None and arguments(ops.node(1, source.position))[1] == [1, 0]:
            source, is_transposed = above[0], True
    if isinstance(source, Inside) and source.position in ops.entries:
        source = ops.entries[source.position]
    if isinstance(source, FromEntry):
        return Factor(source, is_transposed, rows, columns) if abs(source.stride) == 1 else None
    if not isinstance(source, Inside) or source.position in constant:
        return None
    return Factor(source, is_transposed, rows, columns)


def write_sum(
    writer: GraphWriter,
    ops: RepeatedOps,
    one: SumOfProducts,
    stacked: Callable[[Inside | FromEntry], Node],
) -> Node:
    """Write the sum of all steps after the loop; `stacked` gives a factor's [t, ...] in time.

    Before:  s1 = s0 + a1 @ b1; s2 = s1 + a2 @ b2; ...         # a: [m, n], b: [n, k]
    After:   s = s0 + concat([a1, a2, ...], 1) @ concat([b1, b2, ...], 0)
    """
    writer.location = place(ops.node(1, one.product))
    left, right = stacked(one.left.source), stacked(one.right.source)
    inner = ops.length * one.left.columns
    if one.left.is_transposed:
        flat = writer.transposed(writer.view(left, [inner, one.left.rows]))
    else:
        flat = writer.view(writer.moved(left, 0, 1), [one.left.rows, inner])
    if one.right.is_transposed:
        right = writer.emit(aten.permute.default, right, [0, 2, 1])
    total = writer.emit(aten.mm.default, flat, writer.view(right, [inner, one.right.columns]))
    for move in one.moves:
        total = writer.emit(aten.permute.default, total, arguments(ops.node(1, move))[1])
    writer.location = place(ops.node(1, one.position))
    at = (ops.sources[one.position] or []).index(Carried(one.position))
    return writer.emit(aten.add.Tensor, reads(ops.node(0, one.position))[at], total)
