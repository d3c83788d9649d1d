# SPDX-License-Identifier: Apache-2.0
"""One call or more of every op of the dialect, small: arguments and options."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch


@attrs.frozen
class Case:
    """A call of `op`; `inputs()` makes its tensors, float32 where they are floating."""

    op: str
    inputs: Callable[[], list[torch.Tensor]] = attrs.field(repr=False)
    options: dict[str, Any] = attrs.field(repr=False)
    note: str = ""

    def __str__(self) -> str:
        """The test's name."""
        return self.op.removeprefix("amp_ir.") + (f"-{self.note}" if self.note else "")

    def tensors(self, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """The arguments with floating ones in `dtype`; the same numbers at every call."""
        torch.manual_seed(len(self.op))
        return [one.to(dtype) if one.is_floating_point() else one for one in self.inputs()]


def normal(*shape: int) -> torch.Tensor:
    """Numbers of ordinary size."""
    return torch.randn(shape)


def positive(*shape: int) -> torch.Tensor:
    """Numbers between 0.5 and 1.5."""
    return torch.rand(shape) + 0.5


def integers(*numbers: int) -> torch.Tensor:
    """int64[n]."""
    return torch.tensor(numbers)


def _pair() -> list[torch.Tensor]:
    return [normal(3, 21), normal(3, 21)]


def _state() -> torch.Tensor:
    return torch.tensor([0x1234_5678_9ABC, 7])


_ELU = {"alpha": 1.5, "scale": 1.2, "input_scale": 0.7}
_ACTIVATIONS: list[tuple[str, dict[str, Any]]] = [
    ("gelu_backward", {"approximate": "none"}),
    ("gelu_backward", {"approximate": "tanh"}),
    ("silu_backward", {}),
    ("tanh_backward", {}),
    ("sigmoid_backward", {}),
    ("relu_backward", {"threshold": 0.0}),
    ("leaky_relu_backward", {"slope": 0.1}),
    ("elu", _ELU),
    ("elu_backward", {**_ELU, "is_result": False}),
    ("elu_backward", {**_ELU, "is_result": True}),
    ("softplus", {"beta": 2.0, "threshold": 1.0}),
    ("softplus_backward", {"beta": 2.0, "threshold": 1.0}),
    ("hardtanh_backward", {"min_value": -0.5, "max_value": 0.5}),
    ("hardswish_backward", {}),
    ("hardsigmoid_backward", {}),
    ("mish", {}),
    ("mish_backward", {}),
    ("log_sigmoid", {}),
    ("log_sigmoid_backward", {}),
    ("log1p", {}),
    ("expm1", {}),
    ("softshrink", {"bound": 0.5}),
    ("shrink_backward", {"bound": 0.5}),
]


def _activation_cases() -> list[Case]:
    return [
        Case(
            f"amp_ir.{name}",
            _pair if name.endswith("_backward") else lambda: [normal(3, 21)],
            options,
            "-".join(str(v) for v in options.values() if isinstance(v, str | bool)),
        )
        for name, options in _ACTIVATIONS
    ]


_LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("mse_loss", {}),
    ("l1_loss", {}),
    ("smooth_l1_loss", {"beta": 0.7}),
    ("huber_loss", {"delta": 0.7}),
    ("soft_margin_loss", {}),
    ("binary_cross_entropy", {}),
]


def _loss_inputs(name: str, reduction: str, *, backward: bool) -> list[torch.Tensor]:
    unit = name == "binary_cross_entropy"
    pred, target = (torch.rand(3, 5) if unit else normal(3, 5) for _ in range(2))
    grad = normal(3, 5) if reduction == "none" else normal()
    return [grad, pred, target] if backward else [pred, target]


def _loss_cases() -> list[Case]:
    return [
        Case(
            f"amp_ir.{name}" + ("_backward" if backward else ""),
            lambda name=name, reduction=reduction, backward=backward: _loss_inputs(
                name, reduction, backward=backward
            ),
            {"reduction": reduction, **options},
            reduction,
        )
        for name, options in _LOSSES
        for reduction in ("none", "mean", "sum")
        for backward in (False, True)
    ]


def _nll_cases() -> list[Case]:
    target = integers(1, -100, 3, 2)
    weights = {"has_weight": True}
    cases = []
    for reduction in ("none", "mean", "sum"):
        grad = (4,) if reduction == "none" else ()
        options = {"reduction": reduction}
        backward = {"input_shape": (4, 5), **options}
        cases += [
            Case("amp_ir.nll_loss", lambda: [normal(4, 5), target], options, reduction),
            Case(
                "amp_ir.nll_loss_backward",
                lambda g=grad: [normal(*g), target, torch.tensor(2.5), positive(5)],
                {**backward, **weights},
                reduction,
            ),
        ]
    space = [integers(0, 4, 2, 1, 1, -100).reshape(2, 3)]
    cases += [
        Case(
            "amp_ir.nll_loss",
            lambda: [normal(4, 5), target, positive(5)],
            {"reduction": "mean", **weights},
            "weight",
        ),
        Case(
            "amp_ir.nll_loss",
            lambda: [normal(2, 5, 3), *space],
            {"reduction": "mean"},
            "space",
        ),
        Case(
            "amp_ir.nll_loss_backward",
            lambda: [normal(), *space, torch.tensor(5.0)],
            {"reduction": "mean", "input_shape": (2, 5, 3), "dtype": "float32"},
            "space",
        ),
    ]
    return cases


def _row_normalizations() -> list[Case]:
    def statistics() -> list[torch.Tensor]:
        return [normal(2, 3, 20), normal(2, 3, 20), normal(2, 3, 1), positive(2, 3, 1)]

    def without_mean() -> list[torch.Tensor]:
        grad, x, _, rstd = statistics()
        return [grad, x, rstd]

    last = {"ndim_normalized": 1}
    return [
        Case(
            "amp_ir.layer_norm",
            lambda: [normal(2, 3, 20), positive(20), normal(20)],
            {**last, "eps": 1e-5},
        ),
        Case(
            "amp_ir.layer_norm",
            lambda: [normal(4, 3, 5), normal(3, 5)],
            {"ndim_normalized": 2, "eps": 1e-5, "has_weight": False},
            "bias",
        ),
        Case("amp_ir.layer_norm_backward_input", lambda: [*statistics(), positive(20)], last),
        Case(
            "amp_ir.layer_norm_backward_input", statistics, {**last, "has_weight": False}, "plain"
        ),
        Case("amp_ir.layer_norm_backward_weight", statistics, last),
        Case("amp_ir.rms_norm", lambda: [normal(2, 3, 20), positive(20)], {**last, "eps": 1e-5}),
        Case("amp_ir.rms_norm_backward_input", lambda: [*without_mean(), positive(20)], last),
        Case("amp_ir.rms_norm_backward_weight", without_mean, last),
        Case("amp_ir.softmax_backward", _pair, {"axis": -1}),
        Case("amp_ir.softmax_backward", _pair, {"axis": 0}, "columns"),
        Case("amp_ir.log_softmax_backward", _pair, {"axis": 1}),
    ]


def _channel_normalizations() -> list[Case]:
    def x() -> torch.Tensor:
        return normal(3, 4, 5, 3)

    def by_group() -> list[torch.Tensor]:
        return [x(), x(), normal(3, 2), positive(3, 2)]

    return [
        Case(
            "amp_ir.group_norm",
            lambda: [x(), positive(4), normal(4)],
            {"groups": 2, "eps": 1e-5},
        ),
        Case("amp_ir.group_norm_backward_input", lambda: [*by_group(), positive(4)], {"groups": 2}),
        Case("amp_ir.group_norm_backward_weight", by_group, {"groups": 2}),
        Case(
            "amp_ir.batch_norm",
            lambda: [x(), positive(4), normal(4), normal(4), positive(4)],
            {"momentum": 0.1, "eps": 1e-5},
        ),
        Case(
            "amp_ir.batch_norm",
            lambda: [x()],
            {
                "momentum": 0.1,
                "eps": 1e-5,
                "has_weight": False,
                "has_bias": False,
                "has_running": False,
            },
            "plain",
        ),
        Case(
            "amp_ir.batch_norm_backward",
            lambda: [x(), x(), positive(4), normal(4), positive(4)],
            {},
        ),
        Case(
            "amp_ir.batch_norm_backward",
            lambda: [x(), x(), normal(4), positive(4)],
            {"has_weight": False},
            "plain",
        ),
    ]


_GROUPED = {"strides": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2}
_LINE = {"strides": (1,), "padding": (1,), "dilation": (1,)}


def _convolutions() -> list[Case]:
    x, weight, grad = (2, 4, 7, 8), (6, 2, 3, 2), (2, 6, 4, 6)
    return [
        Case("amp_ir.conv", lambda: [normal(*x), normal(*weight)], _GROUPED),
        Case("amp_ir.conv", lambda: [normal(2, 3, 9), normal(4, 3, 3)], _LINE, "1d"),
        Case(
            "amp_ir.conv_backward_input",
            lambda: [normal(*grad), normal(*weight)],
            {**_GROUPED, "input_shape": x},
        ),
        Case(
            "amp_ir.conv_backward_weight",
            lambda: [normal(*grad), normal(*x)],
            {**_GROUPED, "weight_shape": weight},
        ),
        Case(
            "amp_ir.conv_transpose",
            lambda: [normal(*grad), normal(*weight)],
            {**_GROUPED, "output_shape": x},
        ),
    ]


_WINDOW = {"kernel": (3, 2), "strides": (2, 1), "padding": (1, 0)}


def _max_indices(pool: Callable[..., Any], shape: tuple[int, ...], *args: Any) -> torch.Tensor:
    return pool(normal(*shape), *args)[1]


def _poolings() -> list[Case]:
    shape, out = (2, 3, 9, 7), (2, 3, 5, 5)
    dilated = {**_WINDOW, "dilation": (1, 2), "ceil_mode": True}
    functional = torch.nn.functional
    return [
        Case("amp_ir.max_pool", lambda: [normal(*shape)], dilated),
        Case(
            "amp_ir.max_pool",
            lambda: [normal(2, 3, 9)],
            {"kernel": (3,), "strides": (3,), "padding": (0,), "dilation": (1,)},
            "1d",
        ),
        Case(
            "amp_ir.max_pool_backward",
            lambda: [
                normal(*out),
                _max_indices(functional.max_pool2d_with_indices, shape, *dilated.values()),
            ],
            {**dilated, "input_shape": shape},
        ),
        Case("amp_ir.avg_pool", lambda: [normal(*shape)], {**_WINDOW, "ceil_mode": True}),
        Case(
            "amp_ir.avg_pool",
            lambda: [normal(*shape)],
            {**_WINDOW, "count_include_pad": False},
            "elements",
        ),
        Case("amp_ir.avg_pool", lambda: [normal(*shape)], {**_WINDOW, "divisor": 4}, "divisor"),
        Case(
            "amp_ir.avg_pool_backward",
            lambda: [normal(2, 3, 5, 6)],
            {**_WINDOW, "count_include_pad": False, "input_shape": shape},
        ),
        Case("amp_ir.adaptive_avg_pool", lambda: [normal(*shape)], {"output_size": (4, 3)}),
        Case(
            "amp_ir.adaptive_avg_pool_backward",
            lambda: [normal(2, 3, 4, 3)],
            {"input_shape": shape, "ndim_space": 2},
        ),
        Case("amp_ir.adaptive_max_pool", lambda: [normal(*shape)], {"output_size": (4, 3)}),
        Case(
            "amp_ir.adaptive_max_pool_backward",
            lambda: [
                normal(2, 3, 4, 3),
                _max_indices(functional.adaptive_max_pool2d_with_indices, shape, (4, 3)),
            ],
            {"input_shape": shape, "ndim_space": 2},
        ),
    ]


def _places() -> list[Case]:
    repeated = integers(2, 0, 2, 2)
    return [
        Case("amp_ir.embedding", lambda: [normal(5, 20), integers(4, 0, 4)], {}),
        Case(
            "amp_ir.embedding_backward",
            lambda: [normal(4, 20), repeated],
            {"num_embeddings": 5, "padding_idx": 0},
        ),
        Case("amp_ir.index", lambda: [normal(4, 5, 6), integers(0, -1, 3)], {"axes": (1,)}),
        Case(
            "amp_ir.index",
            lambda: [normal(4, 5, 6), integers(0, -1), integers(2)],
            {"axes": (0, 2)},
            "apart",
        ),
        Case(
            "amp_ir.index_put",
            lambda: [normal(4, 5, 6), normal(4, 4, 6), repeated],
            {"axes": (1,), "accumulate": True},
            "add",
        ),
        Case(
            "amp_ir.index_put",
            lambda: [normal(4, 5), normal(2), integers(0, -1), integers(2, 3)],
            {"axes": (0, 1)},
        ),
        Case(
            "amp_ir.scatter_add",
            lambda: [normal(4, 5), torch.randint(0, 5, (3, 7)), normal(3, 8)],
            {"axis": 1},
        ),
    ]


def _random_cases() -> list[Case]:
    return [
        Case("amp_ir.random_uniform", lambda: [_state()], {"shape": (3, 50), "index": 4}),
        Case("amp_ir.random_normal", lambda: [_state()], {"shape": (3, 50), "index": 4}),
        Case("amp_ir.dropout", lambda: [normal(3, 50), _state()], {"p": 0.3, "index": 4}),
        Case(
            "amp_ir.dropout_backward",
            lambda: [normal(3, 50), normal(3, 50) > 0],
            {"scale": 1.25},
        ),
    ]


def _loss_scale_cases() -> list[Case]:
    def gradients(last: float) -> list[torch.Tensor]:
        return [normal(3, 5), normal(7), torch.tensor([1.0, last]), torch.tensor(8.0)]

    cases = [
        Case("amp_ir.scale_loss", lambda: [normal(5, 3), torch.tensor(8.0)], {}),
        Case("amp_ir.scale_loss", lambda: [normal(), torch.tensor(8.0)], {}, "scalar"),
        Case("amp_ir.unscale", lambda: [normal(5, 3), torch.tensor(8.0)], {}),
    ]
    cases += [
        Case("amp_ir.all_finite", functools.partial(gradients, last), {}, str(last))
        for last in (2.0, math.inf, -math.inf, math.nan)
    ]
    cases.append(Case("amp_ir.all_finite", lambda: [normal(), torch.tensor(8.0)], {}, "scalar"))
    options = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    states = itertools.product((0, 2), (1, 2), (False, True))
    for growth, hysteresis, found in states:
        cases.append(
            Case(
                "amp_ir.update_scale",
                lambda g=growth, h=hysteresis, f=found: [
                    torch.tensor(16.0),
                    torch.tensor(g, dtype=torch.int32),
                    torch.tensor(h, dtype=torch.int32),
                    torch.tensor(f),
                ],
                {**options, "hysteresis": 2, "min_scale": 10.0, "max_scale": 24.0},
                f"{growth}-{hysteresis}-{found}",
            )
        )
    return cases


def attention_options(
    *, has_mask: bool = False, dropout_p: float = 0.0, is_causal: bool = False
) -> dict[str, Any]:
    """All options of attention."""
    return {
        "has_mask": has_mask,
        "dropout_p": dropout_p,
        "index": 2,
        "is_causal": is_causal,
        "scale": 0.3,
    }


def blind_row_mask() -> torch.Tensor:
    """bool[2, 1, 7, 9] whose third row sees nothing."""
    mask = normal(2, 1, 7, 9) > 0
    mask[0, 0, 2] = False
    return mask


ATTENTION: dict[str, tuple[dict[str, Any], Callable[[], list[torch.Tensor]]]] = {
    "plain": (attention_options(), list),
    "causal": (attention_options(is_causal=True), list),
    "mask": (attention_options(has_mask=True), lambda: [blind_row_mask()]),
    "bias": (attention_options(has_mask=True, is_causal=True), lambda: [normal(7, 9)]),
    "dropout": (
        attention_options(has_mask=True, dropout_p=0.3),
        lambda: [blind_row_mask(), _state()],
    ),
}


def attention_inputs() -> list[torch.Tensor]:
    """q, k, v."""
    return [normal(2, 3, 7, 8), normal(2, 3, 9, 8), normal(2, 3, 9, 4)]


def _attention_cases() -> list[Case]:
    cases = []
    for note, (options, rest) in ATTENTION.items():

        def scores() -> torch.Tensor:
            return normal(2, 3, 7, 9)

        def lse() -> torch.Tensor:
            return positive(2, 3, 7) + 2.0

        def out() -> torch.Tensor:
            return normal(2, 3, 7, 4)

        cases += [
            Case(
                "amp_ir.attention",
                lambda rest=rest: [*attention_inputs(), *rest()],
                options,
                note,
            ),
            Case(
                "amp_ir.attention_backward",
                lambda rest=rest: [out(), *attention_inputs(), out(), lse(), *rest()],
                options,
                note,
            ),
            Case(
                "amp_ir.attention_probabilities",
                lambda rest=rest: [scores(), *rest()],
                options,
                note,
            ),
            Case(
                "amp_ir.attention_weights",
                lambda rest=rest: [scores(), lse(), *rest()],
                options,
                note,
            ),
            Case(
                "amp_ir.attention_score_gradient",
                lambda rest=rest: [scores(), lse(), scores(), out(), out(), *rest()],
                options,
                note,
            ),
        ]
    return cases


STEPS, BATCH, WIDTH = 3, 2, 5


def lstm_inputs() -> list[torch.Tensor]:
    """gates, weight, hidden and cell."""
    sizes = (STEPS, BATCH, 4 * WIDTH), (4 * WIDTH, WIDTH), (BATCH, WIDTH), (BATCH, WIDTH)
    return [normal(*size) for size in sizes]


def gru_inputs() -> list[torch.Tensor]:
    """gates, weight, bias and hidden."""
    sizes = (STEPS, BATCH, 3 * WIDTH), (3 * WIDTH, WIDTH), (3 * WIDTH,), (BATCH, WIDTH)
    return [normal(*size) for size in sizes]


def rnn_inputs() -> list[torch.Tensor]:
    """gates, weight and hidden."""
    return [normal(STEPS, BATCH, WIDTH), normal(WIDTH, WIDTH), normal(BATCH, WIDTH)]


def _recurrence_cases() -> list[Case]:
    def kept() -> torch.Tensor:
        return torch.rand(STEPS, BATCH, 4 * WIDTH)

    def above(*, has_cell: bool) -> list[torch.Tensor]:
        last = [normal(BATCH, WIDTH) for _ in range(1 + has_cell)]
        return [normal(STEPS, BATCH, WIDTH), *last]

    def states() -> torch.Tensor:
        return normal(STEPS + 1, BATCH, WIDTH)

    inputs: dict[str, Callable[[], list[torch.Tensor]]] = {
        "lstm": lstm_inputs,
        "lstm_backward": lambda: [*above(has_cell=True), kept(), states(), normal(20, 5)],
        "gru": gru_inputs,
        "gru_backward": lambda: [*above(has_cell=False), kept(), states(), normal(15, 5)],
        "rnn_tanh": rnn_inputs,
        "rnn_tanh_backward": lambda: [*above(has_cell=False), states().tanh(), normal(5, 5)],
        "rnn_relu": rnn_inputs,
        "rnn_relu_backward": lambda: [*above(has_cell=False), states().relu(), normal(5, 5)],
    }
    return [
        Case(f"amp_ir.{name}", make, {"reverse": reverse}, "reverse" if reverse else "")
        for name, make in inputs.items()
        for reverse in (False, True)
    ]


# Ops that become others before kernels are made.
EXPANDED = frozenset(
    f"amp_ir.{name}{suffix}"
    for name in ("attention", "lstm", "gru", "rnn_tanh", "rnn_relu")
    for suffix in ("", "_backward")
) | {"amp_ir.external_call"}
# Ops that become calls of the process group.
COLLECTIVES = frozenset(
    f"amp_ir.{name}{suffix}"
    for name in ("all_reduce", "broadcast")
    for suffix in ("", "_start", "_wait")
)
# Those of ranks that split what they exchange, with options of their own.
SPLIT = {
    "amp_ir.reduce_scatter_start": {"offsets": (0, 32)},
    "amp_ir.reduce_scatter_wait": {"offsets": (0, 32), "parts": (0, 2, 15, 1, 0, 7)},
    "amp_ir.all_gather_start": {"offsets": (32, 64)},
    "amp_ir.all_gather_wait": {"offsets": (32, 64), "shapes": "4x8,33", "places": (0, 32)},
}
EXPANDED |= COLLECTIVES | set(SPLIT)


def _collective_cases() -> list[Case]:
    pair = {"ranks": 4, "group": 0, "bucket": 1}

    def tensors() -> list[torch.Tensor]:
        return [normal(3, 5), normal(7)]

    whole = [Case(f"amp_ir.{name}", one, {"ranks": 4}) for name in ("all_reduce", "broadcast")]
    halves = sorted(one for one in COLLECTIVES if one.endswith(("_start", "_wait")))
    average = Case("amp_ir.average", one, {"ranks": 3})
    split = [
        Case(name, tensors, {**pair, "size": 128, **options}) for name, options in SPLIT.items()
    ]
    return [*whole, average, *(Case(name, tensors, pair) for name in halves), *split]


def one() -> list[torch.Tensor]:
    return [normal(3, 5)]


CASES: list[Case] = [
    Case("amp_ir.cast", lambda: [normal(3, 20)], {"dtype": "bfloat16"}),
    *_activation_cases(),
    *_loss_cases(),
    *_nll_cases(),
    *_row_normalizations(),
    *_channel_normalizations(),
    *_convolutions(),
    *_poolings(),
    *_places(),
    *_random_cases(),
    *_loss_scale_cases(),
    *_attention_cases(),
    *_recurrence_cases(),
    *_collective_cases(),
    Case(
        "amp_ir.checked_lengths",
        lambda: [integers(7, 4), integers(6, 3)],
        {"least": 0, "extent": 7, "message": "lengths are 1 to 7"},
    ),
    Case(
        "amp_ir.external_call",
        lambda: [positive(3, 5)],
        {
            "op": "aten::lgamma.default",
            "arguments": '[[{"tensor": 0}], {}]',
            "reads": ["float32"],
            "results": '[[[3, 5], "float32"]]',
        },
    ),
]
