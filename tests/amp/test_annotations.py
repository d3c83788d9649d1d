# SPDX-License-Identifier: Apache-2.0
"""Annotated functions run low, in float32 or in the widest dtype, backward included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import OptionError
from external_ops import training

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))


class Middle(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.function(self.first(x))).square().mean()


def planned(function: Any, **options: Any) -> dict[tuple[str, str], Any]:
    """The plan's ops of the function by name and phase."""
    model = Middle(function)
    optimizer, step = training(model)
    mod, _ = amp_ir.trace_step(step, (X,), model=model, optimizer=optimizer)
    plan = amp_ir.autocast(mod, amp_dtype="bfloat16", **options).plan
    return {(one.name, one.phase): one for one in plan.ops}


@amp_ir.half_function
def low_softmax(h: torch.Tensor) -> torch.Tensor:
    return torch.softmax(h, -1)


@amp_ir.float_function
def full_product(h: torch.Tensor) -> torch.Tensor:
    return h @ h.t() @ h


@amp_ir.promote_function
def promoted(h: torch.Tensor) -> torch.Tensor:
    return torch.exp(torch.softmax(h, -1))


def test_a_half_function_is_low_in_both_passes():
    ops = planned(low_softmax)
    for name, phase in (
        ("relax.nn.softmax", "forward"),
        ("amp_ir.softmax_backward", "backward"),
    ):
        one = ops[name, phase]
        assert set(one.reads) == {"bfloat16"} and one.rule == "half_function"
        assert list(one.results) == ["bfloat16"]
    assert set(planned(lambda h: torch.softmax(h, -1))["relax.nn.softmax", "forward"].reads) == {
        "float32"
    }


def test_a_float_function_is_in_float32_in_both_passes():
    model = Middle(full_product)
    optimizer, step = training(model)
    mod, _ = amp_ir.trace_step(step, (X,), model=model, optimizer=optimizer)
    plan = amp_ir.autocast(mod, amp_dtype="bfloat16").plan
    products = [
        one for one in plan.ops if one.name == "relax.matmul" and one.rule == "float_function"
    ]
    assert {one.phase for one in products} == {"forward", "backward"}
    assert all(set(one.reads) == {"float32"} for one in products)


def test_a_promote_function_follows_what_it_reads():
    @amp_ir.promote_function
    def wide(h: torch.Tensor) -> torch.Tensor:
        return torch.exp(h)

    def after_low(h: torch.Tensor) -> torch.Tensor:
        return wide(low_softmax(h))

    def after_full(h: torch.Tensor) -> torch.Tensor:
        return wide(torch.softmax(h, -1))

    assert set(planned(after_low)["relax.exp", "forward"].reads) == {"bfloat16"}
    assert set(planned(after_full)["relax.exp", "forward"].reads) == {"float32"}


def test_the_innermost_annotation_decides_and_an_override_comes_after_it():
    @amp_ir.float_function
    def outer(h: torch.Tensor) -> torch.Tensor:
        return low_softmax(h)

    @amp_ir.half_function
    def around(h: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.softmax(h, -1)

    softmax = ("relax.nn.softmax", "forward")
    assert planned(outer)[softmax].rule == "half_function"
    assert planned(around)[softmax].rule == "autocast_off"
    full = amp_ir.Override(op="relax.nn.softmax", to="float32")
    assert set(planned(low_softmax, overrides=[full])[softmax].reads) == {"float32"}


class Library:
    """Stands for a module of functions."""

    @staticmethod
    def normalize(h: torch.Tensor) -> torch.Tensor:
        return torch.softmax(h, -1)


def test_a_registered_function_is_annotated_while_a_step_is_captured():
    before = Library.normalize
    amp_ir.register_half_function(Library, "normalize")
    softmax = ("relax.nn.softmax", "forward")
    assert planned(lambda h: Library.normalize(h))[softmax].rule == "half_function"
    assert Library.normalize is before
    amp_ir.register_float_function(Library, "normalize")
    assert planned(lambda h: Library.normalize(h))[softmax].rule == "float_function"
    amp_ir.register_promote_function(Library, "normalize")
    assert planned(lambda h: Library.normalize(h))[softmax].rule == "promote_function"


def test_a_function_that_is_not_there_is_refused():
    with pytest.raises(OptionError) as caught:
        amp_ir.register_half_function(Library, "normalise")
    assert str(caught.value) == (
        "Library has no function 'normalise'; pass the module, or the class, that the function is "
        'looked up in, as in register_half_function(torch.nn.functional, "linear")'
    )


def test_annotations_change_nothing_in_plain_pytorch():
    h = torch.randn(3, 4)
    assert torch.equal(low_softmax(h), torch.softmax(h, -1))
    assert low_softmax.__name__ == "low_softmax"


def test_an_annotated_step_trains():
    model = Middle(lambda h: promoted(full_product(low_softmax(h))))
    optimizer, step = training(model)
    compiled = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype="bfloat16")
    with torch.no_grad():
        expected = model(X)
    torch.testing.assert_close(compiled(X)[0], expected, rtol=2**-6, atol=1e-3)


def test_a_registration_after_the_capture_compiles_the_step_again():
    class Functions:
        """Stands for a module of functions."""

        @staticmethod
        def scaled(h: torch.Tensor) -> torch.Tensor:
            return torch.softmax(h, -1)

    model = Middle(lambda h: Functions.scaled(h))
    optimizer, step = training(model)
    compiled = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype="bfloat16")
    compiled(X)
    amp_ir.register_half_function(Functions, "scaled")
    compiled(X)
    (again,) = compiled.recompiles
    assert "Functions.scaled (low)" in str(again), str(again)
