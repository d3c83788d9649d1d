# SPDX-License-Identifier: Apache-2.0
"""Describes the machine that the suite runs on, before anything of it may fail."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from amp_ir.files.atomic_file import write_text

_QUERY = "name,driver_version,memory.total,clocks.max.sm,power.limit"


def describe() -> dict[str, Any]:
    """Return the versions, and what the driver says of the GPUs."""
    query = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        gpus = [f"nvidia-smi: {error}"]
    return {
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    text = json.dumps(describe(), indent=2)
    write_text(Path(sys.argv[1]), text + "\n")
    print(text)
