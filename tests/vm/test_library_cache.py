# SPDX-License-Identifier: Apache-2.0
"""A step whose kernels were compiled before takes their code, and no other kernels' code."""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
    """Stands in for the compiler, which makes numbers; `asked` has the names of each call."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.made: set[int] = set()

    def __call__(self, kernels: tvm.IRModule, linked: Sequence[int]) -> list[tuple[list[str], int]]:
        assert self.made >= set(linked)
        self.asked.append(sorted(variable.name_hint for variable in kernels.functions))
        self.made.add(len(self.asked))
        return [(self.asked[-1], len(self.asked))]


def both(**functions: tirx.PrimFunc) -> tvm.IRModule:
    return tvm.IRModule(
        {k: v for name, f in functions.items() for k, v in module(f, name).functions.items()}
    )


def test_equal_kernels_are_built_once():
    cache, build = LibraryCache(), Builds()
    assert [cache.of(module(kernel()), "cpu", build) for _ in range(3)] == [[1], [1], [1]]
    cache.clear()
    assert cache.of(module(kernel()), "cpu", build) == [2]


def test_only_kernels_that_are_new_are_built():
    cache, build = LibraryCache(), Builds()
    first = both(one=kernel(1.0), two=kernel(2.0))
    second = both(two=kernel(2.0), three=kernel(3.0))
    assert cache.of(first, "cpu", build) == [1]
    assert cache.of(second, "cpu", build) == [1, 2]
    assert build.asked == [["one", "two"], ["three"]]
    assert cache.of(both(one=kernel(1.0), three=kernel(3.0)), "cpu", build) == [1, 2]


@pytest.mark.parametrize(
    ("other", "target"),
    [
        (module(kernel(2.0)), "cpu"),
        (module(kernel(extent=9)), "cpu"),
        (module(kernel(dtype="float64")), "cpu"),
        (module(kernel().with_attr("tirx.noalias", False)), "cpu"),
        (module(kernel(), name="sum"), "cpu"),
        (module(kernel()), "another cpu"),
    ],
    ids=["literal", "extent", "dtype", "aliases", "name", "target"],
)
def test_kernels_that_differ_are_built(other: tvm.IRModule, target: str):
    cache, build = LibraryCache(), Builds()
    assert cache.of(module(kernel()), "cpu", build) == [1]
    assert cache.of(other, target, build) == [2]


def test_zeros_of_either_sign_are_two_literals():
    cache, build = LibraryCache(), Builds()
    assert cache.of(module(kernel(0.0)), "cpu", build) == [1]
    assert cache.of(module(kernel(-0.0)), "cpu", build) == [2]


def test_what_was_asked_for_longest_ago_is_forgotten():
    cache, build = LibraryCache(most_libraries=2), Builds()
    one, two, three = (module(kernel(float(k))) for k in range(3))
    assert [cache.of(mod, "cpu", build) for mod in (one, two, one, three)] == [[1], [2], [1], [3]]
    assert [cache.of(mod, "cpu", build) for mod in (one, two)] == [[1], [4]]


def test_a_kernel_is_kept_in_one_library_where_two_threads_build_it():
    """Linked together, two libraries may not have the same kernel."""
    cache, build = LibraryCache(), Builds()
    shared = kernel(1.0)

    def meanwhile(kernels: tvm.IRModule, linked: Sequence[int]) -> list[tuple[list[str], int]]:
        assert cache.of(both(shared=shared, other=kernel(2.0)), "cpu", build) == [1]
        return [(["shared", "own"], -1)]

    assert cache.of(both(shared=shared, own=kernel(3.0)), "cpu", meanwhile) == [-1]
    every = both(shared=shared, other=kernel(2.0), own=kernel(3.0))
    assert cache.of(every, "cpu", build) == [1, 2]
    assert build.asked == [["other", "shared"], ["own"]]


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
