# SPDX-License-Identifier: Apache-2.0
"""The versions of PyTorch that amp_ir works with; importing this file refuses any other."""

from __future__ import annotations

import re

import torch

from amp_ir.errors import VersionError
from amp_ir.version import VERSION

# As in pyproject.toml; pip can be told to pass over that.
OLDEST = (2, 11)
NEWEST = (2, 13)


def check(version: str) -> None:
    """Raise VersionError unless a version of PyTorch such as "2.13.0+cpu" is one that works.

    A pre-release counts as the release that it precedes.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return
    oldest, newest, beyond = (
        f"{major}.{minor}" for major, minor in (OLDEST, NEWEST, (NEWEST[0], NEWEST[1] + 1))
    )
    raise VersionError(
        f"amp_ir {VERSION} works with PyTorch {oldest} to {newest}, and {torch.__file__} is "
        f"{version}; the capture and the kernels call functions of PyTorch that change between "
        f"versions, so another one could train wrongly without a word; install one of these: "
        f"pip install 'torch>={oldest},<{beyond}'"
    )


check(torch.__version__)
