# SPDX-License-Identifier: Apache-2.0
"""Writes random programs: statements are tried on tensors as they are drawn, so that shapes fit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from fuzz.expressions import EXPRESSIONS
from fuzz.layers import LAYERS
from fuzz.program import Program, Statement

# More elements make a program slow and find nothing more; larger numbers overflow float16.
MOST_ELEMENTS, LARGEST = 4096, 100.0
_EXTENTS = (1, 2, 3, 4, 5, 7, 8, 16, 17)
_TRIES = 40


class Writer:
    """The state of one program that is being written."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.values: dict[str, torch.Tensor] = {}
        self.statements: list[Statement] = []
        self.model = nn.Module()
        self.scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "self": self.model}
        self.count = 0

    def pick(self, *ranks: int, like: torch.Tensor | None = None) -> str | None:
        """The name of a value of one of these ranks, or of a shape; newer ones more often."""
        fits = [
            name
            for name, value in self.values.items()
            if (not ranks or value.dim() in ranks) and (like is None or value.shape == like.shape)
        ]
        return fits[-1 - min(int(self.rng.expovariate(0.7)), len(fits) - 1)] if fits else None

    def extent(self) -> int:
        return self.rng.choice(_EXTENTS)

    def new_layer(self) -> str:
        return f"self.m{self.count}"

    def write(self, makers: Mapping[str, Callable[[Writer], Any]]) -> bool:
        """Add a statement that one of the makers draws; False where none of the tries fits."""
        for _ in range(_TRIES):
            drawn = makers[self.rng.choice(list(makers))](self)
            if drawn is None:
                continue
            init, lines = drawn
            name = f"v{self.count}"
            lines = tuple(line.replace("$", name) for line in lines)
            if self._run(name, init, lines):
                self.statements.append(Statement(name, lines, init))
                self.count += 1
                return True
        return False

    def _run(self, name: str, init: tuple[str, ...], lines: tuple[str, ...]) -> bool:
        copied = {key: value.detach().clone() for key, value in self.values.items()}
        scope = {**self.scope, **copied}
        try:
            with torch.no_grad():
                exec("\n".join([*init, *lines]), scope)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            return False
        made = scope[name]
        fits = (
            isinstance(made, torch.Tensor)
            and made.is_floating_point()
            and made.numel() <= MOST_ELEMENTS
            and bool(made.isfinite().all())
            and (made.numel() == 0 or float(made.abs().max()) <= LARGEST)
        )
        if fits:
            self.values[name] = made
        return fits


def write_program(seed: int) -> Program:
    """The program of a seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers without elements
        return _written(seed)


def _written(seed: int) -> Program:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    writer = Writer(rng)
    batch = _batch(rng)
    inputs = {name: eval(text, writer.scope) for name, text in batch.items()}
    writer.scope.update(inputs)
    shape = list(inputs["x"].shape)
    scale = [extent if rng.random() < 0.5 else 1 for extent in shape]
    first = Statement(
        "v0", ("v0 = x * self.m0",), (f"self.m0 = nn.Parameter(torch.randn({scale}))",)
    )
    writer.count = 1
    writer._run("v0", first.init, first.lines)
    writer.values.setdefault("v0", inputs["x"])
    writer.statements.append(first)
    for _ in range(rng.randint(2, 9)):
        writer.write(LAYERS if rng.random() < 0.4 else EXPRESSIONS)
    return _with_step(rng, writer, batch)


def _batch(rng: random.Random) -> dict[str, str]:
    rank = rng.choice([1, 2, 2, 2, 3, 3, 3, 4, 4])
    extents = [rng.choice(_EXTENTS) for _ in range(rank)]
    if rng.random() < 0.1:
        extents[rng.randrange(rank)] = rng.choice([0, 1])
    while len(extents) == 4 and extents[0] * extents[1] * extents[2] * extents[3] > MOST_ELEMENTS:
        extents[rng.randrange(4)] = 3
    ids = rng.choice([1, 2, 4, extents[0] or 1])
    return {"x": f"torch.randn({extents})", "ids": f"torch.randint(0, 4, ({ids},))"}


_LOSSES = (
    "{v}.square().mean()",
    "{v}.sum() * 0.01",
    "F.smooth_l1_loss({v}, torch.zeros_like({v}))",
    "F.mse_loss({v}, torch.full_like({v}, 0.5))",
    "F.binary_cross_entropy_with_logits({v}, torch.full_like({v}, 0.3))",
    "F.huber_loss({v}, torch.ones_like({v}), delta=0.5)",
    "{v}.abs().mean()",
    "-F.log_softmax({v}, -1).mean()",
    "F.l1_loss({v}, torch.ones_like({v}), reduction='sum') * 0.01",
    "F.cross_entropy({v}, torch.zeros_like({v}.argmax(min(1, {v}.dim() - 1))))",
    "F.softplus({v}).mean()",
    "torch.logsumexp({v}, dim=-1).mean()",
)
# As segmentation does: classes come last from one_hot, and the loss reads them as axis 1.
_CHANNELS_LAST_TARGET = (
    "F.one_hot((ids[0] + torch.arange({v}[:, 0].numel())).view({v}[:, 0].shape) % {v}.shape[1],"
    " {v}.shape[1]).movedim(-1, 1).to({v}.dtype)"
)
_LOSSES_OF_CLASSES = (
    f"F.mse_loss({{v}}, {_CHANNELS_LAST_TARGET})",
    f"F.binary_cross_entropy_with_logits({{v}}, {_CHANNELS_LAST_TARGET})",
    f"({{v}}.sigmoid() * {_CHANNELS_LAST_TARGET}).sum() * 0.01",
)
_OPTIMIZERS = (
    "torch.optim.SGD(parameters, lr=0.1)",
    "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)",
    "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01)",
    "torch.optim.SGD(parameters, lr=0.05, maximize=True)",
    # A larger eps keeps noise in a gradient of zero from becoming a step of the learning rate.
    "torch.optim.Adam(parameters, lr=0.01, eps=1e-2)",
    "torch.optim.Adam(parameters, lr=0.01, eps=1e-2, amsgrad=True, weight_decay=0.1)",
    "torch.optim.AdamW(parameters, lr=0.01, eps=1e-2, weight_decay=0.1)",
    "torch.optim.AdamW(parameters, lr=0.01, eps=1e-2, foreach=False)",
    "torch.optim.RMSprop(parameters, lr=0.01, eps=1e-2)",
    "torch.optim.RMSprop(parameters, lr=0.01, eps=1e-2, momentum=0.5, centered=True)",
    "torch.optim.Adagrad(parameters, lr=0.01, eps=1e-2, initial_accumulator_value=0.1)",
    "torch.optim.NAdam(parameters, lr=0.01, eps=1e-2)",
    "torch.optim.Adamax(parameters, lr=0.01, eps=1e-2)",
)
_CLIPS = (
    "nn.utils.clip_grad_norm_(parameters, 1.0)",
    "nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=float('inf'))",
    "nn.utils.clip_grad_value_(parameters, 0.1)",
)


def _with_step(rng: random.Random, writer: Writer, batch: dict[str, str]) -> Program:
    drawn = rng.random
    count = min(len(writer.statements), 2)
    losses = tuple(_loss(rng, writer, k) for k in range(count))
    dtype = rng.choices(["float32", "float64", "bfloat16", "float16"], [8, 1, 1, 0.5])[0]
    if any("hardsigmoid" in line for one in writer.statements for line in one.lines):
        dtype = "float32"  # PyTorch's gradient multiplies by 1.0f / 6.0f, in float64 too
    jit: dict[str, object] = {}
    if dtype == "float32" and drawn() < 0.4:
        jit["amp_dtype"] = rng.choice(["bfloat16", "float16"])
    if drawn() < 0.15:
        jit["rounding"] = "strict"
    is_scaled = drawn() < 0.3
    return Program(
        tuple(writer.statements),
        losses,
        batch,
        rng.choice(_OPTIMIZERS),
        after_init=_after_init(rng, writer),
        dtype=dtype,
        accumulate=drawn() < 0.15,
        clip=rng.choice(_CLIPS) if drawn() < 0.25 else "",
        scaler="amp_ir.GradScaler('cpu', init_scale=2.0**8, growth_interval=2)"
        if is_scaled
        else "",
        overflow_at=rng.choice([-1, 0, 1, 2]) if is_scaled else -1,
        zero_grad=f"optimizer.zero_grad(set_to_none={rng.choice([True, True, False])})",
        zero_first=drawn() < 0.7,
        jit=jit,
        budget_share=rng.choice([0.95, 0.8, 0.6]) if drawn() < 0.12 else 0.0,
    )


def _loss(rng: random.Random, writer: Writer, k: int) -> str:
    name = writer.statements[-2:][k].name
    shape = writer.values[name].shape
    choices = _LOSSES_OF_CLASSES if len(shape) > 2 and 0 not in shape else ()
    return rng.choice(rng.choice([_LOSSES, choices or _LOSSES])).format(v=f"values[{k}]")


def _after_init(rng: random.Random, writer: Writer) -> tuple[str, ...]:
    """Freeze a parameter, or tie two of one shape."""
    named = [
        (f"model.m{number}", key, tuple(parameter.shape))
        for number in range(1, writer.count)
        if isinstance(layer := getattr(writer.model, f"m{number}", None), nn.Module)
        for key, parameter in layer.named_parameters(recurse=False)
    ]
    lines = []
    if named and rng.random() < 0.2:
        layer, key, _ = rng.choice(named)
        lines.append(f"{layer}.{key}.requires_grad_(False)")
    pairs = [(a, b) for a in named for b in named if a < b and a[1:] == b[1:]]
    if pairs and rng.random() < 0.5:
        (a, key, _), (b, _, _) = rng.choice(pairs)
        lines.append(f"{b}.{key} = {a}.{key}")
    return tuple(lines)
