# SPDX-License-Identifier: Apache-2.0
"""The process that measures: reads "NAME DTYPE" a line, answers each with a row as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings

import attrs
import torch


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print is not an answer
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    from benchmarks.programs.listed import PROGRAMS  # noqa: PLC0415 - after the settings
    from benchmarks.programs.measure import measure  # noqa: PLC0415

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        name, dtype = line.strip().rsplit(" ", 1)
        print(json.dumps(attrs.asdict(measure(PROGRAMS[name], dtype))), file=answers, flush=True)


if __name__ == "__main__":
    main()
