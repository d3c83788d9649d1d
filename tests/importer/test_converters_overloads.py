# SPDX-License-Identifier: Apache-2.0
"""Overloads that today's capture takes apart, called as one node of a hand-made graph."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_ir.errors import UnsupportedOpError
from amp_ir.importer.import_step import import_step
from amp_ir.ir.captured_step import CapturedInput, CapturedOutput, CapturedStep
from amp_ir.ir.step_module import Role
from import_checks import run

aten = torch.ops.aten
X = (torch.arange(24.0) * 1.3).sin().reshape(2, 3, 4)
Y = (torch.arange(24.0) * 0.7).cos().reshape(2, 3, 4) * 2
PLANES = (torch.arange(40.0) * 1.3).sin().reshape(1, 2, 4, 5)
LINES, VOLUME = PLANES[0], PLANES.reshape(1, 2, 2, 2, 5)
N = torch.tensor([[7, -7, 0], [3, -2, 5]])
M = torch.tensor([[2, 2, 3], [1, 3, 1]])
W = torch.tensor([0.5, -1.0, 2.0])
V = torch.tensor([0.5, 1.5, 2.5])

CALLS: list[tuple[Any, ...]] = [
    (aten.__lshift__.Tensor, M, M), (aten.__rshift__.Tensor, N, M),
    (aten.bitwise_left_shift.Tensor, M, M), (aten.bitwise_left_shift.Tensor_Scalar, M, 2),
    (aten.bitwise_right_shift.Tensor, N, M), (aten.bitwise_right_shift.Tensor_Scalar, N, 1),
    (aten.bitwise_or.Scalar, N, 4), (aten.bitwise_xor.Scalar, N, 3),
    (aten._fused_rms_norm.default, X, [4], Y[0, 0], 1e-5),
    (aten._fused_rms_norm.default, X, [3, 4], None, None),
    (aten._native_batch_norm_legit.no_stats, X, W, V, True, 0.1, 1e-5),
    (aten._safe_softmax.default, X, -1), (aten._reshape_alias.default, X, [6, 4], [4, 1]),
    (aten._unsafe_view.default, X, [4, 6]), (aten._unsafe_index.Tensor, X, [None, M[0] % 3]),
    (aten._unsafe_index_put.default, X, [M[0] % 2], Y[:1], True),
    (aten._upsample_nearest_exact1d.default, LINES[None, 0], [7], None),
    (aten._upsample_nearest_exact1d.vec, LINES[None, 0], None, [1.7]),
    (aten._upsample_nearest_exact1d_backward.default, LINES[None, 0], [5], [1, 4, 3], None),
    (aten._upsample_nearest_exact2d.default, PLANES, [3, 7]),
    (aten._upsample_nearest_exact2d.vec, PLANES, [3, 7], None),
    (aten._upsample_nearest_exact3d.default, VOLUME, [3, 3, 4]),
    (aten._upsample_nearest_exact3d.vec, VOLUME, None, [2.0, 1.0, 0.6]),
    (aten.upsample_nearest1d.default, LINES[None, 0], [7]),
    (aten.upsample_nearest1d.vec, LINES[None, 0], [7], None),
    (aten.upsample_nearest2d.vec, PLANES, None, [1.5, 2.0]),
    (aten.upsample_nearest3d.default, VOLUME, [3, 3, 4]),
    (aten.upsample_nearest3d.vec, VOLUME, [3, 3, 4], None),
    (aten.upsample_linear1d.default, LINES[None, 0], [7], True),
    (aten.upsample_linear1d.vec, LINES[None, 0], [7], False, None),
    (aten.upsample_bilinear2d.vec, PLANES, None, False, [1.5, 2.0]),
    (aten.upsample_bicubic2d.vec, PLANES, [5, 6], True, None),
    (aten.upsample_trilinear3d.vec, VOLUME, [3, 3, 4], False, None),
    (aten.adaptive_avg_pool1d.default, LINES, [3]), (aten.adaptive_max_pool1d.default, LINES, [3]),
    (aten.avg_pool1d.default, LINES, [2], [2]), (aten.max_pool1d_with_indices.default, LINES, [2]),
    (aten.reflection_pad3d.default, VOLUME, [1, 2, 1, 0, 0, 1]),
    (aten.reflection_pad3d_backward.default, VOLUME, VOLUME[..., :3], [1, 1, 0, 0, 0, 0]),
    (aten.replication_pad1d.default, LINES, [2, 1]),
    (aten.all.default, M), (aten.all.dims, N, [0, 1]), (aten.argsort.default, N, 0, True),
    (aten.arange.default, 4), (aten.arange.start, 2, 7), (aten.ones.default, [2, 3]),
    (aten.zeros.default, [2]), (aten.new_ones.default, X, [3]), (aten.fill.Scalar, X, 2.5),
    (aten.fill.Tensor, N, torch.tensor(4)), (aten.clamp_max.default, X, 0.2),
    (aten.clamp_max.Tensor, X, Y), (aten.clamp_min.default, X, 0.2), (aten.clamp_min.Tensor, X, Y),
    (aten.div.Scalar_mode, N, 2, {"rounding_mode": "trunc"}), (aten.floor_divide.default, N, M),
    (aten.floor_divide.Scalar, N, 2), (aten.remainder.Scalar_Tensor, 7, M),
    (aten.rsub.Scalar, X, 2.0, 3.0), (aten.rsub.Tensor, X, Y), (aten.square.default, X),
    (aten.isfinite.default, X), (aten.linear.default, X, Y[0], W), (aten.matmul.default, X, Y.mT),
    (aten.log_sigmoid.default, X), (aten.masked_fill.Tensor, X, Y > 0, torch.tensor(3.0)),
    (aten.prelu.default, X, W), (aten.reshape.default, X, [-1]), (aten.flatten.using_ints, X, 1),
    (aten.contiguous.default, X), (aten.detach.default, X), (aten.tile.default, X, [2, 1]),
    (aten.scatter.reduce, X, 1, M[None, :, :2] % 3, Y, {"reduce": "add"}), (aten.sum.default, N),
    (aten.take.default, X, M), (aten.unsafe_chunk.default, X, 2, -1),
    (aten.unsafe_split.Tensor, X, 3, -1), (aten.unsafe_split_with_sizes.default, X, [1, 3], 2),
    (aten.var.default, X, False), (aten.var.dim, X, [0, 1], True, True),
    (aten.vdot.default, W, V), (aten.where.Scalar, X > 0, 1.5, 2),
    (aten.where.ScalarSelf, X > 0, 1.5, Y), (aten.where.ScalarOther, X > 0, Y, 2),
    (aten.native_batch_norm_backward.default, X, Y, W, V, V, W, V, True, 1e-5, [True] * 3),
    (aten.native_batch_norm_backward.default, X, Y, W, W, V, None, None, False, 1e-5, [True] * 3),
    (aten.multi_margin_loss_backward.default, V[1], X[0], M[0] % 3, 2, 0.5, Y[0, 0]),
]  # fmt: skip

NOT_TRAINING = (aten._native_batch_norm_legit_no_training.default, X, W, V, W, V, 0.1, 1e-5)
WRITES_NOTHING = (aten._native_batch_norm_legit.default, X, W, V, W, V, False, 0.1, 1e-5)


def split(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional arguments, those by name): a dict at the end holds the latter."""
    named = isinstance(arguments[-1], dict)
    return (arguments[:-1], arguments[-1]) if named else (arguments, {})


def as_step(overload: Any, *arguments: Any) -> tuple[CapturedStep, list[torch.Tensor]]:
    """A step of one op, with its tensors as inputs."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    leaves, structure = pytree.tree_flatten(split(arguments))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    nodes, fakes = list(leaves), list(leaves)
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            fakes[k] = mode.from_tensor(leaf.contiguous())
            nodes[k] = graph.placeholder(f"x{k}")
            nodes[k].meta["val"] = fakes[k]
    call = graph.call_function(overload, *pytree.tree_unflatten(nodes, structure))
    with mode:
        args, kwargs = pytree.tree_unflatten(fakes, structure)
        call.meta["val"] = overload(*args, **kwargs)
    outputs = [call]
    if isinstance(call.meta["val"], (tuple, list)):
        count = len(call.meta["val"])
        outputs = [graph.call_function(operator.getitem, (call, k)) for k in range(count)]
    graph.output(tuple(outputs))
    step = CapturedStep(
        torch.fx.GraphModule({}, graph),
        tuple(CapturedInput(f"x{k}", Role.BATCH, x) for k, x in enumerate(tensors)),
        tuple(CapturedOutput(f"y{k}", Role.RESULT) for k in range(len(outputs))),
        flatten_batch=lambda batch, _named=None: list(batch),
        unflatten_results=list,
    )
    return step, tensors


def check_call(overload: Any, *arguments: Any, compared: int | None = None) -> None:
    """Compare the first `compared` results (all, without) with PyTorch's."""
    step, tensors = as_step(overload, *arguments)
    actual = run(import_step(step), tensors)
    args, kwargs = split(arguments)
    expected = pytree.tree_leaves(overload(*args, **kwargs))
    for got, wanted in list(zip(actual, expected, strict=True))[:compared]:
        # Sums and normalizations in another order: some roundings of values near 1.
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]).removeprefix("aten."))
def test_call(call):
    check_call(*call)


@pytest.mark.parametrize("correction", [None, 0, 1.5])
def test_std_of_a_correction(correction):
    check_call(aten.std.correction, X, [0, 2], {"correction": correction, "keepdim": True})


@pytest.mark.parametrize("call", [NOT_TRAINING, WRITES_NOTHING], ids=lambda call: str(call[0]))
def test_batch_norm_of_inference(call):
    # The saved statistics are empty: nothing reads them.
    check_call(*call, compared=1)


@pytest.mark.parametrize("op", ["native_batch_norm", "cudnn_batch_norm"])
def test_batch_norm_that_writes_without_saying_so_is_refused(op):
    """PyTorch's kernel would update the running statistics behind the step's back."""
    overload = getattr(aten, op).default
    reason = {
        "native_batch_norm": "it writes its running statistics; the functional overload is needed",
        "cudnn_batch_norm": "writes to its arguments",
    }[op]
    step, _ = as_step(overload, X, W, V, W, V, True, 0.1, 1e-5)
    with pytest.raises(UnsupportedOpError, match=f"aten.{op}.default: {reason}"):
        import_step(step)


def test_fused_rms_norm_gradient():
    weight = Y[0, 0]
    rstd = aten._fused_rms_norm.default(X, [4], weight, 1e-5)[1]
    step, tensors = as_step(
        aten._fused_rms_norm_backward.default, Y, X, [4], rstd, weight, [True, True]
    )
    x, w = X.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = torch.autograd.grad(torch.nn.functional.rms_norm(x, [4], w, 1e-5), (x, w), Y)
    for got, wanted in zip(run(import_step(step), tensors), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)
