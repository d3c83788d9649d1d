# SPDX-License-Identifier: Apache-2.0
"""Random numbers as a pure function of (seed, step, op index, element).

`random_state` is int64[2]: the seed and the counter of the step, which the step itself advances.
`index` is unique for each random op of the step. In the body of a loop the state is int64[3]: the
third number is added to the index, so that each step of the loop has its own. Nothing is stored
between calls, so a backward op, a second device or a restored checkpoint sees the same numbers.

The generator is two rounds of a 32-bit mixing permutation of the element's flat position, keyed
with 64 bits that absorb seed, step and index. All arithmetic is modulo 2^32;
`loops/lowerings/random.py` computes the same bits.

Source: the mixer is lowbias32 of C. Wellons, "Prospecting for hash functions" (2018); the idea of
    counters as generators is Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import math

import torch

from amp_ir.dialect.define import Shape, Tensor, define
from amp_ir.errors import OptionError

MASK = 0xFFFFFFFF
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
SHIFTS = (16, 15, 16)
# Two keys from two starts: fractional digits of pi, and the golden ratio between the words.
KEY_STARTS = (0x243F6A88, 0x85A308D3)
GOLDEN = 0x9E3779B9
# The second number of a Box-Muller pair is drawn with another first key.
SECOND_DRAW = 0x13198A2E


def _mix(x: torch.Tensor) -> torch.Tensor:
    # int64 products wrap modulo 2^64, so their low 32 bits are right.
    x = x ^ (x >> SHIFTS[0])
    x = (x * MULTIPLIERS[0]) & MASK
    x = x ^ (x >> SHIFTS[1])
    x = (x * MULTIPLIERS[1]) & MASK
    return x ^ (x >> SHIFTS[2])


def _keys(random_state: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed, step, *added = random_state.long().unbind()
    index_word = (sum(added) + index) & MASK
    words = (seed & MASK, (seed >> 32) & MASK, step & MASK, (step >> 32) & MASK, index_word)
    keys = []
    for start in KEY_STARTS:
        key = torch.tensor(start)
        for word in words:
            key = (_mix(key ^ word) + GOLDEN) & MASK
        keys.append(key)
    return keys[0], keys[1]


def random_bits(
    random_state: torch.Tensor, shape: Shape, index: int, *, draw: int = 0
) -> torch.Tensor:
    """Return 32 random bits per element, as int64 in [0, 2^32); `draw` 1 is a second tensor."""
    first, second = _keys(random_state, index)
    element = torch.arange(math.prod(shape), dtype=torch.int64)
    first = first ^ (SECOND_DRAW if draw else 0)
    return _mix(_mix((element + first) & MASK) ^ second).reshape(shape)


def _random_uniform(random_state: torch.Tensor, *, shape: Shape, index: int) -> torch.Tensor:
    # 24 bits: every multiple of 2^-24 is a float32, so 1.0 is never reached by rounding.
    return (random_bits(random_state, shape, index) >> 8).float() * 2.0**-24


def _random_normal(random_state: torch.Tensor, *, shape: Shape, index: int) -> torch.Tensor:
    """Draw by Box and Muller 1958; the radius uses a uniform in (0, 1]: its logarithm is finite."""
    radius = ((random_bits(random_state, shape, index) >> 8) + 1).float() * 2.0**-24
    angle = (random_bits(random_state, shape, index, draw=1) >> 8).float() * 2.0**-24
    return torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(angle * (2.0 * math.pi))


def check_state(op: str, random_state: Tensor, shape: Shape, index: int) -> None:
    """Require int64[2 or 3], an index of 32 bits and fewer elements than 32 bits count."""
    random_state.expect_dtype("int64")
    if random_state.shape != (3,):
        random_state.expect_shape((2,))
    if not 0 <= index <= MASK:
        raise OptionError(f"{op}: option index is {index}, expected 0 to 2^32 - 1")
    if math.prod(shape) > MASK:
        raise OptionError(f"{op}: shape {tuple(shape)} has more than 2^32 - 1 elements")


@define("amp_ir.random_uniform", "random_state", reference=_random_uniform)
def random_uniform(random_state: Tensor, *, shape: Shape, index: int) -> Tensor:
    """Draw uniforms in [0, 1): int64[2] -> f32[*shape], multiples of 2^-24."""
    check_state("amp_ir.random_uniform", random_state, shape, index)
    return Tensor(tuple(shape), "float32")


@define("amp_ir.random_normal", "random_state", reference=_random_normal)
def random_normal(random_state: Tensor, *, shape: Shape, index: int) -> Tensor:
    """Draw standard normals: int64[2] -> f32[*shape]."""
    check_state("amp_ir.random_normal", random_state, shape, index)
    return Tensor(tuple(shape), "float32")


def keep_mask(
    random_state: torch.Tensor, shape: Shape, *, dropout_p: float, index: int
) -> torch.Tensor:
    """Return bool[*shape]: True, with probability 1 - p, where an element stays."""
    return _random_uniform(random_state, shape=shape, index=index) >= dropout_p


def survivor_scale(dropout_p: float) -> float:
    """Return the factor of the elements that dropout keeps; 0 when it keeps none."""
    return 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0


def check_probability(op: str, option: str, p: float) -> None:
    """Raise OptionError unless 0 <= p <= 1."""
    if not 0.0 <= p <= 1.0:
        raise OptionError(f"{op}: option {option} is {p}, expected a probability in [0, 1]")


def _dropout(
    x: torch.Tensor, random_state: torch.Tensor, *, p: float, index: int
) -> tuple[torch.Tensor, ...]:
    mask = keep_mask(random_state, tuple(x.shape), dropout_p=p, index=index)
    return torch.where(mask, x * survivor_scale(p), 0.0), mask


@define("amp_ir.dropout", "x", "random_state", reference=_dropout)
def dropout(x: Tensor, random_state: Tensor, *, p: float, index: int) -> tuple[Tensor, ...]:
    """Zero elements with probability p: x f[...], int64[2] -> (y like x, mask bool[...]).

    The mask is True where an element stays; survivors are multiplied by 1 / (1 - p).
    """
    x.expect_float()
    check_probability("amp_ir.dropout", "p", p)
    check_state("amp_ir.dropout", random_state, x.shape, index)
    return x.with_shape(x.shape), Tensor(x.shape, "bool")


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, *, scale: float) -> torch.Tensor:
    return torch.where(mask, grad * scale, 0.0)


@define("amp_ir.dropout_backward", "grad", "mask", reference=_dropout_backward)
def dropout_backward(grad: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Return dx of dropout: grad f[...], mask bool[...] -> f[...]; `scale` is 1 / (1 - p)."""
    grad.expect_float()
    mask.expect_dtype("bool")
    mask.expect_shape(grad.shape)
    return grad.with_shape(grad.shape)
