# SPDX-License-Identifier: Apache-2.0
"""Functions of PyTorch with no kernel of ours, each of f32[16, 16]; and their training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Function = Callable[[torch.Tensor], torch.Tensor]


def matrices(h: torch.Tensor) -> torch.Tensor:
    """Symmetric positive definite matrices, f32[16, 3, 3]."""
    a = h[:, :9].reshape(-1, 3, 3)
    return a @ a.mT + torch.diag(torch.tensor([1.0, 2.0, 4.0]))


def vectors(h: torch.Tensor) -> torch.Tensor:
    return h[:, 9:12].unsqueeze(-1)


def images(h: torch.Tensor) -> torch.Tensor:
    return h.view(-1, 1, 4, 4)


LINALG: dict[str, Function] = {
    "cholesky": lambda h: torch.linalg.cholesky(matrices(h)),
    "cholesky_solve": lambda h: torch.cholesky_solve(
        vectors(h), torch.linalg.cholesky(matrices(h))
    ),
    "solve": lambda h: torch.linalg.solve(matrices(h), vectors(h)),
    "solve_triangular": lambda h: torch.linalg.solve_triangular(
        matrices(h).tril(), vectors(h), upper=False
    ),
    "inv": lambda h: torch.linalg.inv(matrices(h)),
    "eigh": lambda h: torch.linalg.eigh(matrices(h))[0],
    "eigvals": lambda h: torch.linalg.eigvals(matrices(h)).abs(),
    "svdvals": lambda h: torch.linalg.svdvals(matrices(h)),
    "svd": lambda h: torch.linalg.svd(matrices(h))[1],
    "qr": lambda h: torch.linalg.qr(matrices(h))[1],
    "det": lambda h: torch.linalg.det(0.3 * matrices(h)),
    "slogdet": lambda h: torch.linalg.slogdet(matrices(h))[1],
    "pinv": lambda h: torch.linalg.pinv(matrices(h)),
    "matrix_exp": lambda h: torch.linalg.matrix_exp(0.1 * matrices(h)),
    "lu": lambda h: torch.linalg.lu(matrices(h))[2],
    "lu_solve": lambda h: torch.linalg.lu_solve(*torch.linalg.lu_factor(matrices(h)), vectors(h)),
    "householder_product": lambda h: torch.linalg.householder_product(matrices(h), h[:, 9:12]),
    "nuclear norm": lambda h: torch.linalg.matrix_norm(matrices(h), "nuc"),
    "matrix_rank": lambda h: h * torch.linalg.matrix_rank(matrices(h.detach()))[:, None],
    "cross": lambda h: torch.linalg.cross(h[:, :3], h[:, 3:6]),
}
COMPLEX: dict[str, Function] = {
    "rfft": lambda h: torch.fft.rfft(h).abs(),
    "irfft": lambda h: torch.fft.irfft(torch.fft.rfft(h) * 2),
    "fft2": lambda h: torch.view_as_real(torch.fft.fft2(h)),
    "filter": lambda h: torch.fft.irfft(torch.fft.rfft(h) * torch.fft.rfft(h.flip(1)).conj()),
    "stft": lambda h: torch.stft(
        h, 8, hop_length=4, window=torch.hann_window(8), return_complex=True
    ).abs(),
    "polar": lambda h: (torch.complex(h, h + 1) * torch.polar(h.abs() + 1, h)).real,
    "angle": lambda h: torch.complex(h, h + 1).angle(),
    "imag": lambda h: torch.fft.rfft(h).imag,
    "reshaped": lambda h: torch.fft.rfft(h).transpose(0, 1).reshape(-1).abs(),
}
SPECIAL: dict[str, Function] = {
    "lgamma": lambda h: (h.abs() + 0.5).lgamma(),
    "digamma": lambda h: (h.abs() + 0.5).digamma(),
    "polygamma": lambda h: torch.polygamma(1, h.abs() + 0.5),
    "erfinv": lambda h: (h * 0.1).erfinv(),
    "i0": lambda h: torch.special.i0(h),
    "erfcx": lambda h: torch.special.erfcx(h.sigmoid()),
    "ndtri": lambda h: torch.special.ndtri(h.sigmoid()),
    "igamma": lambda h: h * torch.igamma(h.detach().abs() + 1, h.detach().abs() + 0.1),
    "zeta": lambda h: h * torch.special.zeta(h.detach().abs() + 2, torch.ones_like(h) * 2),
    "bessel_j0": lambda h: h * torch.special.bessel_j0(h.detach()),
    "logcumsumexp": lambda h: h.logcumsumexp(1),
    "copysign": lambda h: h.copysign(torch.ones_like(h)),
    "nextafter": lambda h: h * torch.nextafter(h.detach(), h.detach() + 1),
    "heaviside": lambda h: h * torch.heaviside(h.detach(), torch.tensor(0.5)),
    "frexp": lambda h: torch.frexp(h)[0],
    "cummax": lambda h: h.cummax(1)[0],
    "nanmedian": lambda h: h.nanmedian(1)[0],
    "median": lambda h: h.median(1)[0],
    "mode": lambda h: h.mode(1)[0],
    "histc": lambda h: h * torch.histc(h.detach(), 4).sum(),
    "searchsorted": lambda h: h * torch.searchsorted(torch.arange(4.0), h.detach()),
    "segment_reduce": lambda h: torch.segment_reduce(
        h, "sum", lengths=torch.tensor([len(h) - 2, 2])
    ),
}
LAYERS: dict[str, Function] = {
    "multilabel_margin_loss": lambda h: F.multilabel_margin_loss(
        h, torch.tensor([[1, 3, -1] + [0] * 13] * len(h))
    ),
    "multi_margin_loss": lambda h: F.multi_margin_loss(h, torch.arange(len(h))),
    "ctc_loss": lambda h: F.ctc_loss(
        h.log_softmax(-1)[:, None],
        torch.tensor([[1, 2]]),
        torch.tensor([len(h)]),
        torch.tensor([2]),
    ),
    "ctc_loss of numbers": lambda h: F.ctc_loss(
        h.log_softmax(-1)[:, None], torch.tensor([[1, 2]]), (len(h),), (2,)
    ),
    "fractional_max_pool2d": lambda h: F.fractional_max_pool2d(
        images(h), 2, output_size=2, _random_samples=torch.full((len(h), 1, 2), 0.3)
    ),
    "adaptive_max_pool3d": lambda h: F.adaptive_max_pool3d(h.view(-1, 1, 4, 2, 2), 1),
    "max_unpool2d": lambda h: F.max_unpool2d(*F.max_pool2d(images(h), 2, return_indices=True), 2),
    "bicubic grid_sample": lambda h: F.grid_sample(
        images(h), torch.zeros(len(h), 2, 2, 2) + 0.1, mode="bicubic", align_corners=False
    ),
    "grouped_mm": lambda h: torch._grouped_mm(
        h.bfloat16(), torch.ones(2, 16, 16).bfloat16(), torch.tensor([8, 16]).int()
    ).float(),
    "renorm": lambda h: h.renorm(2, 0, 1.0),
    "cdist": lambda h: torch.cdist(h, h + 1),
}
FUNCTIONS = {**LINALG, **COMPLEX, **SPECIAL, **LAYERS}


class Around(nn.Module):
    """Functions behind a linear layer each: every one's mean square."""

    def __init__(self, functions: dict[str, Function]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleDict({name: nn.Linear(8, 16) for name in functions})
        self.functions = functions

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: function(self.linears[name](x)).square().mean()
            for name, function in self.functions.items()
        }


def training(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[..., Any]]:
    """Return an optimizer, and a step of it that returns the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> Any:
        losses = model(x)
        each = list(losses.values()) if isinstance(losses, dict) else [losses]
        sum(each[1:], each[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [one.detach() for one in each]

    return optimizer, step
