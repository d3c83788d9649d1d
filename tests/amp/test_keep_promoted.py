# SPDX-License-Identifier: Apache-2.0
"""What PyTorch promotes to float32 is not rounded before a sum that may cancel it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import amp_ir

LOW = ("float16", "bfloat16")
Loss = Callable[..., torch.Tensor]


def _net(out: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, out))


def _area(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Corners at 200, of which slices are subtracted: each is rounded to 1 in bfloat16."""
    corners = x[..., :2] + 200 + 0.05 * net(x)
    u, v = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    return ((u[:, 0] * v[:, 1] - u[:, 1] * v[:, 0] - 1) ** 2).mean()


def _camera(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Pixels around (320, 240), a vector that is added as a bias is."""
    points = x[..., :3] * 0.3 + torch.tensor([0.0, 0.0, 5.0])
    centre = torch.tensor([320.0, 240.0])
    moved = points + 0.01 * net(x)
    seen, there = (500 * one[..., :2] / one[..., 2:] + centre for one in (moved, points))
    return F.mse_loss(seen - 1, there)


def _spread(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """E x^2 - (E x)^2 of numbers around 30 that a matmul reads low, too."""
    z = net(x) * torch.tensor([1.0, 2.0]) + torch.tensor([30.0, -20.0])
    spread = (z.square().mean(1) - z.mean(1) ** 2).mean()
    return spread + 1e-9 * (z @ z.mT).square().mean()


def _phase(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Positions from 9000 on, times frequencies that are powers."""
    position = torch.arange(3).float() + 9000
    angle = position[:, None] * (1 / 100 ** (torch.arange(2).float() / 2))
    return ((net(x) * angle.cos() - net(x).flip(-1) * angle.sin() - x[..., :2]) ** 2).mean()


def _logits(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Logits around 80 that a matmul reads low, too: a rounding of 0.25 moves probabilities."""
    z = (net(x[:, 0]) + torch.arange(8) * 0.1 + 20) * torch.full((8,), 4.0)
    classes = (x[:, 0, 0] > 0).long()
    return F.cross_entropy(z, classes) + 1e-8 * (z @ z.mT).mean()


def _gradients(loss: Loss, net: torch.nn.Module, x: torch.Tensor, low: str = "") -> torch.Tensor:
    with torch.autocast("cpu", getattr(torch, low or "bfloat16"), enabled=bool(low)):
        value = loss(net, x)
    gradients = torch.autograd.grad(value, list(net.parameters()))
    return torch.cat([one.double().flatten() for one in gradients])


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(
    ("loss", "out"),
    [(_area, 2), (_camera, 3), (_spread, 2), (_phase, 2), (_logits, 8)],
)
def test_gradients_are_as_exact_as_those_of_torch_autocast(low: str, loss: Loss, out: int) -> None:
    """Strict, so that what a kernel keeps in registers does not hide a rounding of the plan.

    Errors were 0.1 to 0.9 in bfloat16 where a float32 sum, or a product with one, was rounded.
    """
    net, x = _net(out), torch.randn(64, 3, 16)

    def step(x: torch.Tensor) -> torch.Tensor:
        value = loss(net, x)
        value.backward()
        return value.detach()

    exact = _gradients(loss, copy.deepcopy(net).double(), x.double())
    peer = _gradients(loss, net, x, low)
    amp_ir.jit(step, model=net, amp_dtype=low, rounding="strict")(x)
    ours = torch.cat([one.grad.double().flatten() for one in net.parameters()])
    # Half as much again, and a rounding: one draw, whose roundings are others.
    allowed = 1.5 * (peer - exact).norm() + torch.finfo(getattr(torch, low)).eps * exact.norm()
    assert (ours - exact).norm() <= allowed


_CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda h: h.float(),
    "to": lambda h: h.to(torch.float32),
    "to with a name": lambda h: h.to(dtype=torch.float32, device="cpu"),
    "type": lambda h: h.type(torch.float32),
    "a view": lambda h: h.view(h.shape).float(),
    "a part": lambda h: h.chunk(1, -1)[0].float(),
    "twice": lambda h: (h.sigmoid(), h.float())[1],
}


@pytest.mark.parametrize("cast", sorted(_CASTS))
def test_low_precision_ends_where_the_user_casts_to_float32(cast: str) -> None:
    """The cast is no op in a float32 trace. Forgotten, the gradient's error was 0.9."""

    def loss(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = net(x)
        q = (_CASTS[cast](h) if x.dtype == torch.float32 else h) * 3.0 + 1000.0
        return (q[:, 1:] - q[:, :-1]).square().mean()

    net, x = _net(8), torch.randn(64, 16)

    def step(x: torch.Tensor) -> torch.Tensor:
        value = loss(net, x)
        value.backward()
        return value.detach()

    exact = _gradients(loss, copy.deepcopy(net).double(), x.double())
    peer = _gradients(loss, net, x, "bfloat16")
    amp_ir.jit(step, model=net, amp_dtype="bfloat16", rounding="strict")(x)
    ours = torch.cat([one.grad.double().flatten() for one in net.parameters()])
    # As above; the error of a step that rounds 1000 is 0.9 of the gradient.
    allowed = 1.5 * (peer - exact).norm() + torch.finfo(torch.bfloat16).eps * exact.norm()
    assert (ours - exact).norm() <= allowed


def test_a_cast_to_a_device_says_nothing_of_precision() -> None:
    """And without a cast, products with numbers may be low, as under torch.autocast."""
    net = _net(8)
    for cast, expected in ((lambda h: h.to("cpu"), False), (lambda h: h.float(), True)):

        def step(x: torch.Tensor, cast: Any = cast) -> torch.Tensor:
            q = cast(net(x)) * 3.0 + 1000.0
            loss = (q[:, 1:] - q[:, :-1]).square().mean()
            loss.backward()
            return loss.detach()

        ops = [one for one in _plan(step, torch.randn(64, 16), model=net) if not one.module]
        rules = {one.rule for one in ops if one.phase == "forward"}
        assert ("promoted" in rules) is expected


def _plan(step: Callable[..., Any], *batch: torch.Tensor, **options: Any) -> list[Any]:
    mod = amp_ir.trace_step(step, batch, model=options.pop("model"))[0]
    return list(amp_ir.autocast(mod, amp_dtype="bfloat16", **options).plan.ops)


@pytest.mark.parametrize("policy", ["default", "conservative"])
def test_a_matmul_of_float32_by_a_vector_is_float32(policy: str) -> None:
    """As mv is under torch.autocast on a CPU; what a layer has made low is multiplied low."""
    layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = torch.mv(layers[0].weight, x[0]).square().mean()
        loss = loss + (F.relu(layers[1](x)) @ layers[0].bias).square().mean()
        loss.backward()
        return loss.detach()

    x, net = torch.randn(4, 8), copy.deepcopy(layers)
    ops = _plan(step, x, model=layers, policy=policy)
    (reads,) = {one.reads for one in ops if one.rule == "vector"}
    assert reads == ("float32", "float32")
    others = [one for one in ops if one.name == "relax.matmul" and one.rule != "vector"]
    assert {"bfloat16"} in [set(one.reads) for one in others if one.phase == "forward"]
    amp_ir.jit(step, model=layers, amp_dtype="bfloat16", policy=policy)(x)
    exact = net.double()[0].weight
    torch.mv(exact, x[0].double()).square().mean().backward()
    assert layers[0].weight.grad is not None
    # Of float32: sums of eight products, in one order or another.
    error = (layers[0].weight.grad - exact.grad).norm()
    assert error <= 1e-6 * exact.grad.norm()


def test_what_torch_autocast_has_low_may_be_stored_low():
    """A bias of a layer, and what numbers alone scale, before a residual sum."""
    layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])

    def step(x: torch.Tensor) -> torch.Tensor:
        x = layers[0](x)
        y = x + 0.5 * F.relu(layers[1](x))
        loss = (y @ y.mT).square().mean()
        loss.backward()
        return loss.detach()

    ops = _plan(step, torch.randn(4, 6, 8), model=layers)
    assert "promoted" not in {one.rule for one in ops}
    biases = [one for one in ops if one.name == "relax.add" and one.module and one.rule != "state"]
    assert {one.label for one in biases if one.phase == "forward"} == {"low"}


def test_a_rule_of_the_users_decides_beside_what_is_promoted() -> None:
    net = _net(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = _spread(net, x)
        loss.backward()
        return loss.detach()

    def low_products(args: Any, ret_type: Any, amp_dtype: str) -> Any:
        """Low: this test asks for it."""
        return [amp_ir.amp.PrimType(amp_dtype)] * len(args)

    x = torch.randn(4, 3, 16)
    ours = {one.rule for one in _plan(step, x, model=net) if one.name == "relax.multiply"}
    assert "promoted" in ours
    with amp_ir.CustomTypeHint({"relax.multiply": low_products}):
        theirs = {one.rule for one in _plan(step, x, model=net) if one.name == "relax.multiply"}
    assert "low_products" in theirs
    assert "promoted" not in theirs
    override = amp_ir.Override(op="multiply", to="low")
    (rule,) = {
        one.rule
        for one in _plan(step, x, model=net, overrides=[override])
        if one.name == "relax.multiply"
    }
    assert rule == "override"


_OF_MATRICES: dict[str, Loss] = {
    "cholesky": lambda a: torch.linalg.cholesky(a).sum(),
    "inv": lambda a: torch.linalg.inv(a).sum(),
    "solve": lambda a: torch.linalg.solve(a, a.diagonal()[:, None]).sum(),
    "eigh": lambda a: (torch.linalg.eigh(a)[0] ** 2).sum(),
    "eigenvectors": lambda a: torch.linalg.eigh(a)[1].abs().sum(),
    "svd": lambda a: torch.linalg.svdvals(a).sum(),
    "qr": lambda a: torch.linalg.qr(a)[1].abs().sum(),
    "logdet": torch.logdet,
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", sorted(_OF_MATRICES))
def test_the_gradient_of_a_factorization_is_that_of_float32(low: str, name: str) -> None:
    """PyTorch computes it outside of autocast. With low matmuls its error was 1e-3 to 5e-3."""
    model = torch.nn.Module()
    model.register_parameter("weight", torch.nn.Parameter(torch.randn(6, 6) * 0.3))

    def loss(weight: torch.Tensor) -> torch.Tensor:
        diagonal = torch.diag(torch.arange(1.0, 7.0, dtype=weight.dtype))
        return _OF_MATRICES[name](0.5 * (weight + weight.mT) + 2 * diagonal)

    def step() -> torch.Tensor:
        value = loss(model.weight)
        value.backward()
        return value.detach()

    exact_weight = model.weight.detach().double().requires_grad_()
    loss(exact_weight).backward()
    amp_ir.jit(step, model=model, amp_dtype=low)()
    assert model.weight.grad is not None
    # Some hundred sums of float32, of 2^-24 each, and differences of eigenvalues below 1.
    error = (model.weight.grad.double() - exact_weight.grad).norm()
    assert error <= 1e-4 * exact_weight.grad.norm()


def test_a_layer_behind_a_call_of_pytorchs_own_keeps_its_low_matmuls() -> None:
    layer = torch.nn.Linear(6, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layer(torch.linalg.eigh(x)[1]).square().mean()
        loss.backward()
        return loss.detach()

    matmuls = [
        one for one in _plan(step, torch.randn(3, 6, 6), model=layer) if one.name == "relax.matmul"
    ]
    assert {one.phase for one in matmuls} == {"forward", "backward"}
    assert {one.reads for one in matmuls} == {("bfloat16", "bfloat16")}
