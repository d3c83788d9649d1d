# SPDX-License-Identifier: Apache-2.0
"""Random chains of views (entries, slices, reshapes, permutations), read by a kernel."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import amp_ir
from cuda_emulator import in_emulator

View = Callable[[torch.Tensor], torch.Tensor]


def _indexing(shape: tuple[int, ...], draw: random.Random) -> View:
    """`x[1, 0:2, ..., -1]`: for each axis an entry, a slice of one or more, or all of it."""
    index: list[Any] = []
    for n in shape:
        begin = draw.randrange(n)
        kinds = [begin, begin - n, slice(begin, begin + 1), slice(begin, None), slice(None)]
        index.append(draw.choice(kinds))
    return lambda x: x[tuple(index)]


def _reshape(shape: tuple[int, ...], draw: random.Random) -> View:
    extents: list[int] = []
    for n in shape:
        divisor = draw.choice([k for k in range(1, n + 1) if n % k == 0])
        extents += [divisor, n // divisor]
    while len(extents) > 1 and draw.random() < 0.6:
        k = draw.randrange(len(extents) - 1)
        extents[k : k + 2] = [extents[k] * extents[k + 1]]
    return lambda x: x.reshape(extents)


def _permute(shape: tuple[int, ...], draw: random.Random) -> View:
    axes = draw.sample(range(len(shape)), len(shape))
    return lambda x: x.permute(axes)


def _flip(shape: tuple[int, ...], draw: random.Random) -> View:
    axes = [d for d in range(len(shape)) if draw.random() < 0.5]
    return lambda x: x.flip(axes)


def _expand(shape: tuple[int, ...], draw: random.Random) -> View:
    extents = [draw.choice([1, 2]), *(3 if n == 1 else n for n in shape)]
    return lambda x: x.expand(extents)


def _chain(draw: random.Random) -> tuple[tuple[int, ...], View]:
    """Return a shape, and a function of one to four views."""
    first = shape = tuple(draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randint(1, 4)))
    views: list[View] = []
    for _ in range(draw.randint(1, 4)):
        if math.prod(shape) > 500:
            break
        view = draw.choice([_indexing, _indexing, _reshape, _permute, _flip, _expand])(shape, draw)
        views.append(view)
        shape = tuple(view(torch.zeros(shape)).shape)

    def apply(x: torch.Tensor) -> torch.Tensor:
        for view in views:
            x = view(x)
        return x

    return first, apply


def _check(seed: int, compile_step: Callable[[amp_ir.StepModule], Any]) -> None:
    """Compare bit for bit: values are small integers, which sums of gradients hold exactly."""
    draw = random.Random(seed)
    chains = [_chain(draw) for _ in range(40)]
    tensors = tuple(torch.arange(float(math.prod(shape))).view(shape) for shape, _ in chains)

    def step(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        results = []
        for x, (_, view) in zip(tensors, chains, strict=True):
            leaf = x.clone().requires_grad_()
            y = view(leaf) * 2 + 1
            results.append((y, torch.autograd.grad((y * y.detach()).sum(), leaf)[0]))
        return results

    mod, args = amp_ir.trace_step(step, tensors, model=torch.nn.Linear(1, 1))
    found, expected = compile_step(mod)(*args), step(*tensors)
    for k, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one, other), f"chain {k} of {chains[k][0]}: {one}, not {other}"


@pytest.mark.parametrize("seed", range(4))
def test_chains_of_views_and_their_gradients(seed: int) -> None:
    _check(seed, amp_ir.compile)


@in_emulator
def test_chains_of_views_for_a_gpu() -> None:
    from cuda_emulator import steps

    steps.register_libraries()
    _check(0, steps.compile_step)
