# SPDX-License-Identifier: Apache-2.0
"""The training that a command works on: a workload, or a file of the user's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import amp_ir
from amp_ir.demo.comparison import Report
from amp_ir.demo.training_file import load_training
from amp_ir.demo.workloads import WORKLOADS

EXAMPLE_FILE = """\
a train.py defines its parts at the top level, and trains below `if __name__ == "__main__":`:
  model = ...                      # a module, or a list of them
  optimizer = ...                  # none for a forward pass; scaler = ... if it has one
  batch = (inputs, targets)        # an example of what step is called with
  def step(inputs, targets): ...   # forward, backward, optimizer.step()
  batches = [...]                  # more batches, where a command takes several
"""


def add_command(
    commands: Any,
    name: str,
    text: str,
    *examples: str,
    has_training: bool = True,
    within: str = "",
) -> argparse.ArgumentParser:
    """Add a command with examples in its help, and the argument that says what to train.

    `within` is the command that it is an action of.
    """
    whole = f"amp-ir {within} {name}" if within else f"amp-ir {name}"
    shown = "examples:\n" + "\n".join(f"  {whole} {one}" for one in examples)
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"{shown}\n\n{EXAMPLE_FILE}" if has_training else shown,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if has_training:
        parser.add_argument(
            "training",
            metavar="WORKLOAD|FILE",
            help=f"{', '.join(WORKLOADS)}; or a .py file of yours",
        )
        parser.add_argument("--small", action="store_true", help="tiny shapes (workloads only)")
    return parser


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the argument that selects the low dtype."""
    parser.add_argument(
        "--amp-dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16"
    )


def training_of(arguments: argparse.Namespace, report: Report) -> Any:
    """Return the training on the command line."""
    name = arguments.training
    report("building", name)
    if name in WORKLOADS:
        device = getattr(arguments, "device", "cpu")
        return WORKLOADS[name].make(small=arguments.small, device=device)
    return load_training(Path(name))


def traced(training: Any) -> tuple[amp_ir.StepModule, tuple[Any, ...]]:
    """Capture a training's step."""
    return amp_ir.trace_step(training.step, training.batch, **owners(training))


def owners(training: Any) -> dict[str, Any]:
    """Return the model, the optimizer and the scaler as `trace_step` takes them."""
    scaler = getattr(training, "scaler", None)
    return {"model": training.model, "optimizer": training.optimizer, "scaler": scaler}
