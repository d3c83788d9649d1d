# SPDX-License-Identifier: Apache-2.0
"""`amp-ir verify`: its arguments and output."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from amp_ir.demo.training_file import load_training
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.errors import OptionError
from amp_ir.files.atomic_file import write_text
from amp_ir.verification.outcome import relative_error
from amp_ir.verification.recorded_step import Owners
from amp_ir.verification.verification import Verification, join
from amp_ir.verification.verify import verify


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `amp-ir verify` that say how to compare."""
    parser.add_argument(
        "--seeds", type=_at_least_one, default=1, metavar="N",
        help="draws of weights and batch: a file runs once for each, after torch.manual_seed",
    )  # fmt: skip
    parser.add_argument(
        "--max-ratio", type=float, default=1.5, metavar="R",
        help="fail above R times torch.autocast's gradient error, eager's in float32 "
        "(default 1.5)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, for programs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="everything, as one page")


def run_verify(arguments: argparse.Namespace, casts: Mapping[str, Any]) -> int:
    """Verify the training on the command line, with these options of `verify`; 0 or 1."""
    found = join(list(_verifications(arguments, casts)))
    print(found)
    for file, text in ((arguments.json, found.to_json), (arguments.html, found.to_html)):
        if file is not None:
            write_text(file, text())
            print(f"wrote {file}")
    return 0 if found.is_good else 1


def _verifications(
    arguments: argparse.Namespace, casts: Mapping[str, Any]
) -> Iterator[Verification]:
    first: dict[str, torch.Tensor] = {}
    for seed in range(arguments.seeds):
        training = _made(arguments)(seed)
        parameters = Owners.of(training.model, None).parameters()
        if first and relative_error(parameters, first) == 0.0:
            print(f"{arguments.training} sets its own seed, so there is one draw")
            return
        first = first or {name: one.detach().clone() for name, one in parameters.items()}
        yield verify(
            training.step,
            training.batch,
            model=training.model,
            optimizer=training.optimizer,
            scaler=getattr(training, "scaler", None),
            **casts,
            max_ratio=arguments.max_ratio,
            check=seed == 0,
        )


def _made(arguments: argparse.Namespace) -> Callable[[int], Any]:
    name = arguments.training
    if name in WORKLOADS:
        return lambda seed: WORKLOADS[name].make(small=arguments.small, seed=seed)
    if arguments.small:
        raise OptionError("--small is for workloads; a file of yours has its own shapes")

    def load(seed: int) -> Any:
        torch.manual_seed(seed)
        return load_training(Path(name), arguments.of_file)

    return load


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of draws; expected 1 or more")
    return int(text)
