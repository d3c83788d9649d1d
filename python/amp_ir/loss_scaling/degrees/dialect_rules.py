# SPDX-License-Identifier: Apache-2.0
"""Degree rules of the dialect's ops; relax_rules.py defines what a rule means."""

from __future__ import annotations

from amp_ir.loss_scaling.degrees.degree import ZERO, Degree, Special
from amp_ir.loss_scaling.degrees.operands import (
    CannotTell,
    DegreesDiffer,
    Known,
    NotScaled,
    Operands,
)
from amp_ir.loss_scaling.degrees.relax_rules import (
    cast,
    every,
    linear_in_first,
    plain,
    product,
    rule_for,
    times,
)


def _named(names: str) -> list[str]:
    return [f"amp_ir.{name}" for name in names.split()]


rule_for("amp_ir.cast")(cast)
rule_for(*_named("conv conv_backward_input conv_backward_weight conv_transpose scale_loss"))(
    product
)
rule_for(
    *_named(
        "dropout_backward avg_pool avg_pool_backward adaptive_avg_pool adaptive_avg_pool_backward "
        "max_pool_backward adaptive_max_pool_backward embedding embedding_backward index "
        "softmax_backward log_softmax_backward gelu_backward silu_backward tanh_backward "
        "sigmoid_backward elu_backward softplus_backward hardtanh_backward hardswish_backward "
        "hardsigmoid_backward mish_backward log_sigmoid_backward shrink_backward "
        "nll_loss_backward smooth_l1_loss_backward huber_loss_backward "
        "binary_cross_entropy_backward soft_margin_loss_backward group_norm_backward_input "
        "layer_norm_backward_input rms_norm_backward_input rms_norm_backward_weight "
        "all_reduce broadcast average"
    ),
)(linear_in_first)
rule_for(
    *_named(
        "elu softplus mish log_sigmoid log1p expm1 softshrink smooth_l1_loss huber_loss "
        "binary_cross_entropy random_uniform random_normal attention_weights rnn_tanh "
        "checked_lengths"
    ),
)(plain)


@rule_for(*_named("layer_norm_backward_weight group_norm_backward_weight batch_norm_backward"))
def linear_in_first_thrice(op: Operands) -> tuple[Known, ...]:
    """Apply `linear_in_first` to an op with several results."""
    return (linear_in_first(op),) * len(op.result_shapes)


@rule_for(*_named("reduce_scatter_wait"))
def parts_of_sums(op: Operands) -> tuple[Known, ...]:
    """Return for each part the degree of its tensor."""
    return tuple(op.degree(member) for member in op.options("parts")[::3])


@rule_for(*_named("all_gather_wait"))
def gathered(op: Operands) -> tuple[Known, ...]:
    """Return the one degree of all parts for each whole tensor, which has other ranks' too."""
    return (op.join(*every(op)),) * len(op.result_shapes)


@rule_for(
    *_named(
        "all_reduce_start all_reduce_wait broadcast_start broadcast_wait reduce_scatter_start "
        "all_gather_start"
    )
)
def exchanged(op: Operands) -> tuple[Known, ...]:
    """Return each tensor's own degree: a sum over ranks, whose scales are equal, is linear."""
    return tuple(op.degree(k) for k in every(op))


@rule_for(*_named("dropout max_pool adaptive_max_pool"))
def value_and_place(op: Operands) -> tuple[Known, ...]:
    """Return the first operand's degree for the value, and degree 0 for the mask or index of it."""
    return linear_in_first(op), ZERO


@rule_for(*_named("relu_backward leaky_relu_backward"))
def masked_gradient(op: Operands) -> Known:
    """Return the gradient's degree; a positive factor moves no number across 0."""
    if op.options("threshold"):
        op.expect_plain(1)
    return op.degree(0)


@rule_for("amp_ir.index_put")
def put(op: Operands) -> Known:
    """Require that the inserted values have the degree of the tensor that they replace."""
    op.expect_plain(*every(op)[2:])
    return op.join(0, 1)


@rule_for("amp_ir.scatter_add")
def scatter_add(op: Operands) -> Known:
    """Require that the added values have the degree of the tensor that they are added to."""
    op.expect_plain(1)
    return op.join(0, 2)


@rule_for("amp_ir.mse_loss")
def squared_distance(op: Operands) -> Known:
    """Return twice the degree that prediction and target share."""
    return times(op.join(0, 1), 2)


@rule_for("amp_ir.l1_loss")
def distance(op: Operands) -> Known:
    """Return the degree that prediction and target share."""
    return op.join(0, 1)


@rule_for("amp_ir.soft_margin_loss")
def margin(op: Operands) -> Known:
    """Apply log(1 + exp(-target pred)): require an unscaled product of the two."""
    _expect_plain_product(op, 0, 1)
    return ZERO


@rule_for("amp_ir.mse_loss_backward")
def squared_distance_backward(op: Operands) -> Known:
    """Apply grad * 2 (pred - target)."""
    slope, grad = op.join(1, 2), op.degree(0)
    if not isinstance(slope, Degree) or not isinstance(grad, Degree):
        return Special.ANY
    return grad + slope


@rule_for("amp_ir.l1_loss_backward")
def distance_backward(op: Operands) -> Known:
    """Apply grad * sign(pred - target)."""
    op.join(1, 2)
    return op.degree(0)


@rule_for("amp_ir.nll_loss")
def picked(op: Operands) -> tuple[Known, ...]:
    """Apply a form linear in the log-probabilities; the total weight depends on weights alone."""
    return linear_in_first(op), ZERO


def _expect_plain_product(op: Operands, first: int, second: int) -> None:
    """Require that a product is not scaled; its factors may be, inversely."""
    if op.total(first, second) not in (ZERO, Special.ANY):
        raise CannotTell(first if op.is_plain(second) else second)


@rule_for("amp_ir.attention")
def attention(op: Operands) -> tuple[Known, ...]:
    """Apply softmax(q k^T) v: require an unscaled q k^T, and return the degree of v."""
    _expect_plain_product(op, 0, 1)
    op.expect_plain(*every(op)[3:])
    return op.degree(2), ZERO


@rule_for("amp_ir.attention_backward")
def attention_backward(op: Operands) -> tuple[Known, ...]:
    """Apply (ds k, ds^T q, w^T grad) with ds = w (grad v^T - grad out)."""
    _expect_plain_product(op, 1, 2)
    op.expect_plain(*every(op)[5:])
    op.join(3, 4)
    return op.total(0, 3, 2), op.total(0, 3, 1), op.degree(0)


@rule_for("amp_ir.attention_score_gradient")
def attention_score_gradient(op: Operands) -> Known:
    """Apply w (grad_weights - grad out): one degree for both gradients, none for the rest."""
    op.expect_plain(0, 1, *every(op)[5:])
    first, second = op.degree(2), op.total(3, 4)
    if not isinstance(first, Degree) or not isinstance(second, Degree):
        return second if isinstance(second, Degree) else first
    if not op.solver.equate(first, second):
        raise DegreesDiffer(2, 3)
    return op.degree(2)


@rule_for("amp_ir.lstm_backward")
def lstm_backward(op: Operands) -> tuple[Known, ...]:
    """Apply a form linear in gradients of all states and the last cell; the rest is unscaled."""
    op.expect_plain(*every(op)[3:])
    return (op.join(0, 1, 2),) * len(op.result_shapes)


@rule_for(*_named("gru_backward rnn_tanh_backward"))
def gru_backward(op: Operands) -> tuple[Known, ...]:
    """Apply a form linear in the gradients of all states; the rest is unscaled."""
    op.expect_plain(*every(op)[2:])
    return (op.join(0, 1),) * len(op.result_shapes)


@rule_for("amp_ir.rnn_relu")
def rnn_relu(op: Operands) -> Known:
    """Require one degree of gates and state: a positive factor passes a relu."""
    op.expect_plain(1)
    return op.join(0, 2)


@rule_for("amp_ir.rnn_relu_backward")
def rnn_relu_backward(op: Operands) -> tuple[Known, ...]:
    """Apply a form linear in the gradients of all states, of which only the signs are read."""
    op.expect_plain(3)
    return (op.join(0, 1),) * len(op.result_shapes)


@rule_for("amp_ir.unscale")
def unscaled(op: Operands) -> Known:
    """Subtract one; require that the gradient was multiplied by this scale, once."""
    _expect_scaled(op, 0)
    return _times_inverse(op.degree(0), op.degree(1))


@rule_for("amp_ir.all_finite")
def all_finite(op: Operands) -> tuple[Known, ...]:
    """Return degree 0 for finiteness, and that of the unscaled gradients for the norm."""
    *gradients, scale = every(op)
    for position in gradients:
        _expect_scaled(op, position)
    return ZERO, _times_inverse(op.join(*gradients), op.degree(scale))


def _times_inverse(degree: Known, scale: Known) -> Known:
    if not isinstance(degree, Degree) or not isinstance(scale, Degree):
        return Special.ANY
    return degree - scale


def _expect_scaled(op: Operands, position: int) -> None:
    """Require a gradient that was multiplied once by the scale, the last operand."""
    scale, degree = op.degree(len(op.degrees) - 1), op.degree(position)
    if not isinstance(scale, Degree) or len(scale.powers) != 1:
        raise CannotTell(len(op.degrees) - 1)
    if isinstance(degree, Degree) and op.solver.is_open(degree):
        op.solver.equate(degree, scale)
        degree = op.degree(position)
    symbol = scale.powers[0][0]
    if isinstance(degree, Degree) and degree.power_of(symbol) != 1:
        raise NotScaled(position)


@rule_for("amp_ir.update_scale")
def next_scale(op: Operands) -> tuple[Known, ...]:
    """Return the scale's degree: it changes by factors; only its limits are independent of it."""
    op.expect_plain(1, 2, 3)
    return op.degree(0), ZERO, ZERO


@rule_for("amp_ir.external_call")
def external_call(op: Operands) -> tuple[Known, ...]:
    """Take what autograd calls for linear in the gradients it reads; else require `plain`.

    A vector-Jacobian product is linear by definition. It may be computed by several ops of which
    none is, so that this is an assumption, and a note says so.
    """
    scaled = [position for position in every(op) if not op.is_plain(position)]
    if not scaled:
        return (ZERO,) * len(op.result_shapes)
    others = [position for position in scaled if position not in op.options("gradients")]
    if others:
        raise CannotTell(others[0])
    try:
        degree = op.join(*scaled)
    except DegreesDiffer as differ:
        raise CannotTell(differ.positions[1]) from None
    op.assumed_linear = True
    return tuple(degree if "float" in dtype else ZERO for dtype in op.result_dtypes)


@rule_for(
    *_named("layer_norm rms_norm group_norm batch_norm attention_probabilities lstm gru"),
)
def plain_many(op: Operands) -> tuple[Known, ...]:
    """Apply `plain` to all operands: eps is added to the variance; softmax, gates are nonlinear."""
    return (plain(op),) * len(op.result_shapes)
