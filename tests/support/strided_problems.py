# SPDX-License-Identifier: Apache-2.0
"""Random tensors in any memory order, and products of such, for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (of the operands, of the result)
DTYPE_PAIRS = [(d, d) for d in DTYPES] + [(d, torch.float32) for d in DTYPES[1:]]

# A dim of one element may be said to have any stride: it is never taken.
IDLE_STRIDES = st.sampled_from([None, 0, 1, 2, 5, 1000])


@st.composite
def views(draw: st.DrawFn, dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A random tensor of `dims` that is laid out in any order, with gaps, at any offset."""
    order = draw(st.permutations(range(len(dims))))
    gaps = [draw(st.integers(0, 2)) for _ in dims]
    # The innermost dim has gaps too, in one case of four.
    spread = 2 if draw(st.integers(0, 3)) == 0 else 1
    whole = [dims[d] + gap for d, gap in zip(order, gaps, strict=True)]
    t = torch.randn(*whole, spread).to(dtype)
    for axis, (d, gap) in enumerate(zip(order, gaps, strict=True)):
        start = draw(st.integers(0, gap))
        t = t.narrow(axis, start, dims[d])
    return draw(idle_strides(t[..., 0].permute([order.index(d) for d in range(len(dims))])))


@st.composite
def idle_strides(draw: st.DrawFn, t: torch.Tensor) -> torch.Tensor:
    """The same memory with other strides for the dims of one element."""
    drawn = [draw(IDLE_STRIDES) if n == 1 else None for n in t.shape]
    strides = [old if new is None else new for old, new in zip(t.stride(), drawn, strict=True)]
    return t.as_strided(t.shape, strides)


@st.composite
def problems(
    draw: st.DrawFn, sizes: Sequence[int] = (1, 2, 3, 8), *, most_batch_dims: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b and the place of a @ b: any extents among `sizes`, batch dims that broadcast."""
    m, n, k = (draw(st.sampled_from(sizes)) for _ in range(3))
    batch = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=most_batch_dims))
    low, out = draw(st.sampled_from(DTYPE_PAIRS))

    def operand(rows: int, columns: int) -> torch.Tensor:
        kept = draw(st.integers(0, len(batch)))
        dims = [n if draw(st.booleans()) else 1 for n in batch[len(batch) - kept :]]
        t = draw(views([*dims, rows, columns], low))
        if draw(st.booleans()):
            t = t.expand(*batch[len(batch) - kept :], rows, columns)
        return t

    return operand(m, k), operand(k, n), draw(views([*batch, m, n], out))


def exact_product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, float]:
    """a @ b + bias in float64, and the largest sum of the terms' magnitudes.

    Sums may cancel: what is rounded on the way is as large as that.
    """
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    return exact, float(size.max()) if size.numel() else 1.0
