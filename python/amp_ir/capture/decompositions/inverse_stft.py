# SPDX-License-Identifier: Apache-2.0
"""`torch.istft` without its look at the window's values, which is a check of the step here.

As in ATen: frames of the inverse transform, times the window, are added where they overlap, and
the sum is divided by that of the squared windows.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F

# What ATen takes for 0.
_LEAST_ENVELOPE = 1e-11


def istft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,  # noqa: FBT001, FBT002 - torch's own signature
    normalized: bool = False,  # noqa: FBT001, FBT002
    onesided: bool | None = None,  # noqa: FBT001
    length: int | None = None,
    return_complex: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Return the signal f[batch, samples] of complex frames c[batch, frequencies, frames].

    NotImplemented where PyTorch returns complex numbers, or refuses the call.
    """
    hop = n_fft // 4 if hop_length is None else hop_length
    size = n_fft if win_length is None else win_length
    onesided = input.shape[-2] != n_fft if onesided is None else onesided
    frequencies = n_fft // 2 + 1
    is_valid = (
        input.is_complex()
        and input.ndim in (2, 3)
        and input.numel() > 0
        and input.shape[-2] == (frequencies if onesided else n_fft)
        and 0 < hop <= size <= n_fft
        and (window is None or (window.shape == (size,) and not window.is_complex()))
    )
    if return_complex or not is_valid:
        return NotImplemented
    if window is None:
        window = torch.ones(size, dtype=input.real.dtype, device=input.device)
    left = (n_fft - size) // 2
    window = F.pad(window, (left, n_fft - size - left))
    spectra = input.mT if input.ndim == 3 else input.mT.unsqueeze(0)
    norm = "ortho" if normalized else None
    frames = torch.fft.irfft(spectra[..., :frequencies], n=n_fft, norm=norm)
    signal = _overlapped(frames * window, hop)
    envelope = _overlapped(window.square().expand(1, *frames.shape[1:]), hop)
    count = signal.shape[-1]
    start = n_fft // 2 if center else 0
    end = count - start if length is None else start + length
    signal, envelope = signal[:, start:end], envelope[:, start:end]
    torch._assert_async(
        envelope.abs().min() >= _LEAST_ENVELOPE,
        "istft: the windows that overlap add up to 0 somewhere",
    )
    signal = signal / envelope
    if end > count:
        warnings.warn(
            "The length of signal is shorter than the length parameter. Result is being padded "
            "with zeros in the tail. Please check your center and hop_length settings",
            stacklevel=2,
        )
        signal = F.pad(signal, (0, end - count))
    return signal if input.ndim == 3 else signal.squeeze(0)


def _overlapped(frames: torch.Tensor, hop: int) -> torch.Tensor:
    """Add frames f[batch, frames, size] that begin `hop` samples apart."""
    _, count, size = frames.shape
    samples = (1, size + hop * (count - 1))
    return F.fold(frames.mT, samples, (1, size), stride=(1, hop)).flatten(1)
