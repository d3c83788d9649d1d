# SPDX-License-Identifier: Apache-2.0
"""A step whose kernels were compiled before takes their code, and no other kernels' code."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import tvm
from tvm import tirx

import amp_ir
from amp_ir.vm import build as build_stage
from amp_ir.vm.library_cache import LibraryCache


def kernel(number: float = 1.0, extent: int = 8, dtype: str = "float32") -> tirx.PrimFunc:
    """A kernel (source, result) that adds a number."""
    source = tirx.decl_buffer((extent,), dtype, "source")
    result = tirx.decl_buffer((extent,), dtype, "result")
    i = tirx.Var("i", "int32")
    value = tirx.Add(tirx.BufferLoad(source, [i]), tirx.const(number, dtype))
    body = tirx.For(i, 0, extent, tirx.ForKind.SERIAL, tirx.BufferStore(result, value, [i]))
    return tirx.PrimFunc([source, result], body).with_attr("tirx.noalias", True)


def module(function: tirx.PrimFunc, name: str = "add") -> tvm.IRModule:
    return tvm.IRModule({name: function.with_attr("global_symbol", name)})


class Builds:
    """Stands in for the compiler, and counts what it was asked for."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Any:
        self.count += 1
        return self.count


def test_equal_kernels_are_built_once():
    cache, build = LibraryCache(), Builds()
    assert [cache.of(module(kernel()), "cpu", build) for _ in range(3)] == [1, 1, 1]
    cache.clear()
    assert cache.of(module(kernel()), "cpu", build) == 2


@pytest.mark.parametrize(
    ("other", "target"),
    [
        (module(kernel(2.0)), "cpu"),
        (module(kernel(extent=9)), "cpu"),
        (module(kernel(dtype="float64")), "cpu"),
        (module(kernel().with_attr("tirx.noalias", False)), "cpu"),
        (module(kernel(), name="sum"), "cpu"),
        (tvm.IRModule({**module(kernel()).functions, **module(kernel(), "sum").functions}), "cpu"),
        (module(kernel()), "another cpu"),
    ],
    ids=["literal", "extent", "dtype", "aliases", "name", "one more", "target"],
)
def test_kernels_that_differ_are_built(other: tvm.IRModule, target: str):
    cache, build = LibraryCache(), Builds()
    assert cache.of(module(kernel()), "cpu", build) == 1
    assert cache.of(other, target, build) == 2


def test_zeros_of_either_sign_are_two_literals():
    cache, build = LibraryCache(), Builds()
    assert cache.of(module(kernel(0.0)), "cpu", build) == 1
    assert cache.of(module(kernel(-0.0)), "cpu", build) == 2


def test_what_was_asked_for_longest_ago_is_forgotten():
    cache, build = LibraryCache(most_steps=2), Builds()
    one, two, three = (module(kernel(float(k))) for k in range(3))
    assert [cache.of(mod, "cpu", build) for mod in (one, two, one, three)] == [1, 2, 1, 3]
    assert [cache.of(mod, "cpu", build) for mod in (one, two)] == [1, 4]


def compiled() -> tuple[Any, torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.LayerNorm(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum() + model[0](x).exp().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    mod, _ = amp_ir.trace_step(step, (torch.randn(7, 6),), model=model, optimizer=optimizer)
    return amp_ir.compile(mod), model


def test_two_steps_of_the_same_code_have_their_own_state(monkeypatch):
    """Trained in turns and then in two threads at once, each is as if it were alone."""
    build_stage.LIBRARIES.clear()
    first, first_model = compiled()
    with monkeypatch.context() as patch:
        patch.setattr(build_stage, "build_side_by_side", None)  # not to be called
        second, second_model = compiled()
    x = torch.randn(7, 6)
    losses = [[float(first(x)), float(second(x))] for _ in range(3)]
    assert all(one == other for one, other in losses)
    assert losses[0] != losses[1]

    def train(step: Any) -> None:
        for _ in range(50):
            step(x)

    threads = [threading.Thread(target=train, args=(step,)) for step in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(first_model.parameters(), second_model.parameters(), strict=True):
        assert torch.equal(one, other)
