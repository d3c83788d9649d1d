# SPDX-License-Identifier: Apache-2.0
"""PyTorch ops of our own, which a captured graph has in the place of what a user wrote."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def define_op(
    schema: str,
    kernel: Callable[..., Any],
    types: Callable[..., Any],
    *,
    namespace: str = "amp_ir",
) -> None:
    """Define an op by its schema; `types` returns empty tensors like the results of `kernel`.

    Fake tensors run `types` as the kernel for meta tensors. `register_fake` would do the same, but
    first looks for the source of who calls it in all modules of the process, some thousand.
    """
    library, name = _library(namespace), schema.partition("(")[0]
    library.define(schema)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    library.impl(name, types, "Meta")


@functools.cache
def _library(namespace: str) -> torch.library.Library:
    """Return the library of a namespace; its ops are there as long as it is."""
    return torch.library.Library(namespace, "FRAGMENT")
