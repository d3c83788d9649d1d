# SPDX-License-Identifier: Apache-2.0
"""`amp-ir plan`: cast plans in files, saved and compared, for continuous integration.

`amp-ir plan --ranks` is in plan_ranks.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import amp_ir
from amp_ir.commands import SUMMARIES
from amp_ir.commands.training import add_casts, add_command, casts_of, traced, training_of
from amp_ir.demo.stage_progress import stages
from amp_ir.errors import OptionError

CHANGED = 1


def add_plan(commands: Any) -> None:
    """Add the command with its two actions."""
    parser = add_command(
        commands,
        "plan",
        SUMMARIES["plan"],
        "save train.py --out new.json",
        "diff old.json new.json --fail-on-change",
        "--ranks 1024 --bandwidth 25GB/s train.py",
        "--ranks 1024 --help",
        has_training=False,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="save|diff")
    save = add_command(
        actions,
        "save",
        "write the cast plan of a step",
        "train.py --out new.json",
        'train.py --policy conservative --override "module=head,to=low"',
        within="plan",
    )
    add_casts(save, low_only=True)
    save.add_argument(
        "--out", type=Path, default=Path("plan.json"), metavar="FILE", help="the file to write"
    )
    save.set_defaults(run=_save)
    diff = actions.add_parser("diff", help="compare two plans: their ops, dtypes and casts")
    diff.add_argument("old", type=Path, metavar="OLD.json")
    diff.add_argument("new", type=Path, metavar="NEW.json")
    diff.add_argument(
        "--fail-on-change", action="store_true", help="exit with 1 if there is a difference"
    )
    diff.set_defaults(run=_diff)


def _save(arguments: argparse.Namespace) -> int:
    casts = casts_of(arguments)
    with stages() as report:
        training = training_of(arguments, report)
        report("capturing the step")
        mod, args = traced(training)
        report("choosing casts")
        plan = amp_ir.autocast(mod, args, **casts).plan
    plan.save(arguments.out)
    print(f"wrote {arguments.out}: {len(plan.ops)} ops, {len(plan.casts)} casts")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    for path in (arguments.old, arguments.new):
        if not path.is_file():
            there = (
                f"{path} is a folder and no plan" if path.is_dir() else f"there is no plan {path}"
            )
            raise OptionError(f"{there}; amp-ir plan save or plan.save writes one")
    found = amp_ir.CastPlan.load(arguments.old).diff(amp_ir.CastPlan.load(arguments.new))
    print(found or "the plans decide the same")
    return CHANGED if found and arguments.fail_on_change else 0
