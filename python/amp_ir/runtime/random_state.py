# SPDX-License-Identifier: Apache-2.0
"""The random state of torch, Python and NumPy, in types that `torch.load` trusts."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch

_PYTHON_VERSION, _PYTHON_WORDS = 3, 625
_NUMPY_NAME, _NUMPY_WORDS = "MT19937", 624


def random_state() -> dict[str, Any]:
    """Return the state of every generator that a data loader or a step may draw from."""
    numpys: Any = numpy.random.get_state()
    name, keys, *rest = numpys
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype("int64")), *rest),
    }


def random_state_errors(state: Any) -> Iterator[str]:
    """Yield what keeps `set_random_state` from taking a state."""
    if not isinstance(state, Mapping):
        yield f"the random state is a {type(state).__name__}, expected a dictionary"
        return
    checks = {
        "torch": lambda one: _is_generator(one) and one.shape == torch.get_rng_state().shape,
        "cuda": lambda one: isinstance(one, list) and all(map(_is_generator, one)),
        "python": _is_of_python,
        "numpy": _is_of_numpy,
    }
    for name, is_right in checks.items():
        if name not in state:
            yield f"the random state of {name} is missing"
        elif not is_right(state[name]):
            yield f"the random state of {name} is of another form than this version's"


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set every generator; skip those of GPUs that this machine does not have."""
    torch.set_rng_state(state["torch"])
    _set_cuda(state["cuda"])
    version, words, following = state["python"]
    random.setstate((version, tuple(words), following))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


def _set_cuda(states: list[torch.Tensor]) -> None:
    if not states:
        return
    count = torch.cuda.device_count()
    if count != len(states):
        warnings.warn(
            f"the checkpoint has the random state of {len(states)} GPUs and this machine has "
            f"{count}; random numbers that are drawn on the others differ from here on",
            stacklevel=4,
        )
    for number, one in enumerate(states[:count]):
        torch.cuda.set_rng_state(one, number)


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.uint8 and value.dim() == 1


def _is_of_python(value: Any) -> bool:
    if not (isinstance(value, tuple | list) and len(value) == 3 and value[0] == _PYTHON_VERSION):
        return False
    words, following = value[1:]
    return (
        isinstance(words, tuple | list)
        and len(words) == _PYTHON_WORDS
        and all(type(word) is int and 0 <= word < 2**32 for word in words[:-1])
        and type(words[-1]) is int
        and 0 <= words[-1] < _PYTHON_WORDS
        and (following is None or isinstance(following, float))
    )


def _is_of_numpy(value: Any) -> bool:
    if not (isinstance(value, tuple | list) and len(value) == 5 and value[0] == _NUMPY_NAME):
        return False
    keys, position, has_gauss, gauss = value[1:]
    return (
        isinstance(keys, torch.Tensor)
        and keys.dtype is torch.int64
        and keys.shape == (_NUMPY_WORDS,)
        and bool(((keys >= 0) & (keys < 2**32)).all())
        and type(position) is int
        and 0 <= position <= _NUMPY_WORDS
        and has_gauss in (0, 1)
        and isinstance(gauss, float)
    )
