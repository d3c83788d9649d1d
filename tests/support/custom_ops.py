# SPDX-License-Identifier: Apache-2.0
"""Custom ops in Python, as users register them: sound ones, and ones that break their promises."""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op, register_autocast


@custom_op("amp_ir_test::wave", mutates_args=())
def wave(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return factor * sin(x)."""
    return torch.sin(x) * factor


@custom_op("amp_ir_test::wave_backward", mutates_args=())
def wave_backward(grad: torch.Tensor, x: torch.Tensor, factor: float) -> torch.Tensor:
    return grad * torch.cos(x) * factor


@wave.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


@wave_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return wave_backward(grad, *ctx.saved_tensors, ctx.factor), None


wave.register_autograd(_backward, setup_context=_setup)


@custom_op("amp_ir_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Return 2 x; its autocast casts to bfloat16."""
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: doubled(grad))
register_autocast("amp_ir_test::doubled", "cpu", torch.bfloat16)


@custom_op("amp_ir_test::scale_", mutates_args={"x"})
def scale_(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply x in place and return its sum."""
    x.mul_(factor)
    return x.sum()


@scale_.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.new_empty(())


@custom_op("amp_ir_test::failing", mutates_args=())
def failing(x: torch.Tensor) -> torch.Tensor:
    raise LookupError("no such thing")


@custom_op("amp_ir_test::lying", mutates_args=())
def lying(x: torch.Tensor) -> torch.Tensor:
    return x[:2].clone()


@custom_op("amp_ir_test::writing", mutates_args=())
def writing(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.clone()


for _op in (failing, lying, writing):
    _op.register_fake(torch.empty_like)


@custom_op("amp_ir_test::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@custom_op("amp_ir_test::measured", mutates_args=())
def measured(x: torch.Tensor) -> float:
    return float(x.sum())


@measured.register_fake
def _(x: torch.Tensor) -> float:
    return 0.0


@custom_op("amp_ir_test::logged", mutates_args=())
def logged(x: torch.Tensor) -> None:
    return


@logged.register_fake
def _(x: torch.Tensor) -> None:
    return


@custom_op("amp_ir_test::doubled_each", mutates_args=("tensors",))
def doubled_each(tensors: list[torch.Tensor]) -> None:
    for one in tensors:
        one.mul_(2)


@custom_op("amp_ir_test::doubled_maybe", mutates_args=("x",))
def doubled_maybe(x: torch.Tensor | None) -> None:
    if x is not None:
        x.mul_(2)
