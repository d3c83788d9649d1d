# SPDX-License-Identifier: Apache-2.0
"""The check of a path that a user passes."""

from __future__ import annotations

import os
from typing import Any

from amp_ir.errors import ArgumentError


def check_path(path: Any) -> None:
    """Refuse what names no file; a number would be a file that the process has open.

    Raises:
        ArgumentError: it is neither a str nor an os.PathLike.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(
            f"path is a {type(path).__name__}; expected the name of a file, a str or a pathlib.Path"
        )
