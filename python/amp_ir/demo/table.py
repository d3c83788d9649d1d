# SPDX-License-Identifier: Apache-2.0
"""A comparison as a table for a terminal of 80 columns, and in one sentence."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.table import Table

from amp_ir.demo.comparison import COMPARED_STEPS, Comparison, Variant

_NONE = "-"


def comparison_table(comparison: Comparison) -> Table:
    """Return a table with one column per variant and one row per quantity."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for variant in comparison.variants:
        is_ours_low = variant is comparison.ours_low
        style = "bold" if is_ours_low else ""
        dtype = (
            f"{variant.dtype}"
            if variant is not comparison.torch_low
            else f"autocast {variant.dtype}"
        )
        table.add_column(f"{variant.title}\n{dtype}", justify="right", style=style, no_wrap=True)
    for label, cell in _rows(comparison):
        table.add_row(label, *(cell(variant) for variant in comparison.variants))
    return table


def _rows(comparison: Comparison) -> list[tuple[str, Callable[[Variant], str]]]:
    ours, ours_low, eager, eager_low = comparison.variants

    def own(variant: Variant) -> str:
        return _times((ours if variant in (ours, ours_low) else eager).ms / variant.ms)

    def peer(variant: Variant) -> str:
        peers = {id(ours): eager, id(ours_low): eager_low}
        other = peers.get(id(variant))
        return _times(other.ms / variant.ms) if other is not None else _NONE

    def difference(to: Variant) -> Callable[[Variant], str]:
        return lambda variant: _NONE if variant is to else f"{variant.loss_difference(to):.1e}"

    return [
        ("ms a step", lambda variant: _three_digits(variant.ms)),
        ("  speed-up over own float32", own),
        ("  speed-up over PyTorch", peer),
        # That of tiny shapes is some KiB.
        ("peak MiB", lambda one: _or_none(one.peak_mib, _peak_format(one))),
        ("casts", lambda variant: _or_none(variant.casts, "{}")),
        ("compiled kernels", lambda variant: _or_none(variant.kernels, "{}")),
        ("seconds to compile", lambda variant: _or_none(variant.compile_seconds, "{:.1f}")),
        (f"loss after {COMPARED_STEPS} steps", _last_loss),
        ("loss off PyTorch float32", difference(eager)),
        ("loss off PyTorch autocast", difference(eager_low)),
    ]


def _peak_format(variant: Variant) -> str:
    return "{:.1f}" if (variant.peak_mib or 0.0) >= 1.0 else "{:.3f}"


def summary(comparison: Comparison) -> str:
    """Return the table's result in two sentences."""
    ours, low, eager, eager_low = comparison.variants
    off, eager_off = low.loss_difference(eager), eager_low.loss_difference(eager)
    steps = min(len(variant.losses) for variant in comparison.variants)
    over = f"{steps} steps" if steps > 1 else "1 step"
    return (
        f"{low.dtype} takes {_times(low.ms / ours.ms)} the time of float32 and "
        f"{_times(low.ms / eager_low.ms)} that of PyTorch's autocast. Over {over} "
        f"its losses stay within {off:.1e} of PyTorch's float32 ones; autocast's within "
        f"{eager_off:.1e}."
    )


def footnote(comparison: Comparison) -> str:
    """Return how the numbers were measured."""
    return (
        f"ms: median of {comparison.steps} turns, the four variants one after the other in each. "
        "Peak MiB: from the memory plan, parameters, gradients and optimizer state included. "
        f"Off: the largest relative difference over {COMPARED_STEPS} steps."
        + "".join(_said_of_slow(variant) for variant in comparison.variants if variant.is_slow)
    )


def _said_of_slow(variant: Variant) -> str:
    steps = len(variant.losses)
    them, its_ms = ("step", "that step's") if steps == 1 else ("steps", "the mean of these")
    return (
        f" {variant.title} {variant.dtype} was stopped after {steps} {them} of "
        f"{variant.ms / 1e3:.0f} s: its ms is {its_ms}, and its losses are compared over {steps}."
    )


def _last_loss(variant: Variant) -> str:
    return _NONE if variant.is_slow else f"{variant.losses[-1]:.5f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def _three_digits(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.3f}"


def _or_none(value: float | None, form: str) -> str:
    return _NONE if value is None else form.format(value)
