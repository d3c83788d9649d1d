# SPDX-License-Identifier: Apache-2.0
"""Between convolutions, images have their channels last in memory; nothing is transposed there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tvm import relax
from tvm.relax import op as R

import amp_ir
from amp_ir.api import lower
from amp_ir.dispatch.dispatch import dispatch
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.library_call import Layout, LibraryConvolution, read
from amp_ir.loops.builders import channels_first, channels_last, pointwise, reduce, reshape
from amp_ir.loops.ir import Buffer, Pointwise, Reduction, TensorSpec
from kernel_check import run_kernels
from relax_functions import build, sample
from square_steps import square_step


class Block(nn.Module):
    """What residual networks are made of."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        self.second = nn.Conv2d(channels, channels, 1, groups=2)
        self.pool = nn.MaxPool2d(2)
        self.scores = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norms[0](self.stem(x)))
        y = torch.relu(self.norms[1](self.first(x)))
        x = torch.relu(self.norms[2](self.second(y)) + x)
        x = self.pool(x)
        return self.scores(torch.sigmoid(x).mean((2, 3)))


def training(channels: int = 16):
    torch.manual_seed(0)
    model = Block(channels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def test_a_convolution_reads_and_writes_channels_last() -> None:
    mod = build([((2, 16, 6, 6), "float32"), ((8, 16, 3, 3), "float32")], conv)
    bindings = [b for block in dispatch(mod)["main"].body.blocks for b in block.bindings]
    kinds = [getattr(b.value, "op", None) and str(b.value.op.name) for b in bindings[:3]]
    assert kinds == ["relax.permute_dims", "relax.call_dps_packed", "relax.permute_dims"]
    call = read(bindings[1].value)
    assert isinstance(call, LibraryConvolution) and call.x is not None
    assert (call.x.shape, call.x.strides) == ((2, 16, 6, 6), (576, 1, 96, 16))
    assert call.out == Layout((2, 8, 4, 4), (128, 1, 32, 8))
    assert [int(n) for n in bindings[1].var.ty.shape] == [2, 4, 4, 8]


def conv(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    from amp_ir.dialect import call_op

    options = {"strides": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
    return call_op("amp_ir.conv", [x, w], **options)


def test_a_chain_between_convolutions_has_no_transposes() -> None:
    model, optimizer, step = training()
    mod, _ = amp_ir.trace_step(step, (torch.randn(4, 3, 8, 8),), model=model, optimizer=optimizer)
    moves = [call for call in lower(mod).plan.calls if set(call.ops) <= {"permute_dims", "reshape"}]
    assert moves == []


@pytest.mark.parametrize("channels", [16, 6], ids=["last", "first"])
def test_a_residual_network_trains_as_in_eager(channels: int) -> None:
    model, optimizer, step = training(channels)
    eager_model, _, eager = training(channels)
    batch = torch.randn(4, 3, 8, 8)
    mod, _ = amp_ir.trace_step(step, (batch,), model=model, optimizer=optimizer)
    train = amp_ir.compile(mod)
    for _ in range(4):
        torch.testing.assert_close(train(batch), eager(batch), rtol=1e-4, atol=1e-6)
    for name, tensor in eager_model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def image(*shape: int) -> Buffer:
    return Buffer(TensorSpec(shape, "float32"))


def test_what_is_computed_from_channels_last_has_them_last() -> None:
    x, scale = channels_first(image(2, 4, 5, 8)), image(8, 1, 1)
    y = pointwise(x.shape, "float32", lambda *i: x[i] * scale[i])
    inner = channels_last(y)
    assert y.shape == (2, 8, 4, 5)
    assert isinstance(inner, Pointwise) and inner.shape == (2, 4, 5, 8)
    assert [(read.value, read.place) for read in inner.reads][0] == (channels_last(x), "same")


def test_a_sum_over_pixels_keeps_the_channels_where_they_are() -> None:
    x = channels_first(image(2, 4, 5, 8))
    total = reduce("sum", x.shape, (2, 3), lambda *i: x[i], "float32")
    inner = channels_last(total)
    assert total.shape == (2, 8, 1, 1)
    assert isinstance(inner, Reduction) and inner.axes == (1, 2)
    # Dropping the pixels keeps the order of what is left: no copy.
    assert reshape(total, (2, 8)).reads[0].value is inner


class Denoiser(nn.Module):
    """What U-Nets are made of."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(groups, 16) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = conv(nn.functional.silu(norm(nn.functional.avg_pool2d(x, 2)))).sin()
        return x


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_group_norms_and_average_pools_keep_channels_last(groups: int) -> None:
    model, eager = (Denoiser(groups), Denoiser(groups))
    eager.load_state_dict(model.state_dict())
    batch = torch.randn(3, 3, 12, 12)

    def step_of(model: nn.Module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, square_step(model, optimizer)

    optimizer, step = step_of(model)
    mod, _ = amp_ir.trace_step(step, (batch,), model=model, optimizer=optimizer)
    moves = [call for call in lower(mod).plan.calls if set(call.ops) <= {"permute_dims", "reshape"}]
    assert moves == []
    train, (_, reference) = amp_ir.compile(mod), step_of(eager)
    for _ in range(4):
        torch.testing.assert_close(train(batch), reference(batch), rtol=1e-4, atol=1e-6)
    for name, tensor in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("n", "channels", "height", "width", "groups"),
    [(2, 48, 8, 12, 4), (1, 20, 5, 7, 20), (3, 24, 1, 3, 1), (17, 32, 2, 2, 8), (1, 144, 31, 1, 9)],
)
def test_group_norm_with_channels_last(
    n: int, channels: int, height: int, width: int, groups: int, dtype: str
) -> None:
    from amp_ir.dialect import call_op

    def body(
        x: relax.Expr, grad: relax.Expr, weight: relax.Expr, bias: relax.Expr
    ) -> tuple[relax.Expr, ...]:
        x, grad = (R.permute_dims(one, [0, 3, 1, 2]) for one in (x, grad))
        norm = call_op("amp_ir.group_norm", [x, weight, bias], groups=groups, eps=1e-5)
        y, mean, rstd = (relax.TupleGetItem(norm, k) for k in range(3))
        dx = call_op(
            "amp_ir.group_norm_backward_input", [grad, x, mean, rstd, weight], groups=groups
        )
        sums = call_op("amp_ir.group_norm_backward_weight", [grad, x, mean, rstd], groups=groups)
        lasts = (R.permute_dims(one, [0, 2, 3, 1]) for one in (y, dx))
        return (*lasts, mean, rstd, *(relax.TupleGetItem(sums, k) for k in range(2)))

    shapes = [((n, height, width, channels), dtype)] * 2 + [((channels,), "float32")] * 2
    mod = build(shapes, body)
    inputs = [sample(*one) for one in shapes]
    # A group of the second case is 35 elements, of the third 3 rows: nothing cancels to less.
    tolerance = 1e-5 if dtype == "float32" else 2**-7
    for got, expected in zip(run_kernels(mod, inputs), interpret(mod, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=10 * tolerance, atol=tolerance)


def test_other_tensors_of_four_dimensions_stay_as_they_are() -> None:
    x = image(2, 8, 4, 5)
    assert channels_last(pointwise(x.shape, "float32", lambda *i: x[i])) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_on_both_layouts_give_the_right_numbers(dtype: str) -> None:
    def body(last: relax.Expr, first: relax.Expr, bias: relax.Expr) -> tuple[relax.Expr, ...]:
        x = R.permute_dims(last, [0, 3, 1, 2])
        y = R.add(R.nn.relu(x), first)
        z = R.add(y, R.reshape(bias, (8, 1, 1)))
        return (
            R.permute_dims(z, [0, 2, 3, 1]),
            z,
            R.mean(R.astype(z, "float32"), [2, 3]),
            R.sum(R.astype(y, "float32"), [0, 2, 3]),
            R.reshape(z, (2, 160)),
            R.permute_dims(z, [1, 0, 2, 3]),
        )

    mod = build([((2, 4, 5, 8), dtype), ((2, 8, 4, 5), dtype), ((8,), dtype)], body)
    inputs = [sample(shape, dtype) for shape in ((2, 4, 5, 8), (2, 8, 4, 5), (8,))]
    tolerance = 1e-5 if dtype == "float32" else 2**-7
    for got, expected in zip(run_kernels(mod, inputs), interpret(mod, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
