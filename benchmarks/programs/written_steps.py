# SPDX-License-Identifier: Apache-2.0
"""Training steps as people write them by hand, one function a program."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.programs.program import Made, Precision, Program, integers, normal, uniform

PROGRAMS: list[Program] = []


def program(name: str, kind: str, reason: str = "") -> Callable[[Any], Any]:
    """Add a function to the list under a name."""

    def add(make: Callable[[Precision], Made]) -> Callable[[Precision], Made]:
        PROGRAMS.append(Program(name, kind, make, reason))
        return make

    return add


def mlp(*sizes: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Return linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for one, other in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(one, other), act()]
    return nn.Sequential(*layers[:-1])


def sgd(*models: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    """Return SGD with momentum for the parameters of all models."""
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=lr, momentum=0.9)


def pairs(features: int, classes: int, rows: int = 8) -> Callable[[int], tuple[Any, ...]]:
    """Return batches of vectors and classes."""
    return lambda k: (normal(k, rows, features), integers(k, classes, rows))


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[..., torch.Tensor],
    batch: Callable[[int], tuple[Any, ...]],
    precision: Precision,
) -> Made:
    """Return the usual step around a loss."""

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        with precision():
            loss = loss_of(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Made(model, optimizer, step, batch)


# Adversaries and generative models


@program("GAN", "generative")
def gan(precision: Precision) -> Made:
    """Train a generator and a discriminator with two optimizers."""
    generator, critic = mlp(8, 32, 12), mlp(12, 32, 1, act=nn.LeakyReLU)
    makes, judges = sgd(generator), sgd(critic)
    loss_of = F.binary_cross_entropy_with_logits

    def step(real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        with precision():
            right = loss_of(critic(real), torch.ones_like(real[:, :1]))
            fake = critic(generator(noise).detach())
            loss = right + loss_of(fake, torch.zeros_like(real[:, :1]))
        loss.backward()
        judges.step()
        judges.zero_grad()
        with precision():
            fooled = loss_of(critic(generator(noise)), torch.ones_like(real[:, :1]))
        fooled.backward()
        makes.step()
        makes.zero_grad()
        critic.zero_grad()
        return torch.stack([loss.detach(), fooled.detach()])

    return Made(
        [generator, critic],
        [makes, judges],
        step,
        lambda k: (normal(k, 8, 12), normal(k, 8, 8, seed=1)),
    )


@program("WGAN with gradient penalty", "generative")
def wgan(precision: Precision) -> Made:
    """Penalise the gradient of a critic between real and generated data."""
    generator, critic = mlp(8, 32, 12), mlp(12, 32, 1)
    makes, judges = sgd(generator), sgd(critic)

    def step(real: torch.Tensor, noise: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        with precision():
            fake = generator(noise)
            between = (mix * real + (1 - mix) * fake.detach()).requires_grad_(True)
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
            loss = critic(fake.detach()).mean() - critic(real).mean()
        loss = loss + 10 * penalty
        loss.backward()
        judges.step()
        judges.zero_grad()
        with precision():
            made = -critic(generator(noise)).mean()
        made.backward()
        makes.step()
        makes.zero_grad()
        critic.zero_grad()
        return torch.stack([loss.detach(), made.detach()])

    return Made(
        [generator, critic],
        [makes, judges],
        step,
        lambda k: (normal(k, 8, 12), normal(k, 8, 8, seed=1), uniform(k, 8, 1)),
    )


@program("DCGAN", "generative")
def dcgan(precision: Precision) -> Made:
    """Generate images by transposed convolutions with BatchNorm."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 4, 2, 1),
        nn.Tanh(),
    )
    critic = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 16, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(256, 1),
    )
    makes, judges = sgd(generator, lr=0.01), sgd(critic, lr=0.01)

    def step(real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        with precision():
            fake = generator(noise)
            loss = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake.detach())).mean()
        loss.backward()
        judges.step()
        judges.zero_grad()
        with precision():
            made = -critic(fake).mean()
        made.backward()
        makes.step()
        makes.zero_grad()
        judges.zero_grad()
        return torch.stack([loss.detach(), made.detach()])

    return Made(
        [generator, critic],
        [makes, judges],
        step,
        lambda k: (normal(k, 4, 3, 16, 16), normal(k, 4, 8, 1, 1, seed=1)),
    )


@program("VAE", "generative")
def vae(precision: Precision) -> Made:
    """Encode, sample by the reparametrisation, decode."""
    encoder, decoder = mlp(16, 32, 8), mlp(4, 32, 16)

    def loss_of(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, log_variance = encoder(x).chunk(2, 1)
        again = decoder(mean + noise * (0.5 * log_variance).exp())
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.binary_cross_entropy_with_logits(again, x.sigmoid()) + 0.1 * divergence

    both = nn.ModuleList([encoder, decoder])
    return plain(
        both, sgd(both), loss_of, lambda k: (normal(k, 8, 16), normal(k, 8, 4, seed=1)), precision
    )


@program("VQ-VAE", "generative")
def vq_vae(precision: Precision) -> Made:
    """Quantise to a codebook with a straight-through gradient."""
    net = nn.ModuleDict({"in": mlp(16, 32, 8), "codes": nn.Embedding(12, 8), "out": mlp(8, 32, 16)})

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        z = net["in"](x)
        nearest = torch.cdist(
            z.float() if z.dtype is torch.bfloat16 else z, net["codes"].weight
        ).argmin(1)
        code = net["codes"](nearest)
        again = net["out"](z + (code - z).detach())
        return (
            F.mse_loss(again, x)
            + F.mse_loss(code, z.detach())
            + 0.25 * F.mse_loss(z, code.detach())
        )

    return plain(net, sgd(net), loss_of, lambda k: (normal(k, 8, 16),), precision)


class UNet(nn.Module):
    """Two resolutions with time embedding, GroupNorm and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.time = mlp(16, 32, 16, act=nn.SiLU)
        self.begin = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 16, 3, 2, 1)
        self.norm = nn.GroupNorm(4, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(16, 16, 4, 2, 1)
        self.end = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Predict the noise in `x` at the times `t`."""
        angles = t[:, None] * torch.exp(-torch.arange(8, dtype=t.dtype) / 2)
        shift = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        first = self.begin(x)
        low = F.silu(self.norm(self.down(first)) + shift)
        flat = low.flatten(2).transpose(1, 2)
        flat = flat + self.attention(flat, flat, flat, need_weights=False)[0]
        low = flat.transpose(1, 2).reshape(low.shape)
        return self.end(torch.cat([first, self.up(low)], 1))


@program("diffusion U-Net", "generative")
def diffusion(precision: Precision) -> Made:
    """Predict noise (DDPM)."""
    net = UNet()
    keep = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100, dtype=torch.float64), 0)

    def loss_of(x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        kept = keep.to(x.dtype)[t][:, None, None, None]
        return F.mse_loss(net(kept.sqrt() * x + (1 - kept).sqrt() * noise, t.to(x.dtype)), noise)

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (normal(k, 2, 3, 8, 8), normal(k, 2, 3, 8, 8, seed=1), integers(k, 100, 2)),
        precision,
    )


@program("flow matching", "generative")
def flow_matching(precision: Precision) -> Made:
    """Regress the velocity between noise and data."""
    net = mlp(9, 32, 32, 8, act=nn.SiLU)

    def loss_of(x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(net(torch.cat([(1 - t) * noise + t * x, t], 1)), x - noise)

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (normal(k, 8, 8), normal(k, 8, 8, seed=1), uniform(k, 8, 1)),
        precision,
    )


@program("score matching (Hutchinson)", "generative")
def score_matching(precision: Precision) -> Made:
    """Penalise the trace of the Jacobian of a score by a random projection."""
    net = mlp(6, 32, 6)

    def loss_of(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(True)
        score = net(x)
        (projected,) = torch.autograd.grad((score * v).sum(), x, create_graph=True)
        return (0.5 * score.square().sum(1) + (projected * v).sum(1)).mean()

    return plain(
        net, sgd(net), loss_of, lambda k: (normal(k, 8, 6), normal(k, 8, 6, seed=1)), precision
    )


@program("RealNVP", "generative")
def real_nvp(precision: Precision) -> Made:
    """Maximise the likelihood of affine couplings."""
    nets = nn.ModuleList([mlp(3, 32, 6), mlp(3, 32, 6)])

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        total: Any = 0.0
        for net in nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            x = torch.cat([b * scale.exp() + shift, a], 1)
            total = total + scale.sum(1)
        normal_ = torch.distributions.Normal(torch.zeros_like(x), torch.ones_like(x))
        return -(normal_.log_prob(x).sum(1) + total).mean()

    return plain(nets, sgd(nets, lr=0.01), loss_of, lambda k: (normal(k, 8, 6),), precision)


@program("mixture density network", "generative")
def mixture(precision: Precision) -> Made:
    """Maximise the likelihood of a mixture of normals."""
    net = mlp(4, 32, 9)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight, mean, log_width = net(x).chunk(3, 1)
        log_p = -0.5 * ((y - mean) / log_width.exp()).square() - log_width
        return -torch.logsumexp(F.log_softmax(weight, 1) + log_p, 1).mean()

    return plain(
        net,
        sgd(net, lr=0.01),
        loss_of,
        lambda k: (normal(k, 8, 4), normal(k, 8, 1, seed=1)),
        precision,
    )


@program("energy-based model, Langevin", "generative")
def energy(precision: Precision) -> Made:
    """Draw negatives by gradient steps on the energy inside of the step."""
    net = mlp(6, 32, 1, act=nn.SiLU)

    def loss_of(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            start = start.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(net(start).sum(), start)
            start = start - 0.1 * slope
        return net(x).mean() - net(start.detach()).mean() + 0.1 * net(x).square().mean()

    return plain(
        net, sgd(net), loss_of, lambda k: (normal(k, 8, 6), normal(k, 8, 6, seed=1)), precision
    )


# Representations


@program("SimCLR", "representations")
def simclr(precision: Precision) -> Made:
    """Contrast two views of a batch (NT-Xent)."""
    net = mlp(12, 32, 16)

    def loss_of(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        z = F.normalize(net(torch.cat([one, other])), dim=1)
        count = one.shape[0]
        alike = (z @ z.t()) / 0.5
        alike = alike.masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e9)
        return F.cross_entropy(alike, torch.arange(2 * count).roll(count))

    return plain(
        net, sgd(net), loss_of, lambda k: (normal(k, 8, 12), normal(k, 8, 12, seed=1)), precision
    )


@program("BYOL", "representations")
def byol(precision: Precision) -> Made:
    """Predict a target network, whose weights follow by a moving average."""
    online, predictor = mlp(12, 32, 16), mlp(16, 16, 16)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = sgd(online, predictor)

    def step(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        with precision():
            p = F.normalize(predictor(online(one)), dim=1)
            with torch.no_grad():
                z = F.normalize(target(other), dim=1)
            loss = 2 - 2 * (p * z).sum(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
        return loss.detach()

    return Made(
        [online, predictor, target],
        optimizer,
        step,
        lambda k: (normal(k, 8, 12), normal(k, 8, 12, seed=1)),
    )


@program("Barlow twins", "representations")
def barlow(precision: Precision) -> Made:
    """Decorrelate the features of two views."""
    net = nn.Sequential(mlp(12, 32, 16), nn.BatchNorm1d(16, affine=False))

    def loss_of(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        c = net(one).t() @ net(other) / one.shape[0]
        on = (torch.diagonal(c) - 1).square().sum()
        return on + 0.005 * (c - torch.diag(torch.diagonal(c))).square().sum()

    return plain(
        net,
        sgd(net, lr=0.01),
        loss_of,
        lambda k: (normal(k, 8, 12), normal(k, 8, 12, seed=1)),
        precision,
    )


@program("MoCo queue", "representations")
def moco(precision: Precision) -> Made:
    """Contrast with a queue of keys, a buffer of the model."""
    net = mlp(12, 32, 8)
    net.register_buffer("queue", F.normalize(torch.randn(16, 8), dim=1))
    optimizer = sgd(net)

    def step(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        with precision():
            q, keys = F.normalize(net(one), dim=1), F.normalize(net(other), dim=1).detach()
            logits = torch.cat([(q * keys).sum(1, keepdim=True), q @ net.queue.t()], 1) / 0.2
            loss = F.cross_entropy(logits, torch.zeros(one.shape[0], dtype=torch.int64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            net.queue.copy_(torch.cat([keys.to(net.queue.dtype), net.queue[: -keys.shape[0]]]))
        return loss.detach()

    return Made(net, optimizer, step, lambda k: (normal(k, 8, 12), normal(k, 8, 12, seed=1)))


@program("triplet loss", "representations")
def triplet(precision: Precision) -> Made:
    """Metric learning with PyTorch's triplet loss."""
    net = mlp(12, 32, 8)
    loss = nn.TripletMarginLoss()
    return plain(
        net,
        sgd(net),
        lambda a, b, c: loss(net(a), net(b), net(c)),
        lambda k: tuple(normal(k, 8, 12, seed=s) for s in range(3)),
        precision,
    )


@program("ArcFace", "representations")
def arcface(precision: Precision) -> Made:
    """Metric learning with an angular margin."""
    net = mlp(12, 32, 8)
    net.register_parameter("classes", nn.Parameter(torch.randn(5, 8)))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        cosine = F.linear(F.normalize(net(x), dim=1), F.normalize(net.classes, dim=1))
        angle = torch.acos(cosine.clamp(-0.999, 0.999))
        target = F.one_hot(y, 5).to(cosine.dtype)
        return F.cross_entropy(16 * torch.where(target.bool(), torch.cos(angle + 0.3), cosine), y)

    return plain(net, sgd(net, lr=0.01), loss_of, pairs(12, 5), precision)


@program("distillation", "representations")
def distillation(precision: Precision) -> Made:
    """Follow the logits of a frozen teacher."""
    student, teacher = mlp(12, 16, 5), mlp(12, 32, 5).requires_grad_(False)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2, 1)
        logits = student(x)
        follow = F.kl_div(F.log_softmax(logits / 2, 1), soft, reduction="batchmean") * 4
        return 0.5 * F.cross_entropy(logits, y) + 0.5 * follow

    made = plain(student, sgd(student), loss_of, pairs(12, 5), precision)
    return Made([student, teacher], made.optimizer, made.step, made.batch)


@program("supervised contrastive", "representations")
def supervised_contrastive(precision: Precision) -> Made:
    """Contrast with all rows of the same class."""
    net = mlp(12, 32, 8)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.normalize(net(x), dim=1)
        own = torch.eye(x.shape[0], dtype=torch.bool)
        logits = (z @ z.t() / 0.3).masked_fill(own, float("-inf"))
        same = (y[:, None] == y[None]) & ~own
        log_p = logits - torch.logsumexp(logits, 1, keepdim=True)
        log_p = log_p.masked_fill(~same, 0.0)
        return -(log_p.sum(1) / same.sum(1).clamp(min=1)).mean()

    return plain(net, sgd(net), loss_of, pairs(12, 3), precision)


# Reinforcement learning


@program("REINFORCE", "reinforcement learning")
def reinforce(precision: Precision) -> Made:
    """Weigh log-probabilities of actions by returns."""
    net = mlp(6, 32, 4)

    def loss_of(x: torch.Tensor, action: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        policy = torch.distributions.Categorical(logits=net(x))
        return -(policy.log_prob(action) * value).mean() - 0.01 * policy.entropy().mean()

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (normal(k, 8, 6), integers(k, 4, 8), normal(k, 8, seed=1)),
        precision,
    )


@program("PPO", "reinforcement learning")
def ppo(precision: Precision) -> Made:
    """Clip the ratio of policies, beside a value loss and clipped gradients."""
    actor, critic = mlp(6, 32, 4), mlp(6, 32, 1)
    optimizer = sgd(actor, critic)

    def step(
        x: torch.Tensor, action: torch.Tensor, old: torch.Tensor, gain: torch.Tensor
    ) -> torch.Tensor:
        with precision():
            log_p = F.log_softmax(actor(x), 1).gather(1, action[:, None])[:, 0]
            ratio = (log_p - old).exp()
            clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            loss = -clipped.mean() + 0.5 * F.mse_loss(critic(x)[:, 0], gain)
        loss.backward()
        nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Made(
        [actor, critic],
        optimizer,
        step,
        lambda k: (normal(k, 8, 6), integers(k, 4, 8), -uniform(k, 8) - 1, normal(k, 8, seed=1)),
    )


@program("DQN with target network", "reinforcement learning")
def dqn(precision: Precision) -> Made:
    """Double Q-learning with a soft target update."""
    net, target = mlp(6, 32, 4), mlp(6, 32, 4).requires_grad_(False)
    optimizer = sgd(net)

    def step(
        x: torch.Tensor, a: torch.Tensor, r: torch.Tensor, after: torch.Tensor
    ) -> torch.Tensor:
        with precision():
            with torch.no_grad():
                best = net(after).argmax(1, keepdim=True)
                goal = r + 0.99 * target(after).gather(1, best)[:, 0]
            loss = F.smooth_l1_loss(net(x).gather(1, a[:, None])[:, 0], goal)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        return loss.detach()

    return Made(
        [net, target],
        optimizer,
        step,
        lambda k: (
            normal(k, 8, 6),
            integers(k, 4, 8),
            normal(k, 8, seed=1),
            normal(k, 8, 6, seed=2),
        ),
    )


@program("SAC", "reinforcement learning")
def sac(precision: Precision) -> Made:
    """Train an actor, two critics and a temperature with three optimizers."""
    actor, one, two = mlp(6, 32, 4), mlp(8, 32, 1), mlp(8, 32, 1)
    heat = nn.ParameterDict({"log": nn.Parameter(torch.zeros(()))})
    acts, values, heats = sgd(actor, lr=0.01), sgd(one, two, lr=0.01), sgd(heat, lr=0.01)

    def draw(x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_width = actor(x).chunk(2, 1)
        log_width = log_width.clamp(-4, 1)
        raw = mean + log_width.exp() * noise
        log_p = -0.5 * noise.square() - log_width - 2 * (math.log(2) - raw - F.softplus(-2 * raw))
        return raw.tanh(), log_p.sum(1)

    def step(
        x: torch.Tensor, a: torch.Tensor, goal: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        with precision():
            joint = torch.cat([x, a], 1)
            loss = F.mse_loss(one(joint)[:, 0], goal) + F.mse_loss(two(joint)[:, 0], goal)
        loss.backward()
        values.step()
        values.zero_grad()
        with precision():
            action, log_p = draw(x, noise)
            joint = torch.cat([x, action], 1)
            value = torch.min(one(joint), two(joint))[:, 0]
            wanted = (heat["log"].exp().detach() * log_p - value).mean()
        wanted.backward()
        acts.step()
        acts.zero_grad()
        values.zero_grad()
        warm = -(heat["log"] * (log_p.detach() - 2)).mean()
        warm.backward()
        heats.step()
        heats.zero_grad()
        return torch.stack([loss.detach(), wanted.detach(), warm.detach()])

    return Made(
        [actor, one, two, heat],
        [acts, values, heats],
        step,
        lambda k: (
            normal(k, 8, 6),
            normal(k, 8, 2, seed=1),
            normal(k, 8, seed=2),
            normal(k, 8, 2, seed=3),
        ),
    )


# Derivatives inside of the step


@program("PINN (Burgers)", "derivatives")
def pinn(precision: Precision) -> Made:
    """Penalise the residual of a differential equation with second derivatives."""
    net = mlp(2, 24, 24, 1)

    def loss_of(at: torch.Tensor) -> torch.Tensor:
        at = at.detach().requires_grad_(True)
        u = net(at)
        (du,) = torch.autograd.grad(u.sum(), at, create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 0].sum(), at, create_graph=True)
        return (du[:, 1] + u[:, 0] * du[:, 0] - 0.01 * ddu[:, 0]).square().mean()

    return plain(net, sgd(net), loss_of, lambda k: (normal(k, 16, 2),), precision)


@program("MAML", "derivatives")
def maml(precision: Precision) -> Made:
    """Differentiate through an inner gradient step."""
    net = mlp(4, 16, 1)

    def loss_of(
        x: torch.Tensor, y: torch.Tensor, more: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        weights = dict(net.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(net, weights, (x,)), y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(torch.func.functional_call(net, fast, (more,)), wanted)

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (
            normal(k, 8, 4),
            normal(k, 8, 1, seed=1),
            normal(k, 8, 4, seed=2),
            normal(k, 8, 1, seed=3),
        ),
        precision,
    )


@program("Reptile", "derivatives")
def reptile(precision: Precision) -> Made:
    """Move the weights towards those after some inner steps."""
    net = mlp(4, 16, 1)
    optimizer = sgd(net)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = {n: p.detach().clone().requires_grad_(True) for n, p in net.named_parameters()}
        for _ in range(3):
            with precision():
                loss = F.mse_loss(torch.func.functional_call(net, weights, (x,)), y)
            slopes = torch.autograd.grad(loss, list(weights.values()))
            weights = {
                n: (w - 0.1 * g).detach().requires_grad_(True)
                for (n, w), g in zip(weights.items(), slopes, strict=True)
            }
        for name, parameter in net.named_parameters():
            parameter.grad = (parameter - weights[name]).detach()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Made(net, optimizer, step, lambda k: (normal(k, 8, 4), normal(k, 8, 1, seed=1)))


@program("prototypical networks", "derivatives")
def prototypes(precision: Precision) -> Made:
    """Classify by the distance to means of a support set."""
    net = mlp(8, 32, 8)

    def loss_of(support: torch.Tensor, query: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        centres = net(support).reshape(3, 4, 8).mean(1)
        distance = (net(query)[:, None] - centres[None]).square().sum(2)
        return F.cross_entropy(-distance, y)

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (normal(k, 12, 8), normal(k, 6, 8, seed=1), integers(k, 3, 6)),
        precision,
    )


@program("torch.func.grad of the loss", "derivatives")
def func_grad(precision: Precision) -> Made:
    """Take gradients with torch.func and put them into .grad."""
    net = mlp(8, 16, 3)
    optimizer = sgd(net)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def loss_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            with precision():
                return F.cross_entropy(torch.func.functional_call(net, weights, (x,)), y)

        weights = {name: p.detach() for name, p in net.named_parameters()}
        grads, loss = torch.func.grad_and_value(loss_of)(weights)
        for name, parameter in net.named_parameters():
            parameter.grad = grads[name]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Made(net, optimizer, step, pairs(8, 3))


@program("per-sample gradients, clipped (DP-SGD)", "derivatives")
def per_sample(precision: Precision) -> Made:
    """Clip the gradient of each row: vmap of grad."""
    net = mlp(8, 16, 3)
    optimizer = sgd(net)

    def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with precision():
            return F.cross_entropy(torch.func.functional_call(net, weights, (x[None],)), y[None])

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = {name: p.detach() for name, p in net.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, parameter in net.named_parameters():
            parameter.grad = torch.einsum("b,b...->...", factor, each[name]) / x.shape[0]
        optimizer.step()
        optimizer.zero_grad()
        return norms.mean().detach()

    return Made(net, optimizer, step, pairs(8, 3))


@program("SAM", "derivatives")
def sam(precision: Precision) -> Made:
    """Two backward passes: at the weights, and a step up the gradient."""
    net = mlp(8, 16, 3)
    optimizer = sgd(net)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with precision():
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm() + 1e-12
            moves = [0.05 * p.grad / norm for p in net.parameters()]
            for parameter, move in zip(net.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        with precision():
            F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for parameter, move in zip(net.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Made(net, optimizer, step, pairs(8, 3))


@program("adversarial training (PGD)", "derivatives")
def pgd(precision: Precision) -> Made:
    """Train on inputs moved by the sign of their gradient."""
    net = mlp(8, 16, 3)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        moved = x
        for _ in range(2):
            moved = moved.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(F.cross_entropy(net(moved), y), moved)
            moved = x + (moved + 0.1 * slope.sign() - x).clamp(-0.2, 0.2)
        return F.cross_entropy(net(moved.detach()), y)

    reason = plain(net, sgd(net), loss_of, pairs(8, 3), precision)
    return reason


# Graphs and sequences


@program("GCN by scatter", "graphs and sequences")
def gcn(precision: Precision) -> Made:
    """Sum messages of edges into nodes."""
    first, second = nn.Linear(6, 16), nn.Linear(16, 3)
    net = nn.ModuleList([first, second])

    def spread(x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        degree = torch.zeros(x.shape[0], dtype=x.dtype).index_add(
            0, target, torch.ones_like(target, dtype=x.dtype)
        )
        return torch.zeros_like(x).index_add(0, target, x[source]) / degree.clamp(min=1)[:, None]

    def loss_of(
        x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        return F.cross_entropy(
            second(spread(F.relu(first(spread(x, source, target))), source, target)), y
        )

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (
            normal(k, 10, 6),
            integers(k, 10, 30),
            integers(k, 10, 30, seed=1),
            integers(k, 3, 10),
        ),
        precision,
    )


@program("GAT by scatter softmax", "graphs and sequences")
def gat(precision: Precision) -> Made:
    """Attend over edges with scatter_reduce."""
    net = nn.ModuleDict({"w": nn.Linear(6, 8), "a": nn.Linear(16, 1), "out": nn.Linear(8, 3)})

    def loss_of(
        x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        h = net["w"](x)
        score = F.leaky_relu(net["a"](torch.cat([h[source], h[target]], 1)), 0.2)[:, 0].float()
        most = torch.full((x.shape[0],), -1e9, dtype=score.dtype).scatter_reduce(
            0, target, score, "amax"
        )
        weight = (score - most[target]).exp()
        total = torch.zeros(x.shape[0], dtype=weight.dtype).scatter_add(0, target, weight)
        share = (weight / total[target]).to(h.dtype)[:, None]
        return F.cross_entropy(
            net["out"](torch.zeros_like(h).index_add(0, target, share * h[source])), y
        )

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (
            normal(k, 10, 6),
            integers(k, 10, 30),
            torch.cat([torch.arange(10), integers(k, 10, 20, seed=1)]),
            integers(k, 3, 10),
        ),
        precision,
    )


@program("S4-style diagonal SSM by FFT", "graphs and sequences")
def ssm(precision: Precision) -> Made:
    """Convolve with the kernel of a diagonal state space, in the frequency domain."""
    net = nn.ModuleDict({"in": nn.Linear(4, 8), "out": nn.Linear(8, 4)})
    net.register_parameter("decay", nn.Parameter(torch.randn(8)))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        u = net["in"](x).float() if x.dtype is torch.float32 else net["in"](x)
        time = torch.arange(x.shape[1], dtype=u.dtype)
        kernel = torch.exp(-F.softplus(net.decay)[:, None] * time)
        length = 2 * x.shape[1]
        freq = torch.fft.rfft(u.transpose(1, 2), n=length) * torch.fft.rfft(kernel, n=length)
        out = torch.fft.irfft(freq, n=length)[..., : x.shape[1]].transpose(1, 2)
        return F.mse_loss(net["out"](out), y)

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (normal(k, 2, 16, 4), normal(k, 2, 16, 4, seed=1)),
        precision,
    )


@program("selective scan in a loop", "graphs and sequences")
def scan(precision: Precision) -> Made:
    """Run a gated recurrence step by step (Mamba-like)."""
    net = nn.ModuleDict({"gate": nn.Linear(4, 8), "in": nn.Linear(4, 8), "out": nn.Linear(8, 4)})

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        gate, value = torch.sigmoid(net["gate"](x)), net["in"](x)
        state = torch.zeros_like(value[:, 0])
        states = []
        for t in range(x.shape[1]):
            state = gate[:, t] * state + (1 - gate[:, t]) * value[:, t]
            states.append(state)
        return F.mse_loss(net["out"](torch.stack(states, 1)), y)

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (normal(k, 2, 24, 4), normal(k, 2, 24, 4, seed=1)),
        precision,
    )


@program("seq2seq GRU with attention", "graphs and sequences")
def seq2seq(precision: Precision) -> Made:
    """Decode with teacher forcing and dot attention."""
    net = nn.ModuleDict(
        {
            "ids": nn.Embedding(20, 16),
            "encoder": nn.GRU(16, 16, batch_first=True),
            "cell": nn.GRUCell(32, 16),
            "out": nn.Linear(16, 20),
        }
    )

    def loss_of(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, last = net["encoder"](net["ids"](source))
        state, logits = last[0], []
        for t in range(target.shape[1]):
            weight = torch.softmax((memory * state[:, None]).sum(2), 1)
            context = (weight[..., None] * memory).sum(1)
            state = net["cell"](torch.cat([net["ids"](target[:, t]), context], 1), state)
            logits.append(net["out"](state))
        return F.cross_entropy(torch.stack(logits, 2), target)

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (integers(k, 20, 2, 7), integers(k, 20, 2, 6, seed=1)),
        precision,
    )


@program("LSTM language model, packed", "graphs and sequences")
def packed_lstm(precision: Precision) -> Made:
    """Pack rows of several lengths."""
    net = nn.ModuleDict(
        {
            "ids": nn.Embedding(20, 16),
            "lstm": nn.LSTM(16, 16, 2, batch_first=True),
            "out": nn.Linear(16, 20),
        }
    )

    def loss_of(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = nn.utils.rnn.pack_padded_sequence(
            net["ids"](ids), lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(
            net["lstm"](rows)[0], batch_first=True, total_length=ids.shape[1]
        )
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
        each = F.cross_entropy(net["out"](out).transpose(1, 2), ids, reduction="none")
        return (each * mask).sum() / mask.sum()

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (integers(k, 20, 3, 8), torch.tensor([8, 5, 3])),
        precision,
    )


@program("bidirectional LSTM with CTC", "graphs and sequences")
def ctc(precision: Precision) -> Made:
    """Align by the CTC loss."""
    net = nn.ModuleDict({"lstm": nn.LSTM(6, 12, bidirectional=True), "out": nn.Linear(24, 8)})

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        log_p = F.log_softmax(
            net["out"](net["lstm"](x)[0]).float()
            if x.dtype is torch.float32
            else net["out"](net["lstm"](x)[0]),
            2,
        )
        return F.ctc_loss(log_p, y, torch.tensor([16, 16]), torch.tensor([4, 3]))

    return plain(
        net, sgd(net), loss_of, lambda k: (normal(k, 16, 2, 6), integers(k, 7, 2, 4) + 1), precision
    )


@program("CRF tagging", "graphs and sequences")
def crf(precision: Precision) -> Made:
    """Sum over paths by the forward algorithm."""
    net = mlp(6, 16, 4)
    net.register_parameter("moves", nn.Parameter(torch.randn(4, 4) * 0.1))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        score = net(x)
        alpha = score[:, 0]
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + net.moves[None], 1) + score[:, t]
        gold = score.gather(2, y[..., None])[..., 0].sum(1) + net.moves[y[:, :-1], y[:, 1:]].sum(1)
        return (torch.logsumexp(alpha, 1) - gold).mean()

    return plain(
        net,
        sgd(net, lr=0.01),
        loss_of,
        lambda k: (normal(k, 2, 7, 6), integers(k, 4, 2, 7)),
        precision,
    )


@program("temporal convolutions, weight norm", "graphs and sequences")
def tcn(precision: Precision) -> Made:
    """Dilated causal convolutions with weight normalisation."""
    norm = nn.utils.parametrizations.weight_norm
    net = nn.ModuleList(
        [norm(nn.Conv1d(4, 8, 3, dilation=1)), norm(nn.Conv1d(8, 4, 3, dilation=2))]
    )

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer, dilation in zip(net, (1, 2), strict=True):
            x = torch.relu(layer(F.pad(x, (2 * dilation, 0))))
        return F.mse_loss(x, y)

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (normal(k, 2, 4, 16), normal(k, 2, 4, 16, seed=1)),
        precision,
    )


# Images


@program("one-stage detection head", "images by hand")
def detection(precision: Precision) -> Made:
    """Focal loss of classes and IoU loss of boxes on anchors."""
    net = nn.ModuleDict(
        {
            "body": nn.Conv2d(3, 16, 3, 2, 1),
            "class": nn.Conv2d(16, 3, 3, padding=1),
            "box": nn.Conv2d(16, 4, 3, padding=1),
        }
    )

    def loss_of(x: torch.Tensor, label: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        h = F.silu(net["body"](x))
        logits, sides = net["class"](h), F.softplus(net["box"](h))
        target = F.one_hot(label, 4)[..., 1:].permute(0, 3, 1, 2).to(x.dtype)
        p = torch.sigmoid(logits)
        right = p * target + (1 - p) * (1 - target)
        focal = (
            F.binary_cross_entropy_with_logits(logits, target, reduction="none") * (1 - right) ** 2
        )
        inner = torch.minimum(sides, boxes)
        overlap = (inner[:, 0] + inner[:, 2]) * (inner[:, 1] + inner[:, 3])
        areas = [(s[:, 0] + s[:, 2]) * (s[:, 1] + s[:, 3]) for s in (sides, boxes)]
        iou = overlap / (areas[0] + areas[1] - overlap).clamp(min=1e-3)
        found = (label > 0).to(x.dtype)
        return focal.mean() + ((1 - iou) * found).sum() / found.sum().clamp(min=1)

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (normal(k, 2, 3, 16, 16), integers(k, 4, 2, 8, 8), uniform(k, 2, 4, 8, 8) + 0.5),
        precision,
    )


@program("U-Net segmentation, dice", "images by hand")
def segmentation(precision: Precision) -> Made:
    """Skip connections, bilinear upsampling, cross entropy and dice loss."""
    net = nn.ModuleDict(
        {
            "a": nn.Conv2d(3, 8, 3, padding=1),
            "b": nn.Conv2d(8, 16, 3, 2, 1),
            "norm": nn.BatchNorm2d(16),
            "c": nn.Conv2d(24, 3, 3, padding=1),
        }
    )

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = F.relu(net["a"](x))
        low = F.relu(net["norm"](net["b"](first)))
        up = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        logits = net["c"](torch.cat([first, up], 1))
        p, target = logits.softmax(1), F.one_hot(y, 3).permute(0, 3, 1, 2).to(logits.dtype)
        dice = 1 - (2 * (p * target).sum((2, 3)) + 1) / ((p + target).sum((2, 3)) + 1)
        return F.cross_entropy(logits, y) + dice.mean()

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (normal(k, 2, 3, 16, 16), integers(k, 3, 2, 16, 16)),
        precision,
    )


@program("super-resolution, pixel shuffle", "images by hand")
def super_resolution(precision: Precision) -> Made:
    """Charbonnier loss after PixelShuffle, with a residual from bicubic upsampling."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.PReLU(),
        nn.Conv2d(16, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        up = F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
        return torch.sqrt((net(x) + up - y).square() + 1e-6).mean()

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (normal(k, 2, 3, 8, 8), normal(k, 2, 3, 16, 16, seed=1)),
        precision,
    )


@program("spatial transformer", "images by hand")
def spatial_transformer(precision: Precision) -> Made:
    """Sample an image at positions that the model predicts."""
    net = nn.ModuleDict({"where": mlp(192, 16, 6), "what": nn.Conv2d(3, 4, 3)})

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        theta = net["where"](x.flatten(1)).reshape(-1, 2, 3) * 0.1 + torch.eye(2, 3, dtype=x.dtype)
        grid = F.affine_grid(theta.to(x.dtype), list(x.shape), align_corners=False)
        moved = F.grid_sample(x, grid, align_corners=False)
        return F.cross_entropy(net["what"](moved).mean((2, 3)), y)

    return plain(
        net, sgd(net), loss_of, lambda k: (normal(k, 2, 3, 8, 8), integers(k, 4, 2)), precision
    )


@program("style transfer by Gram matrices", "images by hand")
def style(precision: Precision) -> Made:
    """Match Gram matrices of a frozen network, with total variation."""
    net = nn.Conv2d(3, 3, 3, padding=1)
    fixed = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).requires_grad_(False)

    def gram(x: torch.Tensor) -> torch.Tensor:
        flat = fixed(x).flatten(2)
        return flat @ flat.transpose(1, 2) / flat.shape[2]

    def loss_of(x: torch.Tensor, style_of: torch.Tensor) -> torch.Tensor:
        made = net(x)
        rough = (made[..., 1:] - made[..., :-1]).abs().mean() + (
            made[:, :, 1:] - made[:, :, :-1]
        ).abs().mean()
        return F.mse_loss(gram(made), gram(style_of)) + F.mse_loss(made, x) + 0.1 * rough

    made = plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (normal(k, 2, 3, 10, 10), normal(k, 2, 3, 10, 10, seed=1)),
        precision,
    )
    return Made([net, fixed], made.optimizer, made.step, made.batch)


# Ways to train


@program("multi-task, two optimizers", "ways to train")
def multi_task(precision: Precision) -> Made:
    """Train a shared body with two heads and learned uncertainties."""
    net = nn.ModuleDict({"body": mlp(8, 16, 16), "a": nn.Linear(16, 3), "b": nn.Linear(16, 1)})
    weights = nn.ParameterDict({"log": nn.Parameter(torch.zeros(2))})
    one, two = sgd(net), torch.optim.Adam(weights.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        with precision():
            h = torch.relu(net["body"](x))
            losses = torch.stack([F.cross_entropy(net["a"](h), y), F.mse_loss(net["b"](h), z)])
            loss = (losses * torch.exp(-weights["log"]) + weights["log"]).sum()
        loss.backward()
        one.step()
        two.step()
        one.zero_grad()
        two.zero_grad()
        return losses.detach()

    return Made(
        [net, weights],
        [one, two],
        step,
        lambda k: (normal(k, 8, 8), integers(k, 3, 8), normal(k, 8, 1, seed=1)),
    )


@program("EMA by AveragedModel", "ways to train")
def averaged(precision: Precision) -> Made:
    """Follow the weights by swa_utils.AveragedModel inside of the step."""
    net = mlp(8, 16, 3)
    mean = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = sgd(net)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with precision():
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.update_parameters(net)
        return loss.detach()

    return Made([net, mean], optimizer, step, pairs(8, 3))


@program("gradient accumulation", "ways to train")
def accumulation(precision: Precision) -> Made:
    """Two backward passes a step, over halves of the batch."""
    net = mlp(8, 16, 3)
    optimizer = sgd(net)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for part, label in zip(x.chunk(2), y.chunk(2), strict=True):
            with precision():
                loss = F.cross_entropy(net(part), label) / 2
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Made(net, optimizer, step, pairs(8, 3))


@program("schedule and clipping", "ways to train")
def schedule(precision: Precision) -> Made:
    """Clip, step, and change the learning rate after each step."""
    net = mlp(8, 16, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with precision():
            loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def batch(k: int) -> tuple[Any, ...]:
        if k:
            scheduler.step()
        return pairs(8, 3)(k)

    return Made(net, optimizer, step, batch)


class LoRA(nn.Module):
    """A frozen linear layer with a low-rank part that is trained."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the low-rank part."""
        return self.inner(x) + 2.0 * self.up(self.down(x))


@program("LoRA", "ways to train")
def lora(precision: Precision) -> Made:
    """Train low-rank parts of frozen layers."""
    net = nn.Sequential(LoRA(nn.Linear(8, 16)), nn.ReLU(), LoRA(nn.Linear(16, 3)))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    return plain(net, optimizer, lambda x, y: F.cross_entropy(net(x), y), pairs(8, 3), precision)


@program("tied weights", "ways to train")
def tied(precision: Precision) -> Made:
    """Share an embedding with the output layer."""
    net = nn.ModuleDict(
        {"ids": nn.Embedding(20, 8), "body": mlp(8, 16, 8), "out": nn.Linear(8, 20, bias=False)}
    )
    net["out"].weight = net["ids"].weight
    return plain(
        net,
        sgd(net),
        lambda x: F.cross_entropy(
            net["out"](net["body"](net["ids"](x))).flatten(0, 1), x.flatten()
        ),
        lambda k: (integers(k, 20, 2, 6),),
        precision,
    )


@program("spectral norm, old style", "ways to train")
def spectral(precision: Precision) -> Made:
    """Normalise by a power iteration in a forward pre-hook."""
    net = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(8, 16)),
        nn.ReLU(),
        nn.utils.spectral_norm(nn.Linear(16, 3)),
    )
    return plain(net, sgd(net), lambda x, y: F.cross_entropy(net(x), y), pairs(8, 3), precision)


class FakeQuantized(nn.Module):
    """A linear layer with fake-quantised weights and activations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.end = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Round by a straight-through estimator."""
        h = F.relu(F.linear(self.rounded(x), self.rounded(self.inner.weight), self.inner.bias))
        return self.end(h)

    @staticmethod
    def rounded(x: torch.Tensor) -> torch.Tensor:
        """Round to 8 bits, with the gradient of the identity."""
        scale = x.detach().abs().max() / 127
        return x + ((x / scale).round().clamp(-128, 127) * scale - x).detach()


@program(
    "fake quantisation",
    "ways to train",
    "a value at the edge between two levels goes to the other one for a difference of one rounding",
)
def fake_quantised(precision: Precision) -> Made:
    """Train through rounded weights and activations."""
    net = FakeQuantized()
    return plain(net, sgd(net), lambda x, y: F.cross_entropy(net(x), y), pairs(8, 3), precision)


@program(
    "torch.fake_quantize_per_tensor_affine",
    "ways to train",
    "a value at the edge between two levels goes to the other one for a difference of one rounding",
)
def fake_quantize_op(precision: Precision) -> Made:
    """Train through PyTorch's op of fake quantisation."""
    net = mlp(8, 16, 3)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = net(x)
        return F.cross_entropy(
            torch.fake_quantize_per_tensor_affine(h.float(), 0.05, 0, -128, 127), y
        )

    return plain(net, sgd(net), loss_of, pairs(8, 3), precision)


@program("optimizer in backward", "ways to train")
def in_backward(precision: Precision) -> Made:
    """Step each parameter's optimizer in a hook as its gradient arrives."""
    net = mlp(8, 16, 3)
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in net.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with precision():
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss.detach()

    return Made(net, list(optimizers.values()), step, pairs(8, 3))


@program("checks of the loss", "ways to train")
def checked(precision: Precision) -> Made:
    """Raise where the loss is not finite, and return it as a number."""
    net = mlp(8, 16, 3)
    optimizer = sgd(net)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if y.max() >= 3:
            raise ValueError("a label is out of range")
        with precision():
            loss = F.cross_entropy(net(x), y)
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss is {loss}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Made(net, optimizer, step, pairs(8, 3))


@program("checkpointed blocks", "ways to train")
def checkpointed(precision: Precision) -> Made:
    """Recompute blocks in the backward pass."""
    net = nn.ModuleList([mlp(8, 16, 8) for _ in range(3)])

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in net:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return F.mse_loss(x, y)

    return plain(
        net, sgd(net), loss_of, lambda k: (normal(k, 8, 8), normal(k, 8, 8, seed=1)), precision
    )


@program("mixup", "ways to train")
def mixup(precision: Precision) -> Made:
    """Mix rows and their labels."""
    net = mlp(8, 16, 3)

    def loss_of(
        x: torch.Tensor, y: torch.Tensor, share: torch.Tensor, order: torch.Tensor
    ) -> torch.Tensor:
        logits = net(share * x + (1 - share) * x[order])
        first, second = (F.cross_entropy(logits, one, reduction="none") for one in (y, y[order]))
        return (share[:, 0] * first + (1 - share[:, 0]) * second).mean()

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (
            *pairs(8, 3)(k),
            uniform(k, 8, 1),
            torch.randperm(8, generator=torch.Generator().manual_seed(k)),
        ),
        precision,
    )


@program("NeRF, encoded positions", "ways to train")
def nerf(precision: Precision) -> Made:
    """Composite colours along rays, with positional encoding."""
    net = mlp(3 * 2 * 4, 32, 4, act=nn.ReLU)

    def loss_of(points: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
        scaled = points[..., None] * 2.0 ** torch.arange(4, dtype=points.dtype)
        out = net(torch.cat([scaled.sin(), scaled.cos()], -1).flatten(-2))
        alpha = 1 - torch.exp(-F.softplus(out[..., 3]) * 0.1)
        light = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-6], 1), 1)[
            :, :-1
        ]
        return F.mse_loss(((alpha * light)[..., None] * torch.sigmoid(out[..., :3])).sum(1), colour)

    return plain(
        net, sgd(net), loss_of, lambda k: (normal(k, 4, 6, 3), uniform(k, 4, 3)), precision
    )


@program("recommendation (DLRM)", "ways to train")
def dlrm(precision: Precision) -> Made:
    """Bags of embeddings, dot interactions, a click loss."""
    net = nn.ModuleDict(
        {"bag": nn.EmbeddingBag(30, 8, mode="sum"), "low": mlp(4, 8), "top": mlp(9, 16, 1)}
    )

    def loss_of(dense: torch.Tensor, ids: torch.Tensor, click: torch.Tensor) -> torch.Tensor:
        a, b = net["low"](dense), net["bag"](ids)
        joint = torch.cat([a, (a * b).sum(1, keepdim=True)], 1)
        return F.binary_cross_entropy_with_logits(net["top"](joint), click)

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (normal(k, 8, 4), integers(k, 30, 8, 3), uniform(k, 8, 1).round()),
        precision,
    )


@program("Gaussian process, Cholesky", "ways to train")
def gaussian_process(precision: Precision) -> Made:
    """Maximise the marginal likelihood of a Gaussian process."""
    net = nn.ParameterDict(
        {"width": nn.Parameter(torch.zeros(())), "noise": nn.Parameter(torch.zeros(()))}
    )

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        distance = (x[:, None] - x[None]).square().sum(2)
        kernel = torch.exp(-distance * net["width"].exp()) + (net["noise"].exp() + 0.1) * torch.eye(
            x.shape[0], dtype=x.dtype
        )
        root = torch.linalg.cholesky(kernel)
        solved = torch.cholesky_solve(y, root)
        return 0.5 * (y * solved).sum() + root.diagonal().log().sum()

    return plain(
        net,
        sgd(net, lr=0.001),
        loss_of,
        lambda k: (normal(k, 8, 3), normal(k, 8, 1, seed=1)),
        precision,
    )


@program("RBM, contrastive divergence", "ways to train")
def rbm(precision: Precision) -> Made:
    """Train by free energies of data and a reconstruction."""
    net = nn.ParameterDict(
        {
            "w": nn.Parameter(torch.randn(8, 6) * 0.1),
            "v": nn.Parameter(torch.zeros(8)),
            "h": nn.Parameter(torch.zeros(6)),
        }
    )

    def energy_of(v: torch.Tensor) -> torch.Tensor:
        return -(v @ net["v"]) - F.softplus(v @ net["w"] + net["h"]).sum(1)

    def loss_of(v: torch.Tensor, coin: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = torch.sigmoid(v @ net["w"] + net["h"])
            again = (torch.sigmoid(hidden @ net["w"].t() + net["v"]) > coin).to(v.dtype)
        return (energy_of(v) - energy_of(again)).mean()

    return plain(
        net,
        sgd(net),
        loss_of,
        lambda k: (uniform(k, 8, 8).round(), uniform(k, 8, 8, seed=1)),
        precision,
    )
