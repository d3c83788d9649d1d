# SPDX-License-Identifier: Apache-2.0
"""The rules of the default policy: one for each op that the importer can emit, by reason.

u is the unit roundoff: 2^-11 for float16, 2^-8 for bfloat16 (half a unit in the last of 11 and 8
significant bits). Every kernel of amp_ir computes in float32 and rounds once, when it stores: a
hint for an argument is the precision in which that tensor is stored.

Where the reference systems disagree: softmax is float32 in PyTorch, apex and RAF, "infer" in
TensorFlow; gelu is float32 in RAF and apex, its input's dtype in PyTorch; sum is float32 in all
but PyTorch on CPU. The choices here are the numerics policy of the design, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import relax

from amp_ir.amp.hints import (
    FREE,
    Hint,
    PrimType,
    RuleResult,
    RuleReturn,
    hint_for_floats,
    type_hint,
)

FULL = PrimType("float32")
KEEP = PrimType(None)
EXACT = PrimType("float32", exact=True)
Args = Sequence[relax.Expr]


def each(args: Args, hint: Hint) -> list[Hint]:
    """`hint` for every float tensor among the arguments, PrimType(None) for the rest."""
    if not isinstance(hint, PrimType):
        return [hint] * len(args)
    if hint.exact:
        return [hint] * len(args)
    return [hint_for_floats(argument.ty, hint.dtype) for argument in args]


@type_hint(
    "relax.nn.conv1d",
    "relax.nn.conv2d",
    "relax.nn.conv3d",
    "amp_ir.conv",
    "amp_ir.conv_backward_input",
    "amp_ir.conv_backward_weight",
    "amp_ir.conv_transpose",
)
def convolution(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Low inputs, float32 accumulation: products of two low numbers are exact in float32.

    The error of a sum of K products is then K u^2 of float32 and not of the low dtype; only the
    inputs and the stored result are rounded (Micikevicius et al. 2018, section 3.3). A gradient of
    a parameter leaves in float32: storing it low flushes entries below 2^-24 in float16.
    """
    low = PrimType(amp_dtype)
    return RuleResult(each(args, low), result=FREE, accumulate="float32", gradient=FULL)


@type_hint("relax.matmul")
def matmul(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Low inputs, float32 accumulation: products of two low numbers are exact in float32.

    Measured at K = 768: accumulating in bfloat16 instead costs an error of 0.41. The result may be
    stored low; a gradient of a parameter leaves in float32. A contraction over one element is a
    broadcast multiplication (an outer product, as in rotary embeddings): nothing to speed up.
    """
    shape = getattr(args[0].ty, "shape", None)
    if shape is not None and len(shape) > 0 and int(shape[-1]) == 1:
        return each(args, FREE)
    low = PrimType(amp_dtype)
    return RuleResult(each(args, low), result=FREE, accumulate="float32", gradient=FULL)


@type_hint("amp_ir.attention")
def attention(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Two matmuls with a softmax between them: low inputs, float32 inside.

    Scores and the logarithm of their sum never leave float32; an additive mask stays float32,
    since -1e9 or the least float32 is -inf in the low dtype.
    """
    return RuleResult([PrimType(amp_dtype)] * 3 + [FULL] * (len(args) - 3), accumulate="float32")


@type_hint("amp_ir.attention_backward")
def attention_backward(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Five matmuls around a recomputed softmax: low inputs, float32 inside.

    The saved logarithm of the sum is float32: it is subtracted from scores of its own size.
    """
    return RuleResult([PrimType(amp_dtype)] * 5 + [FULL] * (len(args) - 5), accumulate="float32")


@type_hint("amp_ir.lstm")
def lstm(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """A matmul a time step, then bounded functions: low inputs, float32 inside.

    The functions have slope 1 at most: a rounding u |g| of what goes into a gate moves the state by
    no more. The state is stored low, as what the next matmul reads. The cell is not: it is a sum
    over time, in which a low dtype loses what is below u of it (256 + 1 = 256 in bfloat16).
    """
    low = PrimType(amp_dtype)
    return RuleResult([low, low, low, FULL], accumulate="float32")


@type_hint("amp_ir.gru")
def gru(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """A matmul a time step, then bounded functions: low inputs, float32 inside.

    The functions have slope 1 at most: a rounding u |g| of what goes into a gate moves the state by
    no more. The state is stored low, as what the next matmul reads.
    """
    return RuleResult([PrimType(amp_dtype)] * len(args), accumulate="float32")


@type_hint("amp_ir.rnn_tanh", "amp_ir.rnn_relu")
def rnn(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """A matmul a time step, then tanh or relu: low inputs, float32 inside.

    Both have slope 1 at most, as for a GRU. The state is stored low, as what the next matmul and
    the gradient read.
    """
    return RuleResult([PrimType(amp_dtype)] * len(args), accumulate="float32")


@type_hint("amp_ir.lstm_backward")
def lstm_backward(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """A matmul a time step: low inputs; gradients are carried through time in float32.

    The cells, and the gradient of the last one, are float32: a gradient that is handed back through
    T steps would be rounded T times. Gradients of the gates are stored low, as what the matmuls
    with the weight and with the input read.
    """
    low = PrimType(amp_dtype)
    return RuleResult([low, low, FULL, low, FULL, low], accumulate="float32")


@type_hint("amp_ir.gru_backward", "amp_ir.rnn_tanh_backward", "amp_ir.rnn_relu_backward")
def gru_backward(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """A matmul a time step: low inputs; gradients are carried through time in float32.

    Gradients of the gates are stored low, as what the matmuls with the weight and with the input
    read.
    """
    return RuleResult([PrimType(amp_dtype)] * len(args), accumulate="float32")


@type_hint("relax.exp", "relax.sinh", "relax.cosh", "amp_ir.expm1")
def exponential(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Exact float32 argument: its absolute error becomes the result's relative error.

    A logarithm of a sum of exponentials over T steps grows with T. At 10, rounding it to bfloat16
    moves the probabilities that the gradient computes from it by 2 %, at 100 by 28 %. Nothing on
    the way to the argument is rounded either. The result leaves float16's range: exp(x) overflows
    above x = ln 65504 = 11.09. Measured on a CRF of 7 steps in bfloat16: the gradient error is
    1.3e-2 if these sums are low, 2.5e-3 if not.
    """
    return RuleResult(each(args, EXACT), is_unbounded=True)


@type_hint("relax.power", "relax.square", "relax.rsqrt")
def unbounded(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Stay in float32: the result leaves float16's range for harmless arguments.

    x^2 overflows above 255.9; 1/sqrt(x)^3, in the gradient of a normalization written by hand,
    above x = 6.2e-4. So sums and products with such a factor stay in float32 too, as PyTorch's
    promotion keeps them.
    """
    return RuleResult(each(args, FULL), is_unbounded=True)


@type_hint(
    "relax.log",
    "relax.sqrt",
    "relax.erf",
    "relax.asin",
    "relax.acos",
    "relax.atan",
    "relax.asinh",
    "relax.acosh",
    "relax.atanh",
    "relax.nn.log_softmax",
    "amp_ir.softplus",
    "amp_ir.softplus_backward",
    "amp_ir.elu",
    "amp_ir.elu_backward",
    "amp_ir.mish",
    "amp_ir.log_sigmoid",
    "amp_ir.log_sigmoid_backward",
    "amp_ir.log1p",
)
def range_sensitive(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Stay in float32: the functions cancel, or are steep, for some arguments.

    log near 1 and log_softmax near 0 cancel; the slope of sqrt at 0, and of asin and acos at 1, is
    infinite, so that an error u of the argument is none of the result's order.
    """
    return each(args, FULL)


@type_hint("amp_ir.log_softmax_backward")
def log_softmax_backward(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Stay in float32: the saved logarithms are exponentiated, u |log p| becomes relative error.

    At p = 1/30522, |log p| = 10.3: rounding it to bfloat16 moves the probability by 4 %.
    """
    return each(args, FULL)


@type_hint(
    "relax.nn.softmax",
    "amp_ir.attention_probabilities",
    "amp_ir.attention_weights",
    "amp_ir.attention_score_gradient",
)
def softmax(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Compute in float32: exp overflows float16 above 11.09, and the sum runs over a whole row.

    The result, in [0, 1], may be stored low by those who read it low.
    """
    return each(args, FULL)


@type_hint("amp_ir.softmax_backward")
def softmax_backward(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Gradient in float32, since grad - sum(grad y) cancels; y may come from low storage.

    y enters as a factor: a relative error u in it is a relative error u in the result.
    """
    return RuleResult([FULL, FREE], result=FULL)


@type_hint(
    "amp_ir.layer_norm",
    "amp_ir.rms_norm",
    "amp_ir.group_norm",
    "amp_ir.batch_norm",
    "amp_ir.layer_norm_backward_input",
    "amp_ir.rms_norm_backward_input",
    "amp_ir.layer_norm_backward_weight",
    "amp_ir.rms_norm_backward_weight",
    "amp_ir.group_norm_backward_weight",
    "relax.nn.layer_norm",
    "relax.nn.rms_norm",
    "relax.nn.group_norm",
)
def normalization(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Statistics, scale and shift in float32: x - mean cancels, and the variance squares.

    The data may come from low storage, and the result is stored low by those who read it low.
    """
    return each(args, FULL)


@type_hint(
    "amp_ir.batch_norm_backward",
    "amp_ir.group_norm_backward_input",
)
def batch_norm_backward(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Float32 inside: means over the batch are subtracted; the input's gradient may be low.

    The gradients of scale and shift, sums over the batch, leave in float32.
    """
    return RuleResult(each(args, FULL), result=FREE)


_LOSSES = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "soft_margin_loss",
)


@type_hint(
    "amp_ir.nll_loss",
    "amp_ir.nll_loss_backward",
    *(f"amp_ir.{name}" for name in _LOSSES),
    *(f"amp_ir.{name}_backward" for name in _LOSSES),
)
def loss(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Stay in float32: a loss is a mean over the batch, and the seed of every gradient.

    A gradient of 1/N is below float16's least normal number 6.1e-5 at N = 16384 already.
    """
    return each(args, FULL)


@type_hint(
    "relax.sum",
    "relax.mean",
    "relax.prod",
    "relax.variance",
    "relax.std",
    "relax.cumsum",
    "relax.cumprod",
    "amp_ir.embedding_backward",
    "amp_ir.scatter_add",
    "amp_ir.index_put",
    "relax.scatter_elements",
)
def accumulation(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Accumulate and leave in float32: adding n numbers in a low dtype loses what is below n u.

    In bfloat16 256 + 1 = 256. The terms themselves may come from low storage.
    """
    return RuleResult(each(args, FULL), accumulate="float32", is_unbounded=True)


@type_hint(
    "relax.sin", "relax.cos", "relax.mod", "relax.floor_mod", "relax.floor_divide",
    "relax.floor", "relax.ceil", "relax.round", "relax.trunc",
)  # fmt: skip
def periodic_or_discontinuous(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Exact float32 argument: its absolute error is a phase, or moves it over a step.

    Position 1000 of a rotary embedding rounds to a multiple of 4 in bfloat16, a phase of up to 2
    radians. Nothing on the way to the argument is rounded either.
    """
    return each(args, EXACT)


@type_hint("relax.tan")
def tangent(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Exact float32 argument: a phase, whose result leaves float16's range near a pole.

    So sums and products with it stay in float32 too.
    """
    return RuleResult(each(args, EXACT), is_unbounded=True)


@type_hint("relax.add", "relax.subtract")
def addition(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Either dtype for a bias; a sum of two activations or gradients stays in float32.

    Such a sum is a residual stream, or a gradient that several branches add to: every partial sum
    is rounded again, while a branch is rounded once. Measured on BERT and GPT-2 in bfloat16: the
    gradient error is 1.2 to 1.3 times that of torch.autocast if these are low, 1.0 if not. A bias
    is broadcast: two vectors of one size are such a sum too, one carried over steps for example.
    """
    is_sum = all(_dimensions(argument) > 1 for argument in args) or _have_one_size(args)
    return each(args, FULL if is_sum else FREE)


def _have_one_size(args: Args) -> bool:
    shapes = [[int(extent) for extent in argument.ty.shape] for argument in args]
    return len({math.prod(shape) for shape in shapes}) == 1 and math.prod(shapes[0]) > 1


def _dimensions(argument: relax.Expr) -> int:
    """How many dimensions have an extent above 1; a bias has one, whatever its rank."""
    return sum(int(extent) > 1 for extent in argument.ty.shape)


@type_hint(
    "relax.multiply", "relax.divide", "relax.negative", "relax.abs",
    "relax.sign", "relax.maximum", "relax.minimum", "relax.where", "relax.clip",
)  # fmt: skip
def arithmetic(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Either dtype: one operation in float32 and one rounding, of relative size u.

    Constants that the low dtype cannot hold keep the op in float32 (see constants.py).
    """
    return each(args, FREE)


@type_hint(
    "relax.nn.relu", "relax.nn.leakyrelu", "relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu",
    "relax.tanh", "relax.sigmoid", "amp_ir.relu_backward", "amp_ir.leaky_relu_backward",
    "amp_ir.gelu_backward", "amp_ir.silu_backward", "amp_ir.tanh_backward",
    "amp_ir.sigmoid_backward",
    "amp_ir.softshrink", "amp_ir.shrink_backward",
    "amp_ir.hardtanh_backward", "amp_ir.hardswish_backward", "amp_ir.hardsigmoid_backward",
    "amp_ir.mish_backward",
)  # fmt: skip
def activation(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Either dtype: the function is bounded by its argument and evaluated in float32.

    RAF and apex keep gelu and tanh in float32 since their low kernels were inaccurate (float16
    tanh was 1e-2 off); ours round once, at the end.
    """
    return each(args, FREE)


@type_hint(
    "relax.reshape", "relax.permute_dims", "relax.broadcast_to", "relax.concat", "relax.split",
    "relax.strided_slice", "relax.flip", "relax.take", "relax.gather_elements", "relax.tril",
    "relax.triu", "relax.expand_dims", "relax.squeeze", "relax.flatten", "relax.stack",
    "relax.repeat", "relax.tile", "amp_ir.index", "amp_ir.embedding",
    "amp_ir.checked_lengths",
)  # fmt: skip
def data_movement(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Either dtype: moving data rounds nothing."""
    return each(args, FREE)


@type_hint(
    "relax.max", "relax.min", "amp_ir.max_pool", "amp_ir.max_pool_backward",
    "amp_ir.adaptive_max_pool", "amp_ir.adaptive_max_pool_backward", "amp_ir.dropout",
    "amp_ir.dropout_backward",
)  # fmt: skip
def selection(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Either dtype: the result is one of the inputs, or that times one scale."""
    return each(args, FREE)


@type_hint(
    "amp_ir.avg_pool", "amp_ir.avg_pool_backward", "amp_ir.adaptive_avg_pool",
    "amp_ir.adaptive_avg_pool_backward",
)  # fmt: skip
def window_mean(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Either dtype: a mean over a small window, accumulated in float32 and rounded once."""
    return each(args, FREE)


def _are_float(args: Args) -> list[bool]:
    return [hint_for_floats(argument.ty, "float32") != KEEP for argument in args]


@type_hint("relax.equal", "relax.not_equal")
def equality(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Float32, and nothing on the way rounded: a rounded number equals no number it came from.

    The gradient of a maximum divides by the count of elements that equal it: 0 otherwise.
    """
    return [EXACT if one else KEEP for one in _are_float(args)]


@type_hint("relax.less", "relax.less_equal", "relax.greater", "relax.greater_equal")
def order(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Either dtype beside a constant; two tensors are compared before either is rounded.

    A score beside the k-th largest of its row is below that where only one of them was rounded.
    """
    are_tensors = sum(isinstance(arg, relax.Var) for arg in args) > 1
    return equality(args, ret_type, amp_dtype) if are_tensors else each(args, FREE)


@type_hint("relax.isfinite", "relax.isinf", "relax.isnan")
def kind_of_number(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Either dtype: the result is bool, and a stored number is what is asked about."""
    return each(args, FREE)


@type_hint("relax.argmax", "relax.argmin", "relax.argsort", "relax.sort", "relax.topk")
def ordering(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Exact float32 argument: rounding makes ties, and ties change which index wins.

    Nothing on the way to the argument is rounded either. Measured on a triplet loss that takes the
    farthest row of its label, in bfloat16: masked distances that are stored low choose another row.
    """
    return each(args, EXACT)


@type_hint(
    "relax.logical_and", "relax.logical_or", "relax.logical_xor", "relax.logical_not",
    "relax.bitwise_and", "relax.bitwise_or", "relax.bitwise_xor", "relax.bitwise_not",
    "relax.left_shift", "relax.right_shift", "relax.full", "relax.full_like", "relax.zeros",
    "relax.ones", "relax.zeros_like", "relax.ones_like", "relax.arange", "relax.one_hot",
    "amp_ir.random_uniform", "amp_ir.random_normal",
)  # fmt: skip
def untouched(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Left as it was: no float argument, or a generator whose bits define the result."""
    return [KEEP] * len(args)


@type_hint("amp_ir.unscale", "amp_ir.all_finite", "amp_ir.update_scale")
def loss_scale(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Left as it was: the scale is beyond 65504, and an unscaled gradient may underflow."""
    return [KEEP] * len(args)


@type_hint("amp_ir.scale_loss")
def scaled_loss(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Left as it was, and what carries it on: the default scale of 65536 is beyond 65504.

    A gradient is stored low from the first product on, as PyTorch's is from the first op that its
    autocast runs low.
    """
    return RuleResult([KEEP] * len(args), is_unbounded=True)


@type_hint(
    "amp_ir.all_reduce", "amp_ir.all_reduce_start", "amp_ir.all_reduce_wait",
    "amp_ir.broadcast", "amp_ir.broadcast_start", "amp_ir.broadcast_wait",
    "amp_ir.reduce_scatter_start", "amp_ir.reduce_scatter_wait",
    "amp_ir.all_gather_start", "amp_ir.all_gather_wait",
)  # fmt: skip
def exchange(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Float32 between ranks: each of N - 1 additions rounds, and a term below u of the sum is lost.

    `comm_dtype=` asks for less: half of the bytes, u (N - 1) of error.
    """
    return each(args, FULL)


@type_hint("amp_ir.average")
def average_over_ranks(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Stay in float32, before the cast of what is sent: a sum of N terms leaves float16's range.

    A gradient of 65504 on each of two ranks has the mean 65504, and the sum infinity.
    """
    return each(args, FULL)


@type_hint("amp_ir.external_call")
def external_call(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Left as it was: nothing is known of the numerics of an op that amp_ir has no kernel of.

    `torch.library.register_autocast` and `amp_ir.half_function` say more.
    """
    return [KEEP] * len(args)


@type_hint("amp_ir.loop")
def loop(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Left as it was: rules decide inside of its body, which is a step of its own."""
    return [KEEP] * len(args)


@type_hint("relax.astype", "amp_ir.cast")
def user_cast(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Left as it was: a cast that the user wrote is honoured, rounding included."""
    return [KEEP] * len(args)
