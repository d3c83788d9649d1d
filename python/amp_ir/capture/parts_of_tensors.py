# SPDX-License-Identifier: Apache-2.0
"""Reads of a part of a tensor that was put together: the graph reads the part itself.

Where parameters are views of one flat tensor, each write to one of them is a new flat tensor, and
each read a slice of it: n parameters would copy all of them n times.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import fx

aten = torch.ops.aten
_SLICE, _WRITTEN, _JOINED = aten.slice.Tensor, aten.slice_scatter.default, aten.cat.default


@attrs.frozen
class _Piece:
    """The elements of a value from `begin` to `end` along an axis."""

    value: fx.Node
    begin: int
    end: int


@attrs.frozen
class _Pieces:
    """What a value consists of along an axis, in order."""

    axis: int
    pieces: tuple[_Piece, ...]


Known = dict[fx.Node, _Pieces]


def read_parts(graph: fx.Graph) -> None:
    """Let slices of concatenated and of partly written tensors read the pieces that they are.

    Before: functional. After: the values are the same; what nothing reads any more is gone.
    """
    known: Known = {}
    for node in graph.nodes:
        found = _pieces(node, known) if node.op == "call_function" else None
        if found is not None:
            known[node] = found
    for node, found in known.items():
        if node.target is _SLICE and len(found.pieces) == 1:
            _read_piece(node, found.axis, found.pieces[0])
    graph.eliminate_dead_code()
    for node, found in known.items():
        if node.target is _WRITTEN and node.users:
            _join(graph, node, found)
    graph.eliminate_dead_code()


def _pieces(node: fx.Node, known: Known) -> _Pieces | None:
    """Return the pieces of a value that an op of these puts together or cuts out."""
    args: Any = node.args
    if node.target is _JOINED:
        rank = len(_shape(node))
        axis = (args[1] if len(args) > 1 else 0) % rank
        if any(len(_shape(part)) != rank for part in args[0]):
            return None
        return _merged(axis, (one for part in args[0] for one in _along(part, axis, known)))
    if node.target is _SLICE and _has_no_step(args[1:]):
        axis, begin, end = _range(args[0], args[1:])
        return _merged(axis, _cut(_along(args[0], axis, known), begin, end))
    if node.target is _WRITTEN and _has_no_step(args[2:]):
        base, written = args[:2]
        axis, begin, end = _range(base, args[2:])
        before, new = _along(base, axis, known), _along(written, axis, known)
        after = _cut(before, end, _shape(base)[axis])
        return _merged(axis, (*_cut(before, 0, begin), *new, *after))
    return None


def _range(base: fx.Node, args: tuple[Any, ...]) -> tuple[int, int, int]:
    """Return the axis of a slice, its begin and its end."""
    axis, first, last = (*args, *(0, None, None)[len(args) :])[:3]
    shape = _shape(base)
    axis %= len(shape)
    begin, end, _ = slice(first, last).indices(shape[axis])
    return axis, begin, max(begin, end)


def _has_no_step(args: tuple[Any, ...]) -> bool:
    return len(args) < 4 or args[3] == 1


def _along(value: fx.Node, axis: int, known: Known) -> tuple[_Piece, ...]:
    found = known.get(value)
    if found is not None and found.axis == axis:
        return found.pieces
    return (_Piece(value, 0, _shape(value)[axis]),)


def _cut(pieces: Iterable[_Piece], begin: int, end: int) -> list[_Piece]:
    """Return the pieces of the elements from `begin` to `end`."""
    found, at = [], 0
    for one in pieces:
        first, last = max(begin, at), min(end, at + one.end - one.begin)
        if first < last:
            found.append(_Piece(one.value, one.begin + first - at, one.begin + last - at))
        at += one.end - one.begin
    return found


def _merged(axis: int, pieces: Iterable[_Piece]) -> _Pieces | None:
    """Return pieces with neighbours of one value as one; None of none."""
    merged: list[_Piece] = []
    for one in pieces:
        last = merged[-1] if merged else None
        if last is not None and last.value is one.value and last.end == one.begin:
            merged[-1] = _Piece(one.value, last.begin, one.end)
        elif one.begin < one.end:
            merged.append(one)
    return _Pieces(axis, tuple(merged)) if merged else None


def _read_piece(node: fx.Node, axis: int, piece: _Piece) -> None:
    if (piece.begin, piece.end) == (0, _shape(piece.value)[axis]):
        node.replace_all_uses_with(piece.value)
    else:
        node.args = (piece.value, axis, piece.begin, piece.end)


def _join(graph: fx.Graph, node: fx.Node, found: _Pieces) -> None:
    """Put a value together from its pieces at once."""
    with graph.inserting_before(node):
        parts = [_sliced(graph, node, found.axis, one) for one in found.pieces]
        joined = parts[0]
        if len(parts) > 1:
            joined = graph.call_function(_JOINED, (parts, found.axis))
            joined.meta.update(node.meta)
    node.replace_all_uses_with(joined)


def _sliced(graph: fx.Graph, node: fx.Node, axis: int, piece: _Piece) -> fx.Node:
    if (piece.begin, piece.end) == (0, _shape(piece.value)[axis]):
        return piece.value
    part = graph.call_function(_SLICE, (piece.value, axis, piece.begin, piece.end))
    whole = piece.value.meta["val"]
    with whole.fake_mode:
        part.meta.update(node.meta, val=whole.narrow(axis, piece.begin, piece.end - piece.begin))
    return part


def _shape(value: fx.Node) -> tuple[int, ...]:
    return tuple(value.meta["val"].shape)
