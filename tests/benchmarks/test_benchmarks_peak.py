# SPDX-License-Identifier: Apache-2.0
"""A measured peak is what a step takes, whatever ran before it, or no number at all."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from benchmarks import step_row
from benchmarks.peak import PeakError, check_peak, measured_peak
from benchmarks.step_row import Asked, measure
from benchmarks.step_table import footnotes

MEBIBYTE = 2**20
# A process in which the C library holds 496 MiB that others have used, in one piece: compilation
# takes some of it, and the arena is to fit into the rest.
AFTER_OTHERS = """
    import sys
    import torch
    import amp_ir
    from amp_ir.demo.workloads import Training
    from benchmarks.peak import captured, peak_of_ours
    from benchmarks.resident import measured_bytes, tensors_of

    def training():
        first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        model = torch.nn.Sequential(first, torch.nn.GELU(), second)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = (torch.ones(3 << 14, 64),)
        return Training(model, optimizer, lambda x: model(x).square().mean(), batch)

    def used(count):
        # What was freed once is not mapped by itself again (mallopt(3), M_MMAP_THRESHOLD). The last
        # block stays, so that those before it stay with the process, too.
        torch.ones(16 * 2**20, dtype=torch.uint8)
        return [torch.ones(16 * 2**20, dtype=torch.uint8) for _ in range(count)][-1]

    one = training()
    kept = used(32)
    if sys.argv[1] == "ours":
        print(peak_of_ours(one, "float32"))
    else:
        train = amp_ir.compile(captured(one, "float32"))
        train.module.hooks.install_state()
        known = list(tensors_of(one, with_optimizer=True))
        print(train.report.plan.peak_bytes, train.report.plan.arena_bytes)
        print(measured_bytes(lambda: train(*one.batch), known))
"""


def numbers_of(way: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AFTER_OTHERS), way], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_that_was_used_before_counts() -> None:
    """An arena that was cut from it, as steps have it, is resident before the step touches it."""
    peak, arena, before = numbers_of("compiled")
    assert arena > 32 * MEBIBYTE
    if before > peak - arena / 2:
        pytest.skip("the arena was not cut from used memory, so that nothing can be seen here")
    (measured,) = numbers_of("ours")
    assert measured == pytest.approx(peak, rel=0.05)


def test_a_peak_below_the_plan_is_refused() -> None:
    plan = 100 * MEBIBYTE
    check_peak(98 * MEBIBYTE, plan)
    check_peak(plan // 50, 2 * MEBIBYTE)  # tiny tensors lie in pages that are there
    with pytest.raises(PeakError, match=r"measured 97\.9 MiB, below the 100\.0 MiB of the plan"):
        check_peak(int(97.9 * MEBIBYTE), plan)


def test_the_process_of_a_peak_says_why_it_failed() -> None:
    with pytest.raises(PeakError, match=r"the peak of eager was not measured: .*'no_dtype'"):
        measured_peak("smallmlp", "no_dtype", "eager", small=True)


def test_a_refused_peak_costs_its_number_and_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(workload: str, dtype: str, variant: str, layout: str, *, small: bool) -> int:
        if variant == "ours":
            raise PeakError("measured 1.0 MiB, below the plan")
        return 7 * MEBIBYTE

    monkeypatch.setattr(step_row, "measured_peak", refused)
    asked = Asked(frozenset({"peak"}), rounds=1, small=True)
    row = measure("smallmlp", "float32", asked, lambda _: None)
    assert row.measured_mib == {"eager": 7.0}
    assert row.failed == {"peak of ours": "measured 1.0 MiB, below the plan"}
    assert "smallmlp float32: peak of ours failed: measured 1.0 MiB, below the plan" in footnotes(
        [row]
    )
