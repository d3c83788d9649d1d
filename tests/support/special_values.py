# SPDX-License-Identifier: Apache-2.0
"""The table of ops and of the values at which they must be what PyTorch's are.

Each overload that has a converter stands in ROWS (made from its schema where that says enough) or
in EXCLUDED with the reason. A row's arguments are made of `specials(dtype)`: NaN, infinities,
signed zeros, subnormals, ends of the range, ties, the places where formulas change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch

from amp_ir.importer.converters import CONVERTERS

aten = torch.ops.aten
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool]

Arguments = Callable[[torch.dtype], list[tuple[Any, ...]]]


@attrs.frozen
class Row:
    """Calls of one overload; `arguments(dtype)` makes their arguments, first the tensors.

    `by_row`: a result mixes elements, so that errors are measured by the largest of its row.
    `dtypes`: those that are asked, where eager takes them.
    """

    overload: Any
    arguments: Arguments = attrs.field(repr=False)
    by_row: bool = False
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES)
    options: dict[str, Any] = attrs.field(factory=dict)


def specials(dtype: torch.dtype) -> torch.Tensor:
    """[n] special values of a dtype; n is not a multiple of a vector."""
    if dtype == torch.bool:
        return torch.tensor([False, True, True])
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        numbers = {
            limits.min,
            limits.min + 1,
            limits.max,
            limits.max - 1,
            0,
            1,
            2,
            3,
            5,
            7,
            31,
            100,
        }
        numbers |= {-1, -2, -3, -5, -7, -100} if limits.min else set()
        return torch.tensor(sorted(numbers), dtype=dtype)
    limits = torch.finfo(dtype)
    least = limits.tiny * limits.eps
    both = [0.0, 1.0, 0.5, 1.5, 2.0, 2.5, 3.0, 5.0, 3.798, 5.4, 0.1, 1e-3, 1e-7, 1e-30, 10.0, 20.0,
            50.0, 87.3, 88.0, 103.0, 104.5, 1e3, 1e20, math.pi, math.pi / 2, limits.max,
            limits.tiny, limits.tiny / 2, least, math.inf]  # fmt: skip
    others = [math.nan, 0.99999, 1.00001, 20.5, 88.7, 88.8, 1e5, 1e10, limits.eps]
    numbers_ = [sign * one for one in both for sign in (1.0, -1.0)] + others
    return torch.tensor(numbers_, dtype=torch.float64).to(dtype)


def one(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """One tensor."""
    return [(specials(dtype),)]


def _pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values = specials(dtype)
    return values.repeat_interleave(len(values)), values.repeat(len(values))


def two(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Every pair of values."""
    return [_pairs(dtype)]


def divided(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Every pair, but of integers none by 0 (refused) nor the lowest by -1 (which ends PyTorch)."""
    x, y = _pairs(dtype)
    if dtype.is_floating_point or dtype == torch.bool:
        return [(x, y)]
    ends = (y == 0) | ((x == torch.iinfo(dtype).min) & (y.long() == -1))
    return [(x, torch.where(ends, 3, y))]


def with_numbers(*numbers: Any) -> Arguments:
    """One tensor beside each of some numbers."""
    return lambda dtype: [
        (specials(dtype), number)
        for number in numbers
        if dtype.is_floating_point or isinstance(number, int)
    ]


def with_options(*options: Any) -> Arguments:
    """One tensor and further arguments."""
    return lambda dtype: [(specials(dtype), *options)]


def rows(dtype: torch.dtype) -> torch.Tensor:
    """[n, 5]: values that stand beside each other, in several orders."""
    values = specials(dtype)
    if len(values) < 8:
        return torch.stack([values[[0, 0, 0, 0, 0]], values[[1, 1, 1, 1, 1]],
                            values[[0, 1, 0, 1, 1]]])  # fmt: skip
    mixed = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]
    return torch.cat([values.unfold(0, 5, 1), mixed.unfold(0, 5, 2)])


def along(*options: Any) -> Arguments:
    """Rows, and further arguments."""
    return lambda dtype: [(rows(dtype), *options)]


def graded(*options: Any) -> Arguments:
    """(gradient, x, options) of every pair."""
    return lambda dtype: [(*_pairs(dtype), *options)]


_FLOAT = tuple(FLOATS)
# Where PyTorch has no kernel of a gradient in float16 on every processor.
_MOST = (torch.float32, torch.float64, torch.bfloat16)


def _elu_backward(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    grad, x = _pairs(dtype)
    return [(grad, *options, False, x) for options in ((1.5, 1.2, 0.7), (0.0, 1.0, 1.0))]


def _log_sigmoid_backward(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    grad, x = _pairs(dtype)
    return [(grad, x, torch.exp(-x.abs()))]


def _prelu(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    return [(specials(dtype), torch.full((1,), 0.25, dtype=dtype))]


def _three(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    x, y = _pairs(dtype)
    return [(x, y, y.flip(0))]


def _chosen(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    x, y = _pairs(dtype)
    return [(torch.arange(len(x)) % 3 == 0, x, y)]


def _sorted_bounds(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    values = specials(dtype)
    return [(values, values[values == values].unique())]


def _in_bounds(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    ((values, bounds),) = _sorted_bounds(dtype)
    return [(bounds, values)]


def _loss(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    return [(*_pairs(dtype), reduction) for reduction in (0, 1, 2)]


def _loss_gradient(*options: Any) -> Arguments:
    return lambda dtype: [(torch.ones(()).to(dtype), *_pairs(dtype), 2, *options)]


def _probabilities(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    values = torch.tensor([0.0, 1.0, 0.5, 1e-7, 0.999, torch.finfo(dtype).tiny]).to(dtype)
    return [(values.repeat_interleave(6), values.repeat(6), None, k) for k in (0, 1)]


def _probability_gradient(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    pred, target, *_ = _probabilities(dtype)[0]
    return [(torch.ones(()).to(dtype), pred, target, None, 2)]


def _classes(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    x = rows(dtype)
    return [(x, torch.arange(len(x)) % 5, None, 0, -100)]


def _images(dtype: torch.dtype, rank: int) -> torch.Tensor:
    return rows(dtype).flatten()[: 4**rank * 2].reshape(1, 2, *[4] * rank)


def _pooled(rank: int, *options: Any) -> Arguments:
    return lambda dtype: [(_images(dtype, rank), [2] * rank, *options)]


def _adaptive(rank: int) -> Arguments:
    return lambda dtype: [(_images(dtype, rank), [3] * rank)]


def _normal(dtype: torch.dtype) -> torch.Tensor:
    """[n, 5] of ordinary numbers, with NaN and infinities in some rows."""
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    x[1, 2], x[3, 0], x[4, 4] = math.nan, math.inf, -math.inf
    x[5], x[6] = 0.0, 3.0
    return x.to(dtype)


def _softmax_gradient(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    y = torch.softmax(_normal(dtype).double(), 1).to(dtype)
    return [(_normal(dtype).flip(0), y, 1, dtype)]


_NUMBERS = (0, 1, 2, -3, 0.5, -0.0, math.inf, math.nan)
_REAL_EXPONENTS = (0, 1, 2, 3, 4, 0.5, 1.5, 2.3, -0.5, -1.0, -2.0, -3.0, math.inf, math.nan)
_DIVISORS = (1, 2, -3, 0.7, -0.0, 1e-3, math.inf, math.nan)


def _row_table() -> dict[Any, Row]:
    table: dict[Any, Row] = {}

    def add(arguments: Arguments, *overloads: Any, **fields: Any) -> None:
        for overload in overloads:
            table[overload] = Row(overload, arguments, **fields)

    # Activations.
    add(with_options(0.5, 2.0), aten.threshold.default)
    add(graded(0.5), aten.threshold_backward.default, aten.softshrink_backward.default,
        aten.hardshrink_backward.default, dtypes=_FLOAT)  # fmt: skip
    add(lambda dtype: [(*_pairs(dtype), slope, False) for slope in (0.1, 0.0)],
        aten.leaky_relu_backward.default, dtypes=_FLOAT)  # fmt: skip
    add(with_numbers(0.01, 0.0), aten.leaky_relu.default, dtypes=_FLOAT)
    add(with_numbers(1.0, 0.5, math.inf), aten.celu.default, dtypes=_FLOAT)
    add(_elu_backward, aten.elu_backward.default, dtypes=_FLOAT)
    add(graded(1.0, 20.0), aten.softplus_backward.default, dtypes=_FLOAT)
    add(graded(-1.0, 1.0), aten.hardtanh_backward.default, dtypes=_FLOAT)
    add(_log_sigmoid_backward, aten.log_sigmoid_backward.default, dtypes=_FLOAT)
    add(_prelu, aten._prelu_kernel.default, aten.prelu.default, dtypes=_FLOAT)
    add(lambda dtype: [(*_pairs(dtype), torch.full((1,), 0.25, dtype=dtype))],
        aten._prelu_kernel_backward.default, dtypes=_FLOAT)  # fmt: skip
    # Arithmetic.
    add(divided, aten.floor_divide.default, aten.fmod.Tensor, aten.remainder.Tensor)
    add(with_numbers(*_DIVISORS), aten.floor_divide.Scalar, aten.fmod.Scalar,
        aten.remainder.Scalar)  # fmt: skip
    add(divided, aten.div.Tensor_mode, options={"rounding_mode": "trunc"})
    add(with_numbers(*_DIVISORS), aten.div.Scalar_mode, options={"rounding_mode": "floor"})
    add(lambda dtype: [(7, specials(dtype)[specials(dtype) != 0])], aten.remainder.Scalar_Tensor)
    add(with_numbers(*_NUMBERS), aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar,
        aten.div.Scalar, aten.rsub.Scalar)  # fmt: skip
    add(with_numbers(*_REAL_EXPONENTS), aten.pow.Tensor_Scalar)
    add(lambda dtype: [(base, specials(dtype)) for base in (2, 0.5, 0.0, -1.0, -2.0)
                       if dtype.is_floating_point], aten.pow.Scalar)  # fmt: skip
    # One element at a time.
    comparisons = (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
    add(with_numbers(*_NUMBERS), *(packet.Scalar for packet in comparisons))
    bitwise = (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor)
    add(with_numbers(5), *(packet.Scalar for packet in bitwise), dtypes=tuple(INTEGERS))
    shifts = (aten.bitwise_left_shift, aten.bitwise_right_shift)
    add(with_numbers(0, 3, 33, 64), *(packet.Tensor_Scalar for packet in shifts),
        aten.__lshift__.Scalar, aten.__rshift__.Scalar, dtypes=tuple(INTEGERS))  # fmt: skip
    add(with_options(-1, 2), aten.clamp.default, aten.hardtanh.default)
    add(_three, aten.clamp.Tensor)
    add(with_options(1), aten.clamp_min.default, aten.clamp_max.default)
    add(_chosen, aten.where.self)
    add(lambda dtype: [(specials(dtype) > 1, specials(dtype), 2)], aten.where.ScalarOther)
    add(lambda dtype: [(specials(dtype) > 1, 2, specials(dtype))], aten.where.ScalarSelf)
    add(lambda dtype: [(specials(dtype), specials(dtype) > 1, 1)], aten.masked_fill.Scalar)
    add(lambda dtype: [(specials(dtype), specials(dtype) > 1, torch.ones((), dtype=dtype))],
        aten.masked_fill.Tensor)  # fmt: skip
    # Reductions and orders.
    add(along(), aten.sum.default, aten.mean.default, aten.prod.default, aten.var.default,
        aten.std.correction, aten.linalg_vector_norm.default, by_row=True)  # fmt: skip
    add(along([1]), aten.sum.dim_IntList, aten.mean.dim, aten.var.correction, aten.var.dim,
        aten.var_mean.correction, by_row=True)  # fmt: skip
    add(along(1), aten.prod.dim_int, aten.cumsum.default, aten.cumprod.default, by_row=True)
    add(lambda dtype: [(rows(dtype), rows(dtype).flip(0))], aten.dist.default, by_row=True)
    add(along([1]), aten.amax.default, aten.amin.default, aten.any.dims, aten.all.dims)
    add(along(1), aten.any.dim, aten.all.dim, aten.max.dim, aten.min.dim, aten.argmax.default,
        aten.argmin.default)  # fmt: skip
    add(along(), aten.max.default, aten.min.default, aten.any.default, aten.all.default)
    add(along(1), aten.median.dim)
    add(along(2, 1), aten.kthvalue.default)
    add(along(), aten.sort.default, aten.argsort.default)
    add(lambda dtype: [(rows(dtype),)], aten.sort.stable, options={"stable": True})
    add(along(3, 1), aten.topk.default)
    add(_sorted_bounds, aten.bucketize.Tensor)
    add(_in_bounds, aten.searchsorted.Tensor)
    # Softmax and norms.
    add(lambda dtype: [(_normal(dtype), 1, False)], aten._softmax.default,
        aten._log_softmax.default, dtypes=_FLOAT, by_row=True)  # fmt: skip
    add(lambda dtype: [(_normal(dtype), 1)], aten._safe_softmax.default, dtypes=_FLOAT, by_row=True)
    add(_softmax_gradient, aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default, dtypes=_FLOAT, by_row=True)  # fmt: skip
    add(lambda dtype: [(_normal(dtype), [5], None, None, 1e-5)], aten.native_layer_norm.default,
        dtypes=_MOST, by_row=True)  # fmt: skip
    add(lambda dtype: [(_normal(dtype), [5], None, 1e-5)], aten._fused_rms_norm.default,
        dtypes=_MOST, by_row=True)  # fmt: skip
    add(lambda dtype: [(_normal(dtype), None, None, 12, 5, 1, 1, 1e-5)],
        aten.native_group_norm.default, dtypes=_MOST, by_row=True)  # fmt: skip
    # Losses.
    add(_loss, aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
        aten.soft_margin_loss.default, dtypes=_MOST, by_row=True)  # fmt: skip
    add(_loss_gradient(), aten.mse_loss_backward.default, aten.soft_margin_loss_backward.default,
        dtypes=_MOST)  # fmt: skip
    add(_loss_gradient(1.0), aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
        dtypes=_MOST)  # fmt: skip
    add(_probabilities, aten.binary_cross_entropy.default, dtypes=_MOST, by_row=True)
    add(_probability_gradient, aten.binary_cross_entropy_backward.default, dtypes=_MOST)
    add(_classes, aten.nll_loss_forward.default, dtypes=_MOST)
    # Pooling.
    for rank in (1, 2, 3):
        add(_pooled(rank), CONVERTERS_BY_NAME[f"aten.max_pool{rank}d_with_indices.default"],
            dtypes=_MOST)  # fmt: skip
        add(_pooled(rank), CONVERTERS_BY_NAME[f"aten.avg_pool{rank}d.default"], dtypes=_MOST,
            by_row=True)  # fmt: skip
        add(_adaptive(rank), CONVERTERS_BY_NAME[f"aten.adaptive_max_pool{rank}d.default"],
            dtypes=_MOST)  # fmt: skip
    add(_adaptive(1), aten.adaptive_avg_pool1d.default, dtypes=_MOST, by_row=True)
    add(_adaptive(2), aten._adaptive_avg_pool2d.default, dtypes=_MOST, by_row=True)
    add(_adaptive(3), aten._adaptive_avg_pool3d.default, dtypes=_MOST, by_row=True)
    return table


CONVERTERS_BY_NAME = {str(overload): overload for overload in CONVERTERS}
_SUMS = "a gradient that is a sum: test_dialect_gradients.py and test_converters_losses.py hold it"
_MOVES = "moves elements and computes none"
_PRODUCTS = "sums of products, of libraries: test_native_*.py hold them against float64"
# Converters by file, or one by one -> why they have no row.
EXCLUDED: dict[str, str] = {
    "shapes": _MOVES,
    "slices": _MOVES,
    "indexing": _MOVES,
    "padding": _MOVES,
    "creation": "takes no values",
    "random": "draws numbers",
    "resampling": "sums of neighbours: test_infinities_of_neighbours.py holds them",
    "linear_algebra": _PRODUCTS,
    "convolution": _PRODUCTS,
    "attention": _PRODUCTS,
    "recurrence": _PRODUCTS,
    "loss_scale": "has no eager form; test_loss_scale_steps.py holds it",
    "collectives": "is between ranks; tests/distributed hold it",
    "batch_normalization": "over a whole batch: test_converters_layers.py holds it",
    **{
        name: _SUMS
        for name in (
            "aten.native_layer_norm_backward.default aten._fused_rms_norm_backward.default "
            "aten.native_group_norm_backward.default aten._weight_norm_interface_backward.default "
            "aten.nll_loss_backward.default aten.nll_loss2d_backward.default "
            "aten.multi_margin_loss_backward.default aten.max_pool2d_with_indices_backward.default "
            "aten.max_pool3d_with_indices_backward.default aten.avg_pool2d_backward.default "
            "aten.avg_pool3d_backward.default aten._adaptive_avg_pool2d_backward.default "
            "aten._adaptive_avg_pool3d_backward.default aten.adaptive_max_pool2d_backward.default "
            "aten.adaptive_max_pool3d_backward.default"
        ).split()
    },
    "aten.nll_loss2d_forward.default": "as nll_loss_forward, with axes behind",
    "aten.where.Scalar": "takes no tensor but the condition",
    "aten.copy.default": "a cast, as _to_copy",
    "amp_ir.checked_lengths.default": "integers, which a check of the step refuses first",
    "aten._to_copy.default": "all pairs of dtypes have a test of their own",
}


def _by_schema(overload: Any) -> Row | None:
    """The row of an overload of one or two tensors."""
    if not isinstance(overload, torch._ops.OpOverload):
        return None
    needed = [str(a.type) for a in overload._schema.arguments if not a.has_default_value()]
    if needed == ["Tensor"]:
        return Row(overload, one)
    return Row(overload, two) if needed == ["Tensor", "Tensor"] else None


def is_excluded(overload: Any) -> bool:
    """Whether an overload, or the file of its converter, is in EXCLUDED."""
    module = CONVERTERS[overload].__module__.rsplit(".", 1)[-1]
    return module in EXCLUDED or str(overload) in EXCLUDED


def _all_rows() -> list[Row]:
    table = _row_table()
    for overload in CONVERTERS:
        if overload not in table and not is_excluded(overload):
            made = _by_schema(overload)
            if made is not None:
                table[overload] = made
    return list(table.values())


ROWS = _all_rows()
