# SPDX-License-Identifier: Apache-2.0
"""Which elements a pooling window holds and which windows hold an element, along one axis."""

from __future__ import annotations

from typing import Any

import attrs
from tvm import tirx

from amp_ir.loops import math as m
from amp_ir.loops.body_context import let


def number(value: int) -> Any:
    """Return an index literal."""
    return tirx.const(value, "int32")


@attrs.frozen
class Spatial:
    """Windows along one spatial axis: `count` windows of `width` places over `extent` elements."""

    extent: int
    count: int
    width: int

    def element(self, window: Any, place: Any) -> tuple[Any, Any]:
        """Return (element, whether it is valid) at a place of a window."""
        raise NotImplementedError

    @property
    def covering(self) -> int:
        """Return how many windows can hold one element, at most."""
        raise NotImplementedError

    def window(self, element: Any, which: Any) -> tuple[Any, Any]:
        """Return (the `which`-th candidate window for `element`, whether it holds the element)."""
        raise NotImplementedError


@attrs.frozen
class Sliding(Spatial):
    """Windows at a fixed stride."""

    stride: int
    pad: int
    dilation: int

    def element(self, window: Any, place: Any) -> tuple[Any, Any]:
        """Return element w * stride + k * dilation - pad for place k of window w."""
        at = let(window * self.stride + place * self.dilation - number(self.pad))
        return at, m.inside(at, self.extent)

    @property
    def covering(self) -> int:
        """Count the windows over (width - 1) * dilation + 1 elements."""
        return -(-((self.width - 1) * self.dilation + 1) // self.stride)

    def window(self, element: Any, which: Any) -> tuple[Any, Any]:
        """Count backwards from the last window that begins at or before the element."""
        last = tirx.floordiv(element + number(self.pad), number(self.stride))
        window = let(last - which)
        offset = let(element + number(self.pad) - window * self.stride)
        holds = tirx.all(
            m.inside(window, self.count),
            offset <= number((self.width - 1) * self.dilation),
            tirx.floormod(offset, number(self.dilation)) == number(0),
        )
        return window, holds

    def size(self, window: Any, *, with_padding: bool) -> Any:
        """Return how many places of a window count: its elements, and its padding if asked."""
        start = let(window * self.stride - number(self.pad))
        pad = self.pad if with_padding else 0
        end = tirx.min(start + number(self.width), number(self.extent + pad))
        return end - (start if with_padding else tirx.max(start, number(0)))


@attrs.frozen
class Adaptive(Spatial):
    """`count` windows that divide the axis: floor(w n / count) to ceil((w + 1) n / count)."""

    @classmethod
    def of(cls, extent: int, count: int) -> Adaptive:
        """Build windows of the largest width that occurs."""
        width = max(-(-(w + 1) * extent // count) - w * extent // count for w in range(count))
        return cls(extent, count, width)

    @property
    def _share(self) -> int | None:
        """Return how many elements each window has, if all have as many.

        Of a division without a remainder TVM's code generator takes the remainder for another
        variable in each place, and fails where an expression has it twice.
        """
        return None if self.extent % self.count else self.extent // self.count

    def begin(self, window: Any) -> Any:
        """Return the first element of a window."""
        if self._share is not None:
            return window * self._share
        return tirx.floordiv(window * self.extent, number(self.count))

    def end(self, window: Any) -> Any:
        """Return one past the last element of a window."""
        if self._share is not None:
            return (window + 1) * self._share
        return tirx.floordiv((window + 1) * self.extent + (self.count - 1), number(self.count))

    def element(self, window: Any, place: Any) -> tuple[Any, Any]:
        """Return the window's begin plus k for place k."""
        at = let(self.begin(window) + place)
        return at, at < self.end(window)

    @property
    def covering(self) -> int:
        """Return the maximum over all elements."""
        return max(
            -(-(e + 1) * self.count // self.extent) - e * self.count // self.extent
            for e in range(self.extent)
        )

    def window(self, element: Any, which: Any) -> tuple[Any, Any]:
        """Count from the first window that ends after the element."""
        if self.count % self.extent == 0:
            first = element * (self.count // self.extent)
        else:
            first = tirx.floordiv(element * self.count, number(self.extent))
        window = let(first + which)
        begins = self.begin(window) <= element
        return window, tirx.all(window < number(self.count), begins, element < self.end(window))
