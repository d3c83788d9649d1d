# SPDX-License-Identifier: Apache-2.0
"""Tensors whose values are not what their memory holds, wherever a step may meet them.

Each is refused in words, at the capture and at a call, and the step goes on where it is usable
again. Some of them took the process down.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import amp_ir
from amp_ir import errors
from amp_ir.ir.unusable_tensors import tensor_error


class Tagged(torch.Tensor):
    """A subclass of the user's."""


class DTensor(torch.Tensor):
    """Stands for torch.distributed's, which needs a group of processes to be made."""


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def halved(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.nbytes // 2)
    return tensor


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "meta": lambda t: t.to("meta"),
    "freed": freed,
    "halved": halved,
    "sparse": lambda t: t.to_sparse(),
    "quantized": quantized,
    "complex": lambda t: t.to(torch.complex64),
    "conjugated": lambda t: t.to(torch.complex64).conj(),
    "negated": torch._neg_view,
    "imaginary part of a conjugate": lambda t: torch.complex(t, t).conj().imag,
    "zero": lambda t: torch._efficientzerotensor(t.shape),
    "subclass": lambda t: t.as_subclass(Tagged),
    "distributed": lambda t: t.as_subclass(DTensor),
}
MEMORY = "has {} bytes of memory, and its shape needs {}: its storage was freed or resized "
ERRORS = {
    "fake": "is a FakeTensor, which has no values; make a real tensor outside of FakeTensorMode. "
    "In a step that is captured, call the model or the function itself, not what "
    "amp_ir.convert_model or amp_ir.jit made of it",
    "meta": "is on the meta device and has no values; materialise it (to_empty) first",
    "freed": MEMORY + "(untyped_storage().resize_); give it memory again before the step",
    "halved": MEMORY + "(untyped_storage().resize_); give it memory again before the step",
    "sparse": "is sparse (torch.sparse_coo); only dense tensors can be captured, use .to_dense()",
    "quantized": "is quantized; train in floating point",
    "complex": "is complex (torch.complex64); keep torch.view_as_real of it, and call "
    "torch.view_as_complex in the step",
    "conjugated": "is complex (torch.complex64); keep torch.view_as_real of it, and call "
    "torch.view_as_complex in the step",
    "negated": "is negated only when it is read (torch.Tensor.is_neg()); use .resolve_neg()",
    "imaginary part of a conjugate": (
        "is negated only when it is read (torch.Tensor.is_neg()); use .resolve_neg()"
    ),
    "zero": "is a zero without memory; use torch.zeros_like of it",
    "subclass": (
        f"is a {__name__}.Tagged, and a compiled step calls nothing that a subclass of "
        "torch.Tensor defines; use a plain tensor of its values"
    ),
    "distributed": "is a DTensor, of which this process holds a part; use .full_tensor()",
}


@attrs.define
class Setting:
    """A step with a parameter, a buffer, a gradient and optimizer state in use."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Any
    x: torch.Tensor
    y: torch.Tensor

    @classmethod
    def make(cls) -> Setting:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        model.register_buffer("scale", torch.full((4,), 0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x * model.scale), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        made = cls(model, optimizer, step, torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
        made.step(made.x, made.y)
        return made

    def jitted(self) -> Any:
        return amp_ir.jit(self.step, model=self.model, optimizer=self.optimizer)

    def values(self) -> Any:
        states = self.model.state_dict(), self.optimizer.state_dict()["state"]
        return copy.deepcopy([*states, [one.grad.clone() for one in self.model.parameters()]])


def put_parameter(setting: Setting, value: torch.Tensor) -> None:
    setting.model._parameters["weight"] = value  # type: ignore[assignment]
    setting.optimizer.param_groups[0]["params"][0] = value


def put_buffer(setting: Setting, value: torch.Tensor) -> None:
    setting.model._buffers["scale"] = value


def put_gradient(setting: Setting, value: torch.Tensor) -> None:
    setting.model.weight.grad = value


def put_state(setting: Setting, value: torch.Tensor) -> None:
    setting.optimizer.state[setting.model.weight]["momentum_buffer"] = value


def put_batch(setting: Setting, value: torch.Tensor) -> None:
    setting.x = value


Place = tuple[str, Callable[[Setting], torch.Tensor], Callable[[Setting, torch.Tensor], None]]
PLACES: dict[str, Place] = {
    "batch": ("argument 0", lambda s: s.x, put_batch),
    "parameter": ("weight", lambda s: s.model.weight, put_parameter),
    "buffer": ("scale", lambda s: s.model.scale, put_buffer),
    "gradient": ("weight.grad", lambda s: s.model.weight.grad, put_gradient),
    "state": (
        "'momentum_buffer' of optimizer 0 for weight",
        lambda s: s.optimizer.state[s.model.weight]["momentum_buffer"],
        put_state,
    ),
}
# A parameter or a gradient of these kinds is what PyTorch itself does not make.
PYTORCH_REFUSES = {
    ("gradient", kind) for kind in ("meta", "quantized", "complex", "conjugated", "fake")
}
CASES = [(p, k) for p in PLACES for k in KINDS if (p, k) not in PYTORCH_REFUSES]


def made(kind: str, place: str, tensor: torch.Tensor) -> torch.Tensor:
    value = KINDS[kind](tensor.detach())
    if place != "parameter":
        return value
    return value if kind in ("distributed", "subclass") else nn.Parameter(value, False)


def expected(kind: str, place: str, tensor: torch.Tensor) -> str:
    name = PLACES[place][0]
    held = 0 if kind == "freed" else tensor.nbytes // 2
    return f"{name} {ERRORS[kind].format(held, tensor.nbytes)}"


@pytest.fixture(scope="module")
def running() -> tuple[Setting, Any]:
    setting = Setting.make()
    train = setting.jitted()
    train(setting.x, setting.y)
    return setting, train


@pytest.mark.parametrize(("place", "kind"), CASES)
def test_it_is_refused_at_a_capture_and_at_a_call(
    running: tuple[Setting, Any], place: str, kind: str
) -> None:
    setting, train = running
    _, get, put = PLACES[place]
    usable, before = get(setting), setting.values()
    message = expected(kind, place, usable)
    try:
        put(setting, made(kind, place, usable))
        for make in (setting.jitted, lambda: train):
            # A gradient is looked at in the call: no other tensor can stand in its place unseen.
            with pytest.raises((errors.ArgumentError, errors.StateError)) as refused:
                make()(setting.x, setting.y)
            assert str(refused.value) == message
    finally:
        put(setting, usable)
    torch.testing.assert_close(setting.values(), before, rtol=0, atol=0)


def test_a_step_goes_on_where_everything_is_usable_again(running: tuple[Setting, Any]) -> None:
    setting, train = running
    kept = setting.values()
    eager = Setting.make()
    eager.model.load_state_dict(kept[0])
    for one, gradient in zip(eager.model.parameters(), kept[2], strict=True):
        one.grad = gradient.clone()
    state = {"state": kept[1], "param_groups": eager.optimizer.state_dict()["param_groups"]}
    eager.optimizer.load_state_dict(state)
    for _ in range(2):
        torch.testing.assert_close(
            train(setting.x, setting.y), eager.step(setting.x, setting.y), rtol=1e-4, atol=1e-6
        )
    torch.testing.assert_close(setting.values(), eager.values(), rtol=1e-4, atol=1e-6)
    assert train.recompiles == []


@pytest.mark.parametrize("kind", ["freed", "halved", "negated"])
@pytest.mark.parametrize("place", ["parameter", "buffer", "gradient", "state"])
def test_memory_that_goes_under_a_compiled_step_is_seen(place: str, kind: str) -> None:
    """The tensor stays the same object: nothing but its memory tells."""
    setting = Setting.make()
    train = compiled(setting)
    train(setting.x, setting.y)
    tensor = PLACES[place][1](setting)
    before = tensor.data
    tensor.data = KINDS[kind](tensor.detach())
    names = {
        "parameter": "parameter weight", "buffer": "buffer scale",
        "gradient": "weight.grad", "state": "optimizer_state "
        "optimizer0.weight.momentum_buffer",
    }  # fmt: skip
    held = 0 if kind == "freed" else tensor.nbytes // 2
    with pytest.raises(errors.StateError) as refused:
        train(setting.x, setting.y)
    error = ERRORS[kind].format(held, tensor.nbytes)
    assert str(refused.value) == f"{names[place]} {error}"
    tensor.data = before
    train(setting.x, setting.y)


def test_a_gradient_that_is_gone_before_the_step_is_compiled_is_named() -> None:
    setting = Setting.make()
    mod, _ = amp_ir.trace_step(
        setting.step, (setting.x, setting.y), model=setting.model, optimizer=setting.optimizer
    )
    setting.model.zero_grad()
    with pytest.raises(errors.StateError) as refused:
        amp_ir.compile(mod)
    assert str(refused.value) == (
        "the step reads weight.grad, which was set at the capture and is None now; run the "
        "backward pass that sets it, or capture the step again"
    )
    setting.step(setting.x, setting.y)
    amp_ir.compile(mod)(setting.x, setting.y)


def test_a_buffer_resized_in_its_place_is_refused_until_another_takes_it() -> None:
    setting = Setting.make()
    train = setting.jitted()
    train(setting.x, setting.y)
    setting.model.scale.resize_(1, 4)
    with pytest.raises(errors.StateError) as refused:
        train(setting.x, setting.y)
    assert str(refused.value) == (
        "buffer scale was float32[4] at the capture and is now float32[1, 4], changed in its "
        "place, as resize_ and .data = do; assign a new tensor instead, for which amp_ir.jit "
        "compiles again, or call amp_ir.trace_step and amp_ir.compile again"
    )
    setting.model.scale = torch.full((1, 4), 0.5)
    eager = Setting.make()
    for one in (eager.step, eager.step):
        one(setting.x, setting.y)
    train(setting.x, setting.y)
    torch.testing.assert_close(setting.values()[1:], eager.values()[1:], rtol=1e-4, atol=1e-6)


def compiled(setting: Setting) -> amp_ir.CompiledStep:
    mod, _ = amp_ir.trace_step(
        setting.step, (setting.x, setting.y), model=setting.model, optimizer=setting.optimizer
    )
    return amp_ir.compile(mod)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_step_refuses_such_a_batch(kind: str) -> None:
    setting = running_compiled()
    with pytest.raises(errors.ArgumentError) as refused:
        setting[1](KINDS[kind](setting[0].x), setting[0].y)
    assert str(refused.value) == expected(kind, "batch", setting[0].x)


_compiled: list[Any] = []


def running_compiled() -> Any:
    if not _compiled:
        setting = Setting.make()
        _compiled.extend([setting, compiled(setting)])
    return _compiled


def test_a_step_inside_of_a_function_transform_is_refused() -> None:
    setting, train = running_compiled()
    with pytest.raises(errors.ArgumentError) as refused:
        torch.vmap(lambda x: train(x, setting.y))(setting.x[None])
    assert str(refused.value) == (
        "argument 0 is wrapped by torch.func (vmap, grad, jvp); call the step outside of it"
    )


def test_a_gradient_left_in_the_batch_is_refused_and_the_advice_works() -> None:
    model = nn.Linear(4, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    def advised(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        model(x).square().mean().backward()
        assert x.grad is not None
        return x.grad

    x = torch.randn(3, 4)
    with pytest.raises(errors.CaptureError) as refused:
        amp_ir.jit(step, model=model)(x.clone().requires_grad_())
    assert str(refused.value).endswith(
        "the backward pass leaves a gradient in argument 0 (its .grad). Pass it detached. Where "
        "the step needs its gradient, let it begin with x = x.detach().requires_grad_(), and "
        "return x.grad or use it"
    )
    amp_ir.jit(step, model=model)(x.clone().requires_grad_().detach())
    torch.testing.assert_close(amp_ir.jit(advised, model=model)(x), advised(x))


def test_parameters_with_a_class_of_their_own_and_buffers_are_usable() -> None:
    class Named(nn.Parameter):
        pass

    assert tensor_error(Named(torch.ones(2))) is None
    assert tensor_error(nn.Buffer(torch.ones(2))) is None
    assert tensor_error(torch.ones(4)[2:]) is None
    assert tensor_error(torch.ones(1).expand(5, 7)) is None
    assert tensor_error(torch.ones(0)) is None
    assert tensor_error(torch.ones(6, 4)[:, 1]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_tensor_that_was_accepted_opens_the_door_for_no_other(kind: str) -> None:
    """Accepted kinds are remembered: a tensor of the same shape, dtype and class is asked still."""
    plain = torch.ones(4, 4)
    for tensor in (plain, plain.long(), plain.bool(), plain[:, 1:], torch.ones(0)):
        assert tensor_error(tensor) is None
    with torch.inference_mode():
        assert tensor_error(torch.ones(2)) is None
    error = tensor_error(KINDS[kind](plain))
    assert error is not None and error.startswith(ERRORS[kind].split("{}")[0])
    wrapped: list[str | None] = []
    torch.func.vmap(lambda one: wrapped.append(tensor_error(one)) or one)(plain)
    assert wrapped == ["is wrapped by torch.func (vmap, grad, jvp); call the step outside of it"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert tensor_error(nested) == "is a nested tensor; pad it to a dense one"


def test_a_nested_tensor_at_a_later_call_is_refused_and_ends_no_process():
    """PyTorch's own comparison with the tensors of the last call would end it."""
    model = nn.Linear(3, 2)
    step = amp_ir.jit(lambda x: model(x).sum().detach(), model=model)
    x = torch.ones(2, 3)
    first = step(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([x[0], x[1]])
    with pytest.raises(errors.ArgumentError) as caught:
        step(nested)
    assert str(caught.value) == "argument 0 is a nested tensor; pad it to a dense one"
    assert torch.equal(step(x), first)
