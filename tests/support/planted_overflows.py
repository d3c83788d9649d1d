# SPDX-License-Identifier: Apache-2.0
"""Steps with an infinity or NaN that a test plants, each with its op, module and line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir

Forward = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two linear layers, the second one nested, around what a case plants."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Identity(), nn.Sequential(nn.ReLU(), nn.Linear(8, 4))])
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)

    def rest(self, h: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](h).square().mean()


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    # A case is traced and replayed in half of the time that Adam's ops take.
    return torch.optim.SGD(parameters, lr=1e-3)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


@attrs.frozen(kw_only=True)
class Planted:
    """One case: what it plants, and what must be found.

    `op`, `module` and `phase` are those of the op, whose line is that of the mark `# here`, in
    `forward` unless in `marked`. `tensor` is what holds the value before the step. `helps` has the
    words "scale" and "override" for what makes the step finite.
    """

    forward: Forward
    op: str = ""
    module: str = ""
    phase: str = "forward"
    cause: str = "op"
    value: str = "infinity"
    dtype: str = "float32"
    amp_dtype: str = "float16"
    is_scaled: bool = True
    batch: Callable[[], torch.Tensor] = lambda: torch.randn(4, 6)
    prepare: Callable[[Net, torch.optim.Optimizer], None] = lambda net, optimizer: None
    optimizer: Callable[[Any], torch.optim.Optimizer] = plain_sgd
    tensor: str = ""
    helps: tuple[str, ...] = ()
    marked: Callable[..., Any] | None = None

    @property
    def line(self) -> int:
        """The number of the marked line."""
        lines, first = inspect.getsourcelines(self.marked or self.forward)
        return first + next(k for k, text in enumerate(lines) if "# here" in text)


@attrs.define(eq=False)
class PlantedStep:
    """The step of a case, as a user writes it."""

    case: Planted
    net: Net
    optimizer: torch.optim.Optimizer
    scaler: amp_ir.GradScaler | None
    batch: torch.Tensor

    @classmethod
    def of(cls, case: Planted) -> PlantedStep:
        torch.manual_seed(0)
        net = Net(case.forward)
        optimizer = case.optimizer(net.parameters())
        made = cls(
            case, net, optimizer, amp_ir.GradScaler() if case.is_scaled else None, case.batch()
        )
        case.prepare(net, optimizer)
        return made

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.net(x)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()  # here
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def traced(self) -> amp_ir.StepModule:
        """Capture the step, in the case's dtype."""
        mod, args = amp_ir.trace_step(
            self.step, (self.batch,), model=self.net, optimizer=self.optimizer, scaler=self.scaler
        )
        found: amp_ir.StepModule = amp_ir.autocast(mod, args, amp_dtype=self.case.amp_dtype)
        return found


def multiply(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = torch.relu(net.first(x)) * 1e6
    h = net.blocks[1][1](h)  # here
    return h.mean() * 1e-6


def stored_product(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = torch.relu(net.first(x))
    h = h * 300.0  # here
    return net.blocks[1][1](h).square().mean()


def squared_norm(net: Net, x: torch.Tensor) -> torch.Tensor:
    weights = (net.first.weight, net.first.bias, net.blocks[1][1].weight, net.blocks[1][1].bias)
    return torch.stack([one.square().sum() for one in weights]).sum() + x.mean()


def plain(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)  # here
    return net.blocks[1](h).mean() * 1e-6


def nested(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.blocks[1](net.first(x))  # here
    return (h @ h.t()).mean() * 1e-6


def exponential(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)
    h = torch.exp(h.abs() + 90.0)  # here
    return net.rest(h)


def logarithm(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)
    h = torch.log(h - h)  # here
    return net.rest(h)


def zero_by_zero(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)
    h = (h - h) / (h - h)  # here
    return net.rest(h)


def masked_row(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)
    scores = h.masked_fill(torch.ones(4, 8, dtype=torch.bool), -math.inf)
    h = torch.softmax(scores, -1)  # here
    return net.rest(h)


def root_of_zero(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)
    h = torch.sqrt(h - h)  # here
    return net.rest(h)


def where_of_log(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x) * 0.0
    found = torch.log(h)  # here
    h = torch.where(h > 0, found, torch.zeros_like(h))
    return net.rest(h)


def big_loss(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)
    h = net.blocks[1](h)  # here
    return h.square().sum() * 1e2


def unused_infinity(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)
    mask = torch.tensor([0.0, 1.0] * 4).log()
    kept = torch.softmax(h + mask, -1)
    h = torch.exp(h.abs() + 90.0)  # here
    return net.rest(h) + kept.mean()


def masks_and_overflow(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)
    mask = (x[:, :1] * 0.0 + torch.tensor([0.0, 1.0] * 4)).log()
    h = torch.exp(h.abs() + 90.0)  # here
    h = torch.softmax(h + mask, -1)
    return net.rest(h)


def own_cast(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x) * 1e6
    h = h.half()  # here
    return net.rest(h.float())


def squared(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x) * 1e20
    h = h.square()  # here
    return net.rest(h)


def power(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x).abs() + 10.0
    h = h**40.0  # here
    return net.rest(h)


def normalised(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.norm(net.first(x) * 1e25)  # here
    return net.rest(h)


def zero_norm(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x) * 0.0
    h = h / h.norm()  # here
    return net.rest(h)


def reciprocal(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x) * 0.0
    h = 1.0 / h  # here
    return net.rest(h)


def dropped(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.drop(torch.relu(net.first(x))) * 1e6
    h = net.blocks[1][1](h)  # here
    return h.mean() * 1e-6


def growing(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)
    for _ in range(20):
        h = torch.tanh(h) * 3.0
        h = torch.exp(h.abs() + 90.0)  # here
    return net.rest(h)


def external(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x) * 0.0
    h = torch.lgamma(h)  # here
    return net.rest(h)


def no_gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.rest(net.first(x) * 0.0)


def convolved(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = (net.first(x) * 1e4).view(4, 1, 8)
    h = F.conv1d(h, net.first.weight.view(8, 1, 6) * 100.0)  # here
    return F.conv1d(h, net.first.weight.view(6, 8, 1)).mean() * 1e-6


def cross_entropy(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.first(x)
    weight = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    target = torch.ones(4, dtype=torch.long)
    return F.cross_entropy(h, target, weight)  # here


def fill(tensor: torch.Tensor, value: float) -> None:
    """Set one element."""
    with torch.no_grad():
        tensor.view(-1)[0] = value


def big_weight(net: Net, _optimizer: torch.optim.Optimizer) -> None:
    """Make the first layer's weights larger than float16 can hold."""
    with torch.no_grad():
        net.first.weight.mul_(1e6)


def larger_weight(net: Net, _optimizer: torch.optim.Optimizer) -> None:
    """Make the first layer's results larger than float16 can hold, and not its weights."""
    with torch.no_grad():
        net.first.weight.fill_(3e4)


def larger_nested_weight(net: Net, _optimizer: torch.optim.Optimizer) -> None:
    """Make the nested layer's results larger than float16 can hold."""
    with torch.no_grad():
        net.blocks[1][1].weight.fill_(6e4)
        net.first.bias.fill_(1.0)


def nan_moments(_net: Net, optimizer: torch.optim.Optimizer) -> None:
    """Give Adam a state with a NaN."""
    for parameter in optimizer.param_groups[0]["params"]:
        zeros = torch.zeros_like(parameter)
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0), "exp_avg": zeros.clone(), "exp_avg_sq": zeros.clone()
        }  # fmt: skip
    fill(optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"], math.nan)


def big_batch() -> torch.Tensor:
    return torch.full((4, 6), 1e6)


def nan_batch() -> torch.Tensor:
    batch = torch.randn(4, 6)
    batch[2, 3] = math.nan
    return batch


def infinite_batch() -> torch.Tensor:
    batch = torch.randn(4, 6)
    batch[0, 0] = math.inf
    return batch


def ones_batch() -> torch.Tensor:
    return torch.ones(4, 6)


def sgd(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def adam_without_epsilon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, eps=0.0)


PLANTED = {
    # float16: the result of an op, casts for an op, a user's own cast.
    "a product that a layer reads": Planted(
        forward=multiply, op="relax.matmul", module="blocks.1.1", dtype="float16",
        helps=("override",),
    ),
    "a product that is stored": Planted(
        forward=stored_product, op="relax.multiply", dtype="float16", helps=("override",),
        batch=lambda: torch.randn(4, 6) * 1e3, optimizer=adam,
    ),
    "a layer's result": Planted(
        forward=plain, prepare=larger_weight, batch=ones_batch, op="relax.add", module="first",
        dtype="float16", helps=("override",),
    ),
    "a nested layer's result": Planted(
        forward=nested, prepare=larger_nested_weight, batch=ones_batch, op="relax.add",
        module="blocks.1.1", dtype="float16", helps=("override",),
    ),
    "a convolution": Planted(
        forward=convolved, op="amp_ir.conv", dtype="float16", helps=("override",)
    ),
    "the cast of a batch": Planted(
        forward=plain, batch=big_batch, op="relax.matmul", module="first", dtype="float16",
        helps=("override",),
    ),
    "the cast of a weight": Planted(
        forward=plain, prepare=big_weight, op="relax.matmul", module="first", dtype="float16",
        helps=("override",),
    ),
    "a cast of the user's": Planted(forward=own_cast, op="relax.astype", dtype="float16"),
    "a product after dropout": Planted(
        forward=dropped, op="relax.matmul", module="blocks.1.1", dtype="float16",
        helps=("override",),
    ),
    "a product, without a scaler": Planted(
        forward=multiply, op="relax.matmul", module="blocks.1.1", dtype="float16",
        is_scaled=False, helps=("override",),
    ),
    # float16: a gradient that is multiplied by the loss scale.
    "a scaled gradient": Planted(
        forward=big_loss, op="relax.matmul", module="blocks.1.1", phase="backward",
        dtype="float16", helps=("scale", "override"),
    ),
    # Arithmetic that no dtype saves, forward.
    "exp": Planted(forward=exponential, op="relax.exp"),
    "exp in bfloat16": Planted(
        forward=exponential, op="relax.exp", amp_dtype="bfloat16", is_scaled=False
    ),
    "exp in float32": Planted(
        forward=exponential, op="relax.exp", amp_dtype="float32", is_scaled=False
    ),
    "exp beside a mask with infinities": Planted(forward=unused_infinity, op="relax.exp"),
    "exp below a mask with infinities": Planted(forward=masks_and_overflow, op="relax.exp"),
    "a square": Planted(forward=squared, op="relax.multiply", amp_dtype="bfloat16"),
    "a power": Planted(forward=power, op="relax.power"),
    "1 / 0": Planted(forward=reciprocal, op="relax.divide"),
    "0 / 0": Planted(forward=zero_by_zero, op="relax.divide", value="NaN"),
    "0 / |0|": Planted(forward=zero_norm, op="relax.divide", value="NaN"),
    "softmax of nothing": Planted(forward=masked_row, op="relax.nn.softmax", value="NaN"),
    "the mean of no classes": Planted(forward=cross_entropy, op="amp_ir.nll_loss", value="NaN"),
    "a variance": Planted(
        forward=normalised, op="amp_ir.batch_norm", module="norm"
    ),
    "a loop": Planted(forward=growing, op="relax.exp"),
    "an external call": Planted(forward=external, op="aten::lgamma"),
    # Backward.
    "the gradient of a root": Planted(
        forward=root_of_zero, op="relax.divide", phase="backward", value="NaN"
    ),
    "the gradient of log 0": Planted(
        forward=logarithm, op="relax.divide", phase="backward", value="NaN"
    ),
    "the gradient of what where drops": Planted(
        forward=where_of_log, op="relax.divide", phase="backward", value="NaN"
    ),
    # The optimizer.
    "Adam without epsilon": Planted(
        forward=no_gradient, optimizer=adam_without_epsilon, op="relax.divide", phase="optimizer",
        value="NaN", is_scaled=False, marked=PlantedStep.step,
    ),
    "a large step": Planted(
        forward=big_loss, batch=big_batch, optimizer=sgd(3e38), op="relax.multiply",
        phase="optimizer", amp_dtype="float32", is_scaled=False, marked=PlantedStep.step,
    ),
    # What was there before the step.
    "NaN in the batch": Planted(
        forward=plain, batch=nan_batch, cause="batch", value="NaN", tensor="batch0"
    ),
    "infinity in the batch": Planted(
        forward=plain, batch=infinite_batch, cause="batch", tensor="batch0", amp_dtype="float32",
        is_scaled=False,
    ),
    "NaN in a weight": Planted(
        forward=plain, prepare=lambda net, _: fill(net.first.weight, math.nan), cause="state",
        value="NaN", tensor="first.weight",
    ),
    "infinity in a buffer": Planted(
        forward=normalised, prepare=lambda net, _: fill(net.eval().norm.running_mean, math.inf),
        cause="state", tensor="norm.running_mean",
    ),
    "NaN in the optimizer": Planted(
        forward=plain, prepare=nan_moments, optimizer=adam, cause="state", value="NaN",
        tensor="optimizer0.first.weight.exp_avg",
    ),
    "an infinite learning rate": Planted(
        forward=squared_norm, optimizer=sgd(math.inf), op="relax.multiply", phase="optimizer",
        cause="constant", amp_dtype="float32", is_scaled=False, marked=PlantedStep.step,
    ),
}  # fmt: skip
