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
    amp-ir plan save bert1|train.py [--out plan.json]
    amp-ir plan diff old.json new.json [--fail-on-change]
    amp-ir doctor [--json doctor.json]
    amp-ir cache info|clear|export FILE|import FILE

Exit codes: 0; 1 where a check fails; 2 for a wrong use, with a sentence on stderr; 130 when
interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import amp_ir
from amp_ir.commands.compile import add_compile
from amp_ir.commands.demo import add_demo
from amp_ir.commands.doctor import add_doctor
from amp_ir.commands.errors import add_errors
from amp_ir.commands.examine import add_examine
from amp_ir.commands.explain import add_explain
from amp_ir.commands.measure import add_profile, add_report
from amp_ir.commands.plan import add_plan
from amp_ir.commands.verify import add_verify
from amp_ir.compile_cache.commands import add_cache_arguments, manage_cache
from amp_ir.demo.workloads import MissingPackage

WRONG_USE = 2
INTERRUPTED = 130
_WRONG_USES = (
    amp_ir.errors.OptionError,
    amp_ir.errors.DeviceError,
    amp_ir.errors.BuildError,
    amp_ir.errors.FileFormatError,
    MissingPackage,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except _WRONG_USES as error:
        print(f"amp-ir {arguments.command}: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="amp-ir", description="A mixed-precision training compiler for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"amp_ir {amp_ir.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        add_demo,
        add_examine,
        add_explain,
        add_profile,
        add_report,
        add_compile,
        add_verify,
        add_errors,
        add_plan,
        add_doctor,
    ):
        add(commands)
    cache = commands.add_parser(
        "cache", help="look at the steps that are kept for later starts, remove or move them"
    )
    add_cache_arguments(cache)
    cache.set_defaults(run=manage_cache)
    return parser
