# SPDX-License-Identifier: Apache-2.0
"""`torch.istft` in a step, beside eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CheckFailedError

OPTIONS: dict[str, dict[str, Any]] = {
    "a window": {"hop_length": 4, "window": torch.hann_window(16)},
    "no window": {"hop_length": 8},
    "a short window": {"hop_length": 3, "win_length": 10, "window": torch.hamming_window(10)},
    "normalized": {"normalized": True, "window": torch.hann_window(16)},
    "not centered": {"hop_length": 5, "center": False},
    "of a length": {"window": torch.hann_window(16), "length": 45},
    "two-sided": {"onesided": False, "window": torch.hann_window(16)},
}


@pytest.mark.filterwarnings("ignore:A window was not provided:UserWarning")
@pytest.mark.filterwarnings("ignore:The length of signal is shorter:UserWarning")
@pytest.mark.parametrize("is_batch", [True, False], ids=["batch", "one"])
@pytest.mark.parametrize("name", OPTIONS)
def test_signals_and_gradients_are_those_of_eager(name: str, is_batch: bool) -> None:
    options = dict(OPTIONS[name])
    window = options.pop("window", None)
    rows = 16 if name == "two-sided" else 9
    torch.manual_seed(0)
    values = torch.randn(*([3] if is_batch else []), rows, 10, 2)

    def trained(*, is_ours: bool) -> list[torch.Tensor]:
        model = nn.Module()
        model.mask = nn.Parameter(torch.linspace(0.5, 1.5, 10))
        if window is not None:
            model.window = nn.Parameter(window.clone())

        def step(x: torch.Tensor) -> torch.Tensor:
            spectra = torch.view_as_complex(x) * model.mask
            signal = torch.istft(spectra, 16, window=getattr(model, "window", None), **options)
            signal.square().sum().backward()
            return signal.detach()

        train = amp_ir.jit(step, model=model) if is_ours else step
        return [train(values), *(one.grad for one in model.parameters())]

    # Float32 sums of some hundred products in another order.
    torch.testing.assert_close(trained(is_ours=True), trained(is_ours=False), rtol=1e-4, atol=1e-3)


def test_windows_that_leave_out_a_sample_fail_in_the_call() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("window", torch.ones(16))

    def step(x: torch.Tensor) -> torch.Tensor:
        signal = torch.istft(torch.view_as_complex(x), 16, hop_length=16, window=model.window)
        return signal.mean() * model.weight.detach()

    train = amp_ir.jit(step, model=model)
    train(torch.ones(9, 3, 2))
    model.window[3] = 0.0
    with pytest.raises(CheckFailedError, match="istft: the windows that overlap add up to 0"):
        train(torch.ones(9, 3, 2))
