# SPDX-License-Identifier: Apache-2.0
"""Captured steps beside the same steps in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree

from amp_ir.capture.trace import capture_step
from amp_ir.ir.captured_step import CapturedStep
from captured_runner import CapturedRunner


@attrs.define
class Training:
    """Models, optimizers and the step that trains them."""

    model: Any
    optimizer: Any
    step: Callable[..., Any]

    def capture(self, batch: tuple[Any, ...]) -> CapturedStep:
        """Capture the step."""
        return capture_step(self.step, batch, model=self.model, optimizer=self.optimizer)

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models as a list."""
        return self.model if isinstance(self.model, list) else [self.model]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers as a list."""
        if self.optimizer is None:
            return []
        return self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]


def assert_trains_alike(
    build: Callable[[], Training],
    batch: Callable[[int], tuple[Any, ...]],
    *,
    steps: int = 3,
    between: Callable[[Training], None] = lambda training: None,
    seen: Callable[[CapturedStep], None] = lambda captured: None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> int:
    """Run some steps in eager PyTorch and captured; everything afterwards must be the same.

    `between` is called on either training after every step, `seen` on each capture. float32 results
    may differ in the last bits, where the captured graph adds in another order.

    Returns:
        how often the step had to be captured.
    """
    torch.manual_seed(0)
    eager = build()
    torch.manual_seed(0)
    captured = build()
    runner, captures = None, 0
    for index in range(steps):
        arguments = batch(index)
        expected = eager.step(*copy.deepcopy(arguments))
        if runner is None or runner.captured.hooks.recompile_reason():
            runner, captures = CapturedRunner(captured.capture(arguments)), captures + 1
            seen(runner.captured)
        assert_results_equal(runner(*arguments), expected, rtol=rtol, atol=atol)
        between(eager)
        between(captured)
    assert_state_equal(captured, eager, rtol=rtol, atol=atol)
    return captures


def assert_results_equal(actual: Any, expected: Any, *, rtol: float, atol: float) -> None:
    """Compare what two steps returned: same structure, same values."""
    found, structure = pytree.tree_flatten(actual)
    wanted, wanted_structure = pytree.tree_flatten(expected)
    assert structure == wanted_structure
    for value, reference in zip(found, wanted, strict=True):
        if isinstance(reference, torch.Tensor):
            torch.testing.assert_close(value, reference.detach(), rtol=rtol, atol=atol)
        else:
            assert type(value) is type(reference) and value == reference


def assert_state_equal(actual: Training, expected: Training, *, rtol: float, atol: float) -> None:
    """Compare parameters, buffers, gradients and optimizer states."""
    for model, reference in zip(actual.models, expected.models, strict=True):
        torch.testing.assert_close(
            dict(model.state_dict()), dict(reference.state_dict()), rtol=rtol, atol=atol
        )
        for (name, parameter), other in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert (parameter.grad is None) == (other.grad is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=atol)
    for optimizer, reference in zip(actual.optimizers, expected.optimizers, strict=True):
        state, wanted = optimizer.state_dict(), reference.state_dict()
        assert {p: list(s) for p, s in state["state"].items()} == {
            p: list(s) for p, s in wanted["state"].items()
        }
        torch.testing.assert_close(state["state"], wanted["state"], rtol=1e-4, atol=1e-6)


def normal(index: int, *shape: int) -> torch.Tensor:
    """Random numbers that depend on the index alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + index))


def integers(index: int, high: int, *shape: int) -> torch.Tensor:
    """Random integers below `high` that depend on the index alone."""
    generator = torch.Generator().manual_seed(200 + index)
    return torch.randint(0, high, shape, generator=generator)
