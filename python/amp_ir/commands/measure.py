# SPDX-License-Identifier: Apache-2.0
"""`amp-ir profile` and `amp-ir report`: a step's kernels and memory, as a table or as a page."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import attrs
import torch

import amp_ir
from amp_ir.amp.hints import FULL_DTYPE
from amp_ir.commands import SUMMARIES
from amp_ir.commands.training import add_casts, add_command, casts_of, owners, traced, training_of
from amp_ir.demo.peer_times import peer_times
from amp_ir.demo.stage_progress import stages
from amp_ir.host.machine_load import load_warning
from amp_ir.ir.target import target_of
from amp_ir.report.commands import (
    add_profile_arguments,
    add_report_arguments,
    show_profile,
    write_report,
)
from amp_ir.vm.build import host_description


def add_profile(commands: Any) -> None:
    """Add the command `profile`."""
    parser = add_command(
        commands,
        "profile",
        SUMMARIES["profile"],
        "bert1 --amp-dtype bfloat16",
        "train.py --json profile.json --trace trace.json",
    )
    add_casts(parser)
    add_profile_arguments(parser)
    parser.set_defaults(run=_profile)


def add_report(commands: Any) -> None:
    """Add the command `report`."""
    parser = add_command(
        commands,
        "report",
        SUMMARIES["report"],
        "bert1 --out report.html",
        "train.py --amp-dtype bfloat16",
    )
    add_casts(parser)
    add_report_arguments(parser)
    parser.set_defaults(run=_report)


def _profile(arguments: argparse.Namespace) -> int:
    measured = _measure(arguments)
    return show_profile(measured.profile, measured.memory, arguments, peers=measured.peers)


def _report(arguments: argparse.Namespace) -> int:
    measured = _measure(arguments)
    return write_report(
        f"{measured.name} in {arguments.amp_dtype}",
        measured.profile,
        measured.memory,
        measured.plan,
        machine=_machine(arguments.device),
        out=arguments.out,
        peers=measured.peers,
        errors=measured.errors,
        doubt=measured.doubt,
    )


@attrs.frozen
class _Measured:
    name: str
    memory: amp_ir.MemoryReport
    profile: amp_ir.KernelProfile
    plan: amp_ir.CastPlan | None
    peers: dict[str, float]
    errors: amp_ir.ErrorReport | None
    doubt: str


def _measure(arguments: argparse.Namespace) -> _Measured:
    """Measure memory and time of the training on the command line, beside its float32 step."""
    # Checked before anything that takes long.
    target, casts = target_of(arguments.device), casts_of(arguments)
    with stages() as report:
        training = training_of(arguments, report)
        report("capturing the step")
        mod, args = traced(training)
        low, plan = mod, None
        if arguments.amp_dtype != FULL_DTYPE:
            report("choosing casts")
            low = amp_ir.autocast(mod, args, **casts)
            plan = amp_ir.explain_plan(low)
        report("planning memory")
        baseline = mod if plan is not None else None
        memory = amp_ir.memory_report(low, args, baseline=baseline, device=str(target))
        report("compiling and timing")
        profile = amp_ir.profile_kernels(low, arguments.device, args, steps=arguments.steps)
        peers: dict[str, float] = {}
        if not arguments.no_peers:
            report("timing float32 and PyTorch beside it")
            peers = _peers(training, mod, low, casts, arguments)
        errors = None
        if plan is not None and getattr(arguments, "errors", 0.0) > 0.0:
            report("rounding ops one after the other")
            errors = amp_ir.error_report(
                training.step,
                training.batch,
                **casts,
                seconds=arguments.errors,
                **owners(training),
            )
    warning = load_warning()
    if warning:
        print(warning, file=sys.stderr)
    name = Path(arguments.training).name
    return _Measured(name, memory, profile, plan, peers, errors, warning)


def _peers(
    training: Any, full: Any, low: Any, casts: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, float]:
    """Return `peer_times`; none, with a note, where the steps do not run beside each other."""
    times = functools.partial(
        peer_times,
        training,
        device=arguments.device,
        amp_dtype=arguments.amp_dtype,
        turns=arguments.steps,
    )
    try:
        try:
            return times(full, low)
        except amp_ir.errors.StateError:
            # PyTorch's first step changed what the capture read, as a Hugging Face model that
            # writes the kind of its problem into its configuration.
            full, args = traced(training)
            is_low = arguments.amp_dtype != FULL_DTYPE
            return times(full, amp_ir.autocast(full, args, **casts) if is_low else full)
    except amp_ir.errors.AmpIrError as error:
        # It changes at every step.
        print(f"no times beside PyTorch: {error}", file=sys.stderr)
        return {}


def _machine(device: str) -> str:
    return host_description() if device == "cpu" else torch.cuda.get_device_name(device)
