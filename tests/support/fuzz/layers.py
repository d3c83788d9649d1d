# SPDX-License-Identifier: Apache-2.0
"""Statements that call a layer of torch.nn: drawn, or None where no value has a shape for it.

A maker returns the lines of `__init__` and of `forward`; `$` is the name that they define.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Drawn = tuple[tuple[str, ...], tuple[str, ...]] | None


def _layer(w: Any, text: str, call: str) -> Drawn:
    return (f"{w.new_layer()} = {text}",), (f"$ = {call.format(m=w.new_layer())}",)


def _shape(w: Any, name: str) -> list[int]:
    return list(w.values[name].shape)


def linear(w: Any) -> Drawn:
    a = w.pick(1, 2, 3, 4)
    if a is None:
        return None
    options = w.rng.choice(["", "", ", bias=False"])
    return _layer(w, f"nn.Linear({_shape(w, a)[-1]}, {w.extent()}{options})", f"{{m}}({a})")


def convolution(w: Any) -> Drawn:
    a = w.pick(3, 4)
    if a is None:
        return None
    shape, rng = _shape(w, a), w.rng
    kernel, channels = rng.choice([1, 2, 3]), shape[1]
    groups = rng.choice([1, 1, channels or 1])
    out = (groups if groups > 1 else 1) * rng.choice([1, 2, 4])
    options = f"stride={rng.choice([1, 1, 2])}, padding={rng.choice([0, 1])}, groups={groups}"
    kind = rng.choice(["Conv", "Conv", "Conv", "ConvTranspose"])
    if kind == "Conv":
        options += f", dilation={rng.choice([1, 1, 2])}, bias={rng.choice([True, False])}"
    text = f"nn.{kind}{len(shape) - 2}d({channels}, {out}, {kernel}, {options})"
    return _layer(w, text, f"{{m}}({a})")


def normalization(w: Any) -> Drawn:
    a = w.pick(2, 3, 4)
    if a is None:
        return None
    shape, rng = _shape(w, a), w.rng
    rank, channels = len(shape), shape[1]
    images = {2: "1d", 3: "1d", 4: "2d"}[rank]
    texts = [
        f"nn.LayerNorm({shape[-1]})",
        f"nn.LayerNorm({shape[1:]}, elementwise_affine={rng.choice([True, False])})",
        f"nn.RMSNorm({shape[-1]})",
        f"nn.BatchNorm{images}({channels}, momentum={rng.choice([0.1, 0.3, None])})",
        f"nn.BatchNorm{images}({channels}, affine=False, track_running_stats=False)",
        f"nn.GroupNorm({rng.choice([1, channels or 1])}, {channels})",
    ]
    if rank > 2:
        texts.append(f"nn.InstanceNorm{images}({channels}, affine=True)")
    return _layer(w, rng.choice(texts), f"{{m}}({a})")


def embedding(w: Any) -> Drawn:
    texts = [f"nn.Embedding(4, {w.extent()})", f"nn.Embedding(4, {w.extent()}, padding_idx=1)"]
    return _layer(w, w.rng.choice(texts), "{m}(ids)")


def recurrence(w: Any) -> Drawn:
    a = w.pick(3)
    if a is None:
        return None
    rng = w.rng
    options = f"batch_first={rng.choice([True, False])}, bidirectional={rng.choice([True, False])}"
    kind, hidden, layers = (
        rng.choice(["LSTM", "GRU", "RNN"]),
        rng.choice([1, 3, 8]),
        rng.choice([1, 1, 2]),
    )
    text = f"nn.{kind}({_shape(w, a)[-1]}, {hidden}, num_layers={layers}, {options})"
    return _layer(w, text, f"{{m}}({a})[0]")


def attention(w: Any) -> Drawn:
    a = w.pick(3)
    if a is None:
        return None
    width = _shape(w, a)[-1]
    heads = w.rng.choice([n for n in (1, 2, 4) if width % n == 0])
    text = f"nn.MultiheadAttention({width}, {heads}, batch_first={w.rng.choice([True, False])})"
    return _layer(w, text, f"{{m}}({a}, {a}, {a}, need_weights={w.rng.choice([True, False])})[0]")


def parameterized_activation(w: Any) -> Drawn:
    a = w.pick(2, 3, 4)
    if a is None:
        return None
    return _layer(w, w.rng.choice(["nn.PReLU()", f"nn.PReLU({_shape(w, a)[1]})"]), f"{{m}}({a})")


def bilinear(w: Any) -> Drawn:
    a = w.pick(2, 3)
    if a is None:
        return None
    width = _shape(w, a)[-1]
    return _layer(w, f"nn.Bilinear({width}, {width}, {w.rng.choice([1, 3])})", f"{{m}}({a}, {a})")


def parameter(w: Any) -> Drawn:
    """A parameter that is broadcast."""
    a = w.pick()
    shape = [extent if w.rng.random() < 0.5 else 1 for extent in _shape(w, a)]
    how = w.rng.choice(["{a} + {m}", "{a} * {m}", "{m} - {a}", "torch.maximum({a}, {m})",
                        "torch.lerp({a}, {m}, 0.3)", "torch.where({a} > 0, {a}, {m})"])  # fmt: skip
    return _layer(w, f"nn.Parameter(torch.randn({shape}))", how.replace("{a}", a))


LAYERS: dict[str, Callable[[Any], Drawn]] = {
    "linear": linear,
    "linear again": linear,
    "convolution": convolution,
    "normalization": normalization,
    "embedding": embedding,
    "recurrence": recurrence,
    "attention": attention,
    "activation": parameterized_activation,
    "bilinear": bilinear,
    "parameter": parameter,
}
