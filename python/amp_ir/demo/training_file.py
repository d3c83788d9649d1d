# SPDX-License-Identifier: Apache-2.0
"""A training of the user's own, from a Python file that names its parts."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from amp_ir.errors import OptionError

_NEEDED = {
    "step": "the function to capture",
    "batch": "the tuple of its arguments",
    "model": "a module or a list of them",
}
_SEE = "`amp-ir examine --help` shows a file that the commands take"


@attrs.frozen
class TrainingFile:
    """The names that a user's file defines, as `amp_ir.trace_step` takes them."""

    name: str
    step: Callable[..., Any]
    batch: tuple[Any, ...]
    model: torch.nn.Module | list[torch.nn.Module]
    optimizer: Any = None
    scaler: Any = None
    batches: Sequence[tuple[Any, ...]] = ()


def load_training(path: Path) -> TrainingFile:
    """Run a file and return its `step`, `batch` and `model`, and what else it names.

    That is `optimizer`, `scaler`, and `batches`, a list of more batches.

    The file runs as a module of another name than "__main__", so a training loop below
    `if __name__ == "__main__":` does not run.

    Raises:
        OptionError: there is no such file, or it does not define a required name.
    """
    if not path.is_file():
        raise OptionError(f"{path} is neither a workload nor a file; {_SEE}")
    names = runpy.run_path(str(path))
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        wanted = ", ".join(f"`{name}` ({_NEEDED[name]})" for name in missing)
        raise OptionError(f"{path} does not define {wanted}; define them at its top level: {_SEE}")
    batch = names["batch"]
    if not isinstance(batch, tuple):
        raise OptionError(
            f"`batch` in {path} is a {type(batch).__name__}; expected the tuple of the arguments "
            "of `step`: (x, y), or (batch,) for a single one"
        )
    return TrainingFile(
        path.name,
        names["step"],
        batch,
        names["model"],
        names.get("optimizer"),
        names.get("scaler"),
        names.get("batches", ()),
    )
