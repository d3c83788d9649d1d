# SPDX-License-Identifier: Apache-2.0
"""Horizontal fusion groups: calls of one kernel function with different tensors, for one launch."""

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
        """Return roughly how many elements one iteration processes."""
        return max(1, max(map(buffer_size, self.parameters), default=1) // self.extent)


@attrs.frozen(eq=False)
class HorizontalGroup:
    """Calls of one function; `parameters` has those of the fused function for each call."""

    body: Body
    parameters: list[list[tirx.Var]]

    @property
    def iterations(self) -> int:
        """Return the iterations of all the calls."""
        return self.body.extent * len(self.parameters)


class Merger(Protocol):
    """Horizontal fusion for one kind of device: splits kernels into iterations and joins them."""

    def most_parameters(self) -> int:
        """Return how many parameters a fused function may have."""

    def body_of(self, function: tirx.PrimFunc) -> Body | None:
        """Return the function as independent iterations; None if it has other statements."""

    def launch(self, groups: list[HorizontalGroup]) -> tirx.Stmt:
        """Emit the iterations of all groups at once."""


def buffer_size(buffer: tirx.Var) -> int:
    """Return the number of elements."""
    return math.prod(int(n) for n in buffer.shape)


def like(buffer: tirx.Var, name: str) -> tirx.Var:
    """Return a new buffer of the same shape and dtype."""
    return tirx.decl_buffer(tuple(buffer.shape), str(buffer.dtype), name)
