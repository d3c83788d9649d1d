# SPDX-License-Identifier: Apache-2.0
"""Calls of the same kernel function with different tensors, to be made by one launch."""

from __future__ import annotations

import math
from typing import Protocol

import attrs
from tvm import tirx


@attrs.frozen(eq=False)
class Body:
    """A kernel's function as `extent` independent iterations over `index` of a statement.

    `thread` is the variable of the thread in a block, where iterations are blocks.
    """

    parameters: list[tirx.Var]
    index: tirx.Var | None
    extent: int
    statement: tirx.Stmt
    thread: tirx.Var | None = None

    @property
    def elements(self) -> int:
        """What one iteration goes through, about."""
        return max(1, max(map(buffer_size, self.parameters), default=1) // self.extent)


@attrs.frozen(eq=False)
class Family:
    """Calls of one function, with the position of each argument and result among the merged."""

    body: Body
    parameters: list[list[tirx.Var]]

    @property
    def iterations(self) -> int:
        """Iterations of all the calls."""
        return self.body.extent * len(self.parameters)


class Merger(Protocol):
    """How kernels of one kind of device are taken apart and put together."""

    def most_parameters(self) -> int:
        """How many parameters a merged function may have."""

    def body_of(self, function: tirx.PrimFunc) -> Body | None:
        """The function as independent iterations; None if it is not made of them alone."""

    def launch(self, families: list[Family]) -> tirx.Stmt:
        """The iterations of all families at once."""


def buffer_size(buffer: tirx.Var) -> int:
    """Number of elements."""
    return math.prod(int(n) for n in buffer.shape)


def like(buffer: tirx.Var, name: str) -> tirx.Var:
    """A new buffer of the same shape and dtype."""
    return tirx.decl_buffer(tuple(buffer.shape), str(buffer.dtype), name)
