# SPDX-License-Identifier: Apache-2.0
"""The place of benchmark results, and the description of the machine in them."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import Any

import torch

import amp_ir
from amp_ir.host.peak_rates import measure_peaks
from amp_ir.vm.build import host_description

RESULTS = Path(__file__).parent / "results"


def add_results_option(parser: argparse.ArgumentParser) -> None:
    """Add `--results`, the folder to save to; it is made before anything is measured."""
    parser.add_argument("--results", type=_folder, default=RESULTS, help="folder to save to")


def _folder(text: str) -> Path:
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot be made: {error}") from None
    return folder


def describe_machine() -> dict[str, Any]:
    """Return the description of the machine."""
    return {
        "cpu": host_description(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "torch": torch.__version__,
        "amp_ir": amp_ir.__version__,
        "peaks": str(measure_peaks()),
    }
