# SPDX-License-Identifier: Apache-2.0
"""In float16 no loss overflows by its scale alone: nothing that PyTorch has in float32 is cast."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import amp_ir

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _signs(t: torch.Tensor) -> torch.Tensor:
    return (t > 0).float() * 2 - 1


def _kl(y: torch.Tensor, t: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return F.kl_div(F.log_softmax(y, 1), t.softmax(1), reduction="batchmean")


def _focal(y: torch.Tensor, t: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(y, c, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


# y f[8, 5] comes low out of a layer; t f32[8, 5] and classes c i64[8] are of the batch.
SMOOTH: dict[str, Loss] = {
    "mse": lambda y, t, c: F.mse_loss(y, t),
    "mse_sum": lambda y, t, c: F.mse_loss(y, t, reduction="sum"),
    "bce_logits": lambda y, t, c: F.binary_cross_entropy_with_logits(y, (t > 0).float()),
    "bce_logits_sum": lambda y, t, c: F.binary_cross_entropy_with_logits(
        y, (t > 0).float(), reduction="sum"
    ),
    "nll": lambda y, t, c: F.nll_loss(F.log_softmax(y, 1), c),
    "cross_entropy": lambda y, t, c: F.cross_entropy(y, c),
    "label_smoothing": lambda y, t, c: F.cross_entropy(y, c, label_smoothing=0.1),
    "kl": _kl,
    "focal": _focal,
    "soft_margin": lambda y, t, c: F.soft_margin_loss(y, _signs(t)),
    "gaussian_nll": lambda y, t, c: F.gaussian_nll_loss(y, t, F.softplus(y) + 0.1),
    "cosine": lambda y, t, c: (1 - F.cosine_similarity(y, t)).mean(),
    "mean": lambda y, t, c: y.mean(),
    "softplus": lambda y, t, c: F.softplus(-y).mean(),
}
WITH_KINKS: dict[str, Loss] = {
    "l1": lambda y, t, c: F.l1_loss(y, t),
    "smooth_l1": lambda y, t, c: F.smooth_l1_loss(y, t),
    "huber": lambda y, t, c: F.huber_loss(y, t),
    "multi_margin": lambda y, t, c: F.multi_margin_loss(y, c),
    "hinge_embedding": lambda y, t, c: F.hinge_embedding_loss(y, _signs(t)),
    "margin_ranking": lambda y, t, c: F.margin_ranking_loss(y[:, 0], y[:, 1], _signs(t[:, 0])),
    "triplet": lambda y, t, c: F.triplet_margin_loss(y, t, y.roll(1, 0)),
    "cosine_embedding": lambda y, t, c: F.cosine_embedding_loss(y, t, _signs(t[:, 0])),
}
LOSSES = {**SMOOTH, **WITH_KINKS}
LEARNING_RATE = 2.0**-6


class _Side:
    """A model, an optimizer and a scaler for each loss, and one step that trains them all."""

    def __init__(self, *, is_eager: bool) -> None:
        torch.manual_seed(0)
        self.models = [
            torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
            for _ in LOSSES
        ]
        self.optimizers = [
            torch.optim.SGD(one.parameters(), lr=LEARNING_RATE) for one in self.models
        ]
        self.scalers = [torch.amp.GradScaler("cpu", growth_interval=3) for _ in LOSSES]
        self.is_eager = is_eager

    def step(self, x: torch.Tensor, t: torch.Tensor, c: torch.Tensor) -> None:
        parts = zip(LOSSES.values(), self.models, self.optimizers, self.scalers, strict=True)
        for loss, model, optimizer, scaler in parts:
            optimizer.zero_grad()
            if self.is_eager:
                with torch.autocast("cpu", dtype=torch.float16):
                    value = loss(model(x), t, c)
            else:
                value = loss(model(x), t, c)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()

    def weights(self) -> list[torch.Tensor]:
        return [
            torch.cat([p.detach().flatten() for p in one.parameters()]).clone()
            for one in self.models
        ]

    def become(self, other: _Side) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.models, other.models, strict=True):
                mine.load_state_dict(theirs.state_dict())
            for mine, theirs in zip(self.scalers, other.scalers, strict=True):
                mine._scale.fill_(theirs.get_scale())


def _true_gradient(
    model: torch.nn.Module, loss: Loss, x: torch.Tensor, t: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    wide = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
    wide.load_state_dict(model.state_dict())
    wide = wide.double()
    loss(wide(x.double()), t.double(), c).backward()
    return torch.cat([p.grad.flatten() for p in wide.parameters() if p.grad is not None])


def test_a_step_is_skipped_only_where_autocast_skips_it_too():
    eager, ours = _Side(is_eager=True), _Side(is_eager=False)
    compiled = amp_ir.jit(
        ours.step,
        model=ours.models,
        optimizer=ours.optimizers,
        scaler=ours.scalers,
        amp_dtype="float16",
    )
    generator = torch.Generator().manual_seed(3)
    largest = dict.fromkeys(LOSSES, 0.0)
    taken_by_us_alone = 0
    for number in range(60):
        x, t = torch.randn(8, 6, generator=generator), torch.randn(8, 5, generator=generator)
        c = torch.randint(0, 5, (8,), generator=generator)
        if number:
            ours.become(eager)
        before = eager.weights()
        models = [torch.nn.Sequential(*one) for one in eager.models]
        true = {
            name: _true_gradient(model, loss, x, t, c)
            for (name, loss), model in zip(SMOOTH.items(), models, strict=False)
        }
        compiled(x, t, c)
        eager.step(x, t, c)
        for k, name in enumerate(LOSSES):
            skipped_by_us = torch.equal(before[k], ours.weights()[k])
            skipped_by_autocast = torch.equal(before[k], eager.weights()[k])
            assert skipped_by_autocast or not skipped_by_us, (number, name)
            largest[name] = max(largest[name], eager.scalers[k].get_scale())
            if skipped_by_autocast and not skipped_by_us and name in true:
                taken_by_us_alone += 1
                found = (before[k] - ours.weights()[k]) / LEARNING_RATE
                error = (found.double() - true[name]).norm() / true[name].norm()
                # 16 roundings of 2^-11 on the way; the weights' own, of 2^-24 / learning rate.
                assert error < 2.0**-7, (number, name, error)
    # The seed of the backward pass, the scale, is beyond 65504 in most.
    assert sum(scale >= 2.0**17 for scale in largest.values()) > len(LOSSES) / 2
    assert taken_by_us_alone > 0
