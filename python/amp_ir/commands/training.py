# SPDX-License-Identifier: Apache-2.0
"""The training that a command works on: a workload, or a file of the user's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import amp_ir
from amp_ir.amp.hints import FULL_DTYPE
from amp_ir.amp.policies import POLICIES
from amp_ir.demo.comparison import Report
from amp_ir.demo.training_file import load_training
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.errors import OptionError

# What an override may say on a command line.
_WORDS = ("module", "op", "parameter", "phase", "to")
EXAMPLE_FILE = """\
a train.py defines its parts at the top level, and trains below `if __name__ == "__main__":`:
  model = ...                      # a module, or a list of them
  optimizer = ...                  # none for a forward pass; scaler = ... if it has one
  batch = (inputs, targets)        # an example of what step is called with
  def step(inputs, targets): ...   # forward, backward, optimizer.step()
  batches = [...]                  # more batches, where a command takes several
or it makes them in main(), and calls amp_ir.jit(step, model=..., optimizer=...): then it runs as a
script until the first call of that step, which gives step, model, optimizer and batch
what follows -- is the command line of the file: amp-ir examine train.py -- --lr 0.1
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


def add_casts(parser: argparse.ArgumentParser, *, low_only: bool = False) -> None:
    """Add the arguments that say where low precision is used; `casts_of` reads them."""
    if low_only:
        parser.add_argument("--amp-dtype", choices=("bfloat16", "float16"), default="bfloat16")
    else:
        add_dtype(parser)
    parser.add_argument(
        "--policy", choices=sorted(POLICIES), default="default", help="the rules to begin with"
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="SELECTOR",
        help='what is to have another dtype, such as "module=head,op=relax.matmul,to=float32", '
        "with the words of amp_ir.Override; may be given again, and the last that fits decides",
    )


def casts_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `autocast` on the command line.

    Raises:
        OptionError: an override is not such words.
    """
    if arguments.override and arguments.amp_dtype == FULL_DTYPE:
        raise OptionError("--override changes nothing with --amp-dtype float32; leave one out")
    return {
        "amp_dtype": arguments.amp_dtype,
        "policy": arguments.policy,
        "overrides": [_override(text) for text in arguments.override],
    }


def _override(text: str) -> amp_ir.Override:
    pairs = [one.partition("=") for one in text.split(",")]
    words: dict[str, Any] = {name.strip(): value.strip() for name, _, value in pairs}
    wrong = sorted(set(words) - set(_WORDS))
    if wrong or "to" not in words or not all(is_pair for _, is_pair, _ in pairs):
        raise OptionError(
            f"--override {text!r} is no selector; expected some of {', '.join(_WORDS[:-1])}, "
            'and to, such as "module=encoder.*,op=relax.matmul,to=float32"'
        )
    return amp_ir.Override(**words)


def training_of(arguments: argparse.Namespace, report: Report) -> Any:
    """Return the training on the command line."""
    name = arguments.training
    report("building", name)
    if name in WORKLOADS:
        device = getattr(arguments, "device", "cpu")
        return WORKLOADS[name].make(small=arguments.small, device=device)
    return load_training(Path(name), arguments.of_file)


def traced(training: Any) -> tuple[amp_ir.StepModule, tuple[Any, ...]]:
    """Capture a training's step."""
    return amp_ir.trace_step(training.step, training.batch, **owners(training))


def owners(training: Any) -> dict[str, Any]:
    """Return the model, the optimizer and the scaler as `trace_step` takes them."""
    scaler = getattr(training, "scaler", None)
    return {"model": training.model, "optimizer": training.optimizer, "scaler": scaler}
