# SPDX-License-Identifier: Apache-2.0
"""The `amp-ir` command.

    amp-ir demo bert1 [--amp-dtype bfloat16] [--device cpu] [--steps 10] [--small]
    amp-ir examine bert1|train.py [--json examination.json] [--issue issue.md]
    amp-ir explain bert1|train.py [--module "*.attention"] [--amp-dtype bfloat16] [--html plan.html]
    amp-ir profile bert1|train.py [--device cpu] [--amp-dtype bfloat16] [--trace trace.json]
                                  [--json profile.json]
    amp-ir report bert1|train.py [--device cpu] [--amp-dtype bfloat16] [--out report.html]
    amp-ir compile bert1|train.py [--target sm_90] [--amp-dtype bfloat16] [--out step.so]
                                  [--state state.npz] [--libraries cublaslt] [--dump-ir DIR]
    amp-ir verify bert1|train.py [--amp-dtype bfloat16] [--seeds 3] [--max-ratio 1.5]
                                 [--json FILE] [--html FILE]
    amp-ir errors bert1|train.py [--amp-dtype bfloat16] [--seconds 60] [--json FILE] [--html FILE]
    amp-ir advise bert1|train.py [--gpu H100] [--amp-dtype bfloat16] [--tf32] [--json FILE]
    amp-ir search bert1|train.py --max-error 5e-3 [--amp-dtype bfloat16] [--objective memory]
                                 [--seconds 300] [--out plan.json] [--json FILE]
    amp-ir plan save bert1|train.py [--out plan.json]
    amp-ir plan diff old.json new.json [--fail-on-change]
    amp-ir plan --ranks 1024 --bandwidth 25GB/s [--latency 5us] [--shard optimizer] bert1|train.py
    amp-ir doctor [--json doctor.json]
    amp-ir cache info|clear|export FILE|import FILE

A train.py's own command line follows `--`: amp-ir examine train.py -- --lr 0.1

Exit codes: 0; 1 where a check fails; 2 for a wrong use or a step that is refused, with a sentence
on stderr; 130 when interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import amp_ir
from amp_ir import errors
from amp_ir.commands import SUMMARIES

WRONG_USE = 2
INTERRUPTED = 130
# Options that name a file to write.
_OUTPUTS = ("json", "html", "graph", "out", "issue", "trace", "state")
# What the numbers of options have to be, where a type alone does not say it.
_NUMBERS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "steps": (lambda count: count >= 1, "a whole number of at least 1"),
    "seconds": (lambda spent: spent >= 0, "a number of seconds, 0 or more"),
    "errors": (lambda spent: spent >= 0, "a number of seconds, 0 or more"),
    "max_error": (lambda error: 0 < error < 1, "a relative error between 0 and 1, such as 5e-3"),
    "max_ratio": (lambda ratio: ratio > 0, "a number above 0"),
    "bucket_cap_mb": (lambda size: size > 0, "a number of MiB above 0"),
}
# Commands in a module of another name.
_MODULES = {"profile": "measure", "report": "measure"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # The training file's own command line, which may have options of the same names.
    end = words.index("--") if "--" in words else len(words)
    parser = _parser(words[:end])
    arguments = parser.parse_args(words[:end])
    arguments.of_file = words[end + 1 :]
    if arguments.of_file and not hasattr(arguments, "training"):
        parser.error(f"{arguments.command} takes no file whose arguments could follow --")
    try:
        _check_outputs(arguments)
        _check_numbers(arguments)
        return int(arguments.run(arguments))
    except _wrong_uses() as error:
        print(f"amp-ir {arguments.command}: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; only the command that `argv` names has arguments, and is imported."""
    parser = _Parser(prog="amp-ir", description="A mixed-precision training compiler for PyTorch.")
    parser.add_argument("--version", action="version", version=f"amp_ir {amp_ir.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    named = next((one for one in argv if not one.startswith("-")), None)
    for name, summary in SUMMARIES.items():
        if name == named:
            adds = _form_of(name, argv)
            module = importlib.import_module(f"amp_ir.commands.{_MODULES.get(adds, adds)}")
            getattr(module, f"add_{adds}")(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose commands refuse what they do not know themselves, with their own usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all of it, or say what is not known, and how a training file gets it."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            text, file = " ".join(unknown), getattr(found, "training", "")
            hint = f"; what {file} reads itself follows --: {self.prog} {file} -- {text}"
            is_for_file = file.endswith(".py") and unknown[0].startswith("-")
            self.error(f"unrecognized arguments: {text}{hint if is_for_file else ''}")
        return found, unknown


def _form_of(name: str, argv: Sequence[str]) -> str:
    """Return which form of a command is meant: `plan --ranks` has no actions."""
    has_ranks = any(one.partition("=")[0] == "--ranks" for one in argv)
    return "plan_ranks" if name == "plan" and has_ranks else name


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse a file to write that cannot be one, before minutes of work for it."""
    for name in _OUTPUTS:
        file = getattr(arguments, name, None)
        if file is not None and not file.parent.is_dir():
            raise errors.OptionError(f"--{name}={file}: there is no such folder; make it")
        if file is not None and file.is_dir():
            raise errors.OptionError(f"--{name}={file} is a folder; name a file in it")


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse numbers that an option cannot have, before a step is captured and compiled."""
    given = {name: getattr(arguments, name, None) for name in _NUMBERS}
    wrong = [
        f"--{name.replace('_', '-')}={value}; expected {_NUMBERS[name][1]}"
        for name, value in given.items()
        if value is not None and not _NUMBERS[name][0](value)
    ]
    if wrong:
        raise errors.OptionError("; ".join(wrong))


def _wrong_uses() -> tuple[type[Exception], ...]:
    """Return the errors that a sentence is enough for; asked for when something was raised.

    All that amp_ir raises on purpose: a step that is refused is no check that fails.
    """
    from amp_ir.demo.workloads import MissingPackage

    return errors.AmpIrError, MissingPackage
