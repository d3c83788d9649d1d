# SPDX-License-Identifier: Apache-2.0
"""Compiled steps beside the same steps in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

import amp_ir
from amp_ir.runtime.step import CompiledStep
from step_comparison import Training


def compile_training(
    training: Training, batch: tuple[Any, ...], amp_dtype: str | None = None
) -> CompiledStep:
    """Capture, import and compile the step of a training."""
    mod, args = amp_ir.trace_step(
        training.step, batch, model=training.model, optimizer=training.optimizer
    )
    if amp_dtype is not None:
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    return amp_ir.compile(mod)


def assert_compiled_alike(
    build: Callable[[], Training],
    batch: Callable[[int], tuple[Any, ...]],
    *,
    steps: int = 3,
    between: Callable[[Training], None] = lambda training: None,
    rtol: float = 1e-5,
    gradient_rtol: float = 1e-4,
    state_rtol: float = 1e-4,
) -> int:
    """Train eagerly and compiled on equal batches; results, gradients and state must agree.

    `between` is called on either training after every step. Results agree within `rtol` of their
    largest entry, gradients within `gradient_rtol` of theirs, and so does the state at the end.

    Returns:
        how often the step had to be compiled.
    """
    torch.manual_seed(0)
    eager = build()
    torch.manual_seed(0)
    compiled = build()
    step, compilations = None, 0
    for index in range(steps):
        arguments = batch(index)
        expected = eager.step(*copy.deepcopy(arguments))
        if step is None or step.module.hooks.recompile_reason():
            step, compilations = compile_training(compiled, arguments), compilations + 1
        assert_results_near(step(*arguments), expected, rtol)
        assert_gradients_near(compiled, eager, gradient_rtol)
        between(eager)
        between(compiled)
    assert_state_near(compiled, eager, state_rtol)
    return compilations


def assert_results_near(actual: Any, expected: Any, rtol: float) -> None:
    """Same structure, same plain values, tensors near each other."""
    found, structure = pytree.tree_flatten(actual)
    wanted, wanted_structure = pytree.tree_flatten_with_path(expected)
    assert structure == wanted_structure
    for value, (path, reference) in zip(found, wanted, strict=True):
        if isinstance(reference, torch.Tensor):
            assert_near(f"result{pytree.keystr(path)}", value, reference, rtol)
        else:
            assert type(value) is type(reference) and value == reference


def assert_gradients_near(actual: Training, expected: Training, rtol: float) -> None:
    """Gradients that are left in `p.grad`.

    A gradient that is small beside the model's largest (a bias before BatchNorm, whose gradient is
    zero but for rounding) is measured against 1 % of that.
    """
    wanted = [one.grad for model in expected.models for one in model.parameters()]
    largest = max((_largest(one) for one in wanted if one is not None), default=0.0)
    for model, reference in zip(actual.models, expected.models, strict=True):
        others = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            other = others[name].grad
            assert (parameter.grad is None) == (other is None), name
            if other is not None:
                assert_near(f"{name}.grad", parameter.grad, other, rtol, floor=0.01 * largest)


def assert_state_near(actual: Training, expected: Training, rtol: float) -> None:
    """Parameters, buffers and the optimizers' state; for small ones see `assert_gradients_near`."""
    for model, reference in zip(actual.models, expected.models, strict=True):
        largest = max((_largest(one) for one in reference.parameters()), default=0)
        for name, value in reference.state_dict().items():
            assert_near(name, model.state_dict()[name], value, rtol, floor=0.01 * largest)
    for optimizer, reference in zip(actual.optimizers, expected.optimizers, strict=True):
        found, wanted = optimizer.state_dict()["state"], reference.state_dict()["state"]
        assert {p: list(s) for p, s in found.items()} == {p: list(s) for p, s in wanted.items()}
        for number, state in wanted.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    floor = 0.01 * max(_largest(one[key]) for one in wanted.values() if key in one)
                    assert_near(f"state {number}.{key}", found[number][key], value, rtol, floor)


def _largest(tensor: torch.Tensor) -> float:
    """The largest size of an entry; 0 of none."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def assert_near(
    name: str, actual: torch.Tensor, expected: torch.Tensor, rtol: float, floor: float = 0.0
) -> None:
    """Equal shape and dtype, and within `rtol` of the largest entry (or of `floor`)."""
    expected = expected.detach()
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
    error = relative_error(actual, expected, floor=floor)
    assert error <= rtol, f"{name}: off by {error:.2e} of its largest entry (at most {rtol:.0e})"


def relative_error(actual: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """The largest difference as a share of the largest entry; equal infinities and NaNs are 0."""
    if not expected.numel():
        return 0.0
    found, wanted = actual.detach().double(), expected.detach().double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    if bool(same.all()):
        return 0.0
    scale = max(float(wanted[wanted.isfinite()].abs().max()), floor, 1e-30)
    difference = float((found - wanted)[~same].abs().max())
    return difference / scale if difference == difference else float("inf")
