# SPDX-License-Identifier: Apache-2.0
"""Functions of PyTorch that the trace decomposes into other functions.

ATen implements each as one op, or checks values on the host. Decomposed before PyTorch
differentiates, their gradients consist of the same few ops: gathers, scatter-adds and arithmetic.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from amp_ir.capture.decompositions.attention import scaled_dot_product_attention
from amp_ir.capture.decompositions.ctc import ctc_loss
from amp_ir.capture.decompositions.deep_copies import deep_copy
from amp_ir.capture.decompositions.indexing import COMPOSED_BY_INDEX
from amp_ir.capture.decompositions.inverse_stft import istft
from amp_ir.capture.decompositions.matrix_exponential import matrix_exp
from amp_ir.capture.decompositions.segments import embedding_bag, segment_reduce
from amp_ir.capture.decompositions.tensor_of_tensors import tensor_of_tensors
from amp_ir.ir.location import current_precision, precision_of_region

# Above this number of rows PyTorch computes Euclidean distances with a matmul.
_ROWS_WITHOUT_PRODUCT = 25


def decompose(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the decomposed result of a call; NotImplemented if PyTorch computes it."""
    function = _COMPOSED.get(func)
    return NotImplemented if function is None else function(*args, **kwargs)


def _wide(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in float32 inside of an autocast region, where PyTorch computes in it."""
    if not torch.is_autocast_enabled(tensors[0].device.type):
        return tensors
    return tuple(tensor.float() for tensor in tensors)


def _in_float32() -> contextlib.AbstractContextManager[None]:
    """Keep what is traced inside in float32, as torch.autocast does; a region of the user's wins.

    |x|^2 - 2 x y + |y|^2 cancels: with low operands of its matmul, what is left of the distance of
    two near rows is rounding.
    """
    is_free = current_precision() == "rules"
    return precision_of_region("float32") if is_free else contextlib.nullcontext()


def _cdist(
    x1: torch.Tensor,
    x2: torch.Tensor,
    p: float = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
) -> torch.Tensor:
    """Return distances of rows, f32[..., n, d] and f32[..., m, d] -> f32[..., n, m].

    A distance of 0 has gradient 0.
    """
    is_many = max(x1.shape[-2], x2.shape[-2]) > _ROWS_WITHOUT_PRODUCT
    by_product = {
        "use_mm_for_euclid_dist_if_necessary": is_many,
        "use_mm_for_euclid_dist": True,
    }
    with _in_float32():
        if p == 2 and by_product.get(compute_mode, False):
            return torch.cdist(x1, x2, p, compute_mode)
        x1, x2 = _wide(x1, x2)
        return _norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def _pdist(input: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """Return distances of each pair of rows, f32[n, d] -> f32[n * (n - 1) / 2]."""
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    with _in_float32():
        (input,) = _wide(input)
        return _norm(input[first] - input[second], p)


def _norm(rows: torch.Tensor, p: float) -> torch.Tensor:
    """Return norms of rows, with gradients as of distances: for p = 0 it is 0, and not none."""
    if p == 1:
        # Its gradient is the sign, which is 0 at NaN; that of a distance stays NaN.
        rows = rows * torch.where(rows.isnan(), math.nan, 1.0)
    norms = torch.linalg.vector_norm(rows, p, dim=-1)
    if p != 0:
        return norms
    return norms + rows.masked_fill(torch.ones_like(rows, dtype=torch.bool), 0.0).sum(-1)


def _grid_sample(
    input: torch.Tensor,
    grid: torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,  # noqa: FBT001 - torch's own signature
) -> torch.Tensor:
    """Return elements of f32[n, c, *space] interpolated at f32[n, *out, axes], last axis first."""
    if mode not in ("bilinear", "nearest"):
        return F.grid_sample(input, grid, mode, padding_mode, align_corners)
    input, grid = _wide(input, grid)
    extents = input.shape[2:]
    places = [
        _inside(_unnormalized(one, extent, align_corners), extent, padding_mode, align_corners)
        for one, extent in zip(reversed(grid.unbind(-1)), extents, strict=True)
    ]
    if mode == "nearest":
        return _taken(input, [one.detach().round() for one in places])
    lower = [one.detach().floor() for one in places]
    result = None
    for corner in itertools.product((0, 1), repeat=len(places)):
        parts = zip(places, lower, corner, strict=True)
        shares = [place - low if up else low + 1 - place for place, low, up in parts]
        at = [low + up for low, up in zip(lower, corner, strict=True)]
        term = _taken(input, at) * functools.reduce(torch.mul, shares).unsqueeze(1)
        result = term if result is None else result + term
    assert result is not None
    return result


def _unnormalized(place: torch.Tensor, extent: int, align_corners: bool | None) -> torch.Tensor:  # noqa: FBT001
    """Map [-1, 1] to positions between the centres (or outer edges) of the outermost elements."""
    return (place + 1) / 2 * (extent - 1) if align_corners else ((place + 1) * extent - 1) / 2


def _inside(
    place: torch.Tensor,
    extent: int,
    padding_mode: str,
    align_corners: bool | None,  # noqa: FBT001
) -> torch.Tensor:
    """Clamp or reflect positions outside of the range; on the border the gradient is 0."""
    if padding_mode == "zeros":
        return place
    if padding_mode == "reflection":
        first, span = (0.0, extent - 1) if align_corners else (-0.5, extent)
        if span == 0:
            return torch.zeros_like(place)
        away = torch.where(place < first, first - place, place - first)
        rest, is_odd = away.fmod(span), (away / span).detach().floor() % 2 == 1
        place = torch.where(is_odd, span - rest, rest) + first
    last = extent - 1
    is_within = (place > 0) & (place < last)
    return torch.where(is_within, place, place.detach().clamp(0, last))


def _taken(x: torch.Tensor, places: list[torch.Tensor]) -> torch.Tensor:
    """Return the elements at integer positions f32[n, *out], 0 outside: f32[n, c, *out]."""
    extents = x.shape[2:]
    flat = torch.zeros_like(places[0], dtype=torch.int64)
    is_within = torch.ones_like(places[0], dtype=torch.bool)
    for place, extent in zip(places, extents, strict=True):
        is_within = is_within & (place >= 0) & (place < extent)
        # Clamped as an integer, since a NaN is in no range.
        flat = flat * extent + place.long().clamp(0, extent - 1)
    ids = flat.flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
    taken = x.flatten(2).gather(2, ids).unflatten(2, flat.shape[1:])
    return torch.where(is_within.unsqueeze(1), taken, 0.0)


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,  # noqa: FBT001, FBT002 - torch's own signature
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute PyTorch's loss without its check for negative variances."""
    if not isinstance(var, torch.Tensor):
        var = input.new_full(input.shape, var)
    elif var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    elif var.shape != input.shape and var.shape != (*input.shape[:-1], 1):
        raise ValueError(f"var is of shape {tuple(var.shape)}, input of {tuple(input.shape)}")
    # The gradient passes the lower limit, as in PyTorch.
    var = var + (var.detach().clamp(min=eps) - var.detach())
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    reductions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mean": torch.mean,
        "sum": torch.sum,
        "none": lambda each: each,
    }
    return reductions[reduction](loss)


def _multinomial(
    input: torch.Tensor,
    num_samples: int,
    replacement: bool = False,  # noqa: FBT001, FBT002 - torch's own signature
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Sample positions by their weights, f32[..., n] -> int64[..., num_samples].

    Draws one number per position from an exponential distribution: the probability that a position
    has the smallest is proportional to its rate. PyTorch samples in the same way.
    """
    if generator is not None:
        return torch.multinomial(input, num_samples, replacement, generator=generator)
    weights = input.detach()
    if not replacement:
        return (weights / torch.empty_like(weights).exponential_()).topk(num_samples).indices
    weights = weights.unsqueeze(-2).expand(*weights.shape[:-1], num_samples, weights.shape[-1])
    times = torch.empty(weights.shape, dtype=input.dtype, device=input.device).exponential_()
    return (weights / times).argmax(-1)


def _fill_diagonal(input: torch.Tensor, fill_value: float, wrap: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002 - torch's own signature
    """Write a number where all positions are equal; PyTorch writes to a view of the memory."""
    if input.ndim < 2 or (input.ndim > 2 and len(set(input.shape)) > 1):
        return input.fill_diagonal_(fill_value, wrap)  # which reports the error
    first, *others = (
        torch.arange(extent, device=input.device).view(-1, *[1] * (input.ndim - axis - 1))
        for axis, extent in enumerate(input.shape)
    )
    if wrap and input.ndim == 2:
        first = first % (input.shape[1] + 1)  # below a row without one, the diagonal begins again
    equal = functools.reduce(torch.logical_and, [first == one for one in others])
    return input.masked_fill_(equal, fill_value)


_COMPOSED: dict[Any, Callable[..., Any]] = {
    torch.cdist: _cdist,
    F.pdist: _pdist,
    F.embedding_bag: embedding_bag,
    torch.segment_reduce: segment_reduce,
    F.grid_sample: _grid_sample,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.ctc_loss: ctc_loss,
    **dict.fromkeys(
        (torch.matrix_exp, torch.linalg.matrix_exp, torch.Tensor.matrix_exp), matrix_exp
    ),
    **dict.fromkeys((torch.istft, torch.Tensor.istft), istft),
    torch.Tensor.__deepcopy__: deep_copy,
    torch.tensor: tensor_of_tensors,
    torch.as_tensor: tensor_of_tensors,
    torch.multinomial: _multinomial,
    torch.Tensor.multinomial: _multinomial,
    torch.Tensor.fill_diagonal_: _fill_diagonal,
    # For who imported it by its name: in its module it is replaced (patches/install.py).
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    **COMPOSED_BY_INDEX,
}
