# SPDX-License-Identifier: Apache-2.0
"""What each rank sees when another has another program, dies, fails or comes late: no hang.

A rank that hangs fails its test by the limit of `rank_processes.ranks`.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_ir
from amp_ir import errors
from amp_ir.distributed import meeting
from amp_ir.distributed.exchange import Exchange
from amp_ir.distributed.process_group import Group
from data_parallel import Training, mlp
from rank_errors import DIFFERENT, NOT_AGAIN, SAME, TOGETHER, plain
from rank_processes import DIED, ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]
BATCH = torch.linspace(-1, 1, 8 * 16).view(8, 16), torch.arange(8) % 4


@attrs.frozen
class Told:
    """What one rank saw: the error, whether anything changed, and what was logged of waiting."""

    error: str
    is_unchanged: bool
    log: tuple[str, ...] = ()


def training(model: nn.Module, **options: Any) -> tuple[Training, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer, data_parallel=True, **options)
    return Training([model], [optimizer], step), train


def told(one: Training, act: Callable[[], Any]) -> Told:
    """Call `act`, and say what came of it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("amp_ir")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    before = one.digest()
    try:
        act()
        found = "nothing"
    except errors.AmpIrError as error:
        found = f"{type(error).__name__}: {error}"
    waits = tuple(line for line in lines if "waited" in line)
    return Told(found, one.digest() == before, waits)


def say_soon() -> None:
    meeting.LOOK_SECONDS = meeting.SAY_SECONDS = 0.5


def test_another_model_on_one_rank_is_told_on_every_rank(tmp_path: Path) -> None:
    def program(rank: int) -> Told:
        torch.manual_seed(rank)
        width = 48 if rank == 1 else 64
        one, train = training(nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4)))
        return told(one, lambda: train(*BATCH))

    found = ranks(program, tmp_path, 3)
    assert {one.error for one in found} == {
        f"{DIFFERENT}: on rank 1, tensor of the state 1 is 0.weight float32[48, 16], and on rank 0 "
        f"0.weight float32[64, 16]. Nothing has changed. {SAME}"
    }
    # Not even rank 0's values were sent.
    assert all(one.is_unchanged for one in found)


def test_the_first_different_op_is_named(tmp_path: Path) -> None:
    def program(rank: int) -> Told:
        model = nn.Sequential(nn.Linear(16, 8), nn.GELU() if rank else nn.ReLU(), nn.Linear(8, 4))
        one, train = training(model)
        return told(one, lambda: train(*BATCH))

    found = ranks(program, tmp_path)
    assert all(one.is_unchanged for one in found)
    assert {one.error for one in found} == {
        f"{DIFFERENT}: on rank 1, op 4 is relax.nn.gelu float32[8, 8] of 1 (forward), and on rank "
        f"0 relax.nn.relu float32[8, 8] of 1 (forward). Nothing has changed. {SAME}"
    }


def test_buckets_of_another_size_on_one_rank_are_told_on_every_rank(tmp_path: Path) -> None:
    def program(rank: int) -> Told:
        one, train = training(mlp(), bucket_cap_mb=0.001 if rank else None)
        # Ops are not compared for batches of other shapes.
        return told(one, lambda: train(*(part[: 8 - rank] for part in BATCH)))

    found = ranks(program, tmp_path)
    assert all(one.is_unchanged for one in found)
    assert {one.error for one in found} == {
        f"{DIFFERENT}: on rank 1, collective 1 is start of all_reduce_start, 17424 bytes of 4, 2, "
        "and on rank 0 start of all_reduce_start, 22032 bytes of 4, 2, 0. Nothing has changed. "
        f"{SAME}"
    }


def test_a_plan_that_comes_to_differ_is_told_on_every_rank(tmp_path: Path) -> None:
    def program(rank: int) -> tuple[Told, Told]:
        model = mlp()
        one, train = training(model)
        for _ in range(3):
            train(*BATCH)
        if rank == 1:
            model[0].requires_grad_(False)
        first = told(one, lambda: train(*BATCH))
        return first, told(one, lambda: train(*BATCH))

    found = ranks(program, tmp_path)
    assert all(one.is_unchanged for pair in found for one in pair)
    (old, again), (new, _) = found
    differs = (
        "another rank has a program with other exchanges at call 4 of the step, which rank 0 runs "
        "as before: a frozen parameter, no_sync or another mode on one rank. Change it on all ranks"
    )
    assert plain(old.error) == (
        "StepFailedError: call N of N of the step, all_reduce_wait (all_reduce_wait) in 4 "
        f"(backward), LINE, failed: {differs}{TOGETHER}"
    )
    assert new.error == f"RankFailedError: {differs}"
    assert again.error == f"RankFailedError: {differs}{NOT_AGAIN}"


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_is_killed_in_a_step(tmp_path: Path, dying: int) -> None:
    found = killed(tmp_path, dying, "all_reduce", None)
    size = 2 + dying
    for one, _ in found:
        # What gloo says of it differs.
        assert re.fullmatch(
            r"StepFailedError: call N of N of the step, all_reduce_wait \(all_reduce_wait\) in 4 "
            rf"\(backward\), LINE, failed: rank \d of {size} lost the others in the all_reduce of "
            rf"bucket 0, float32\[5508\]: \[.+{re.escape(TOGETHER)}",
            plain(one.error),
        ), one.error


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_a_rank_that_is_killed_with_split_state(tmp_path: Path, shard: str, kind: str) -> None:
    killed(tmp_path, 1, kind, shard)


def killed(folder: Path, dying: int, kind: str, shard: str | None) -> list[tuple[Told, float]]:
    """Kill a rank where it starts an exchange of a kind; return what the others saw."""

    def program(rank: int) -> tuple[Told, float]:
        one, train = training(mlp(), shard=shard)
        for _ in range(3):
            train(*BATCH)
        start = Exchange.start

        def die(self: Exchange, collective: Any, flat: Any) -> None:
            if rank == dying and collective.kind == kind:
                os.kill(os.getpid(), signal.SIGKILL)
            start(self, collective, flat)

        Exchange.start = die  # type: ignore[method-assign]
        since = time.monotonic()
        return told(one, lambda: train(*BATCH)), time.monotonic() - since

    found = ranks(program, folder, 2 + dying, may_die=True)
    assert found[dying] == DIED
    left = [one for rank, one in enumerate(found) if rank != dying]
    for one, seconds in left:
        assert one.is_unchanged
        # In the exchange, or, with split state, in the one that begins the call.
        assert "lost the others " in one.error and "Nothing has changed" in one.error
        assert seconds < 5
    return left


class Words(nn.Module):
    """An embedding and a head; `shift` makes the indices ones that the step computes."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 4)
        self.shift = shift

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.shift:
            ids = (ids.float() * self.shift).round().long()
        return self.head(self.words(ids).mean(1))


@pytest.mark.parametrize("shift", [0.0, 2.0])
@pytest.mark.parametrize("shard", [None, "optimizer", "gradients"])
def test_an_index_out_of_range_on_one_rank(tmp_path: Path, shard: str | None, shift: float) -> None:
    """Found by the host before the step, or in the step: none of the ranks updates anything."""

    def program(rank: int) -> list[tuple[Told, float]]:
        torch.manual_seed(0)
        one, train = training(Words(shift), shard=shard)
        right = torch.arange(8).view(4, 2) % 8, torch.arange(4)
        train(*right)
        wrong = (right[0] + (9 if rank == 1 else 0), right[1])
        found = []
        for batch in (right, wrong, right):
            since = time.monotonic()
            found.append((told(one, lambda batch=batch: train(*batch)), time.monotonic() - since))
            if found[-1][0].error != "nothing":
                time.sleep(3)  # as if it ended: the others look every second
        return found

    first, second = ranks(program, tmp_path)
    assert first[0][0].error == second[0][0].error == "nothing"
    for one, seconds in (first[1], second[1]):
        assert one.is_unchanged
        assert seconds < 5
    out_of_range = "expected 0 to 15, for amp_ir.embedding in words (forward), LINE. "
    if not shift:
        own = (
            f"IndexOutOfRangeError: batch0 holds the index 16, {out_of_range}Nothing was run and "
            "nothing has changed"
        )
        assert plain(second[1][0].error) == own
        others = f"rank 1 of 2 failed before its first exchange: {own}"
        kind = "reduce_scatter_wait" if shard else "all_reduce_wait"
        assert plain(first[1][0].error) == (
            f"StepFailedError: call N of N of the step, {kind} ({kind}) in head (backward), LINE, "
            f"failed: {others}{TOGETHER}"
        )
        assert plain(first[2][0].error) == f"RankFailedError: {others}{NOT_AGAIN}"
        return
    # All of them have rolled back, and nothing was left unfinished: they go on.
    assert plain(second[1][0].error) == (
        f"IndexOutOfRangeError: the step computed the index 32, {out_of_range}The step was rolled "
        "back: nothing has changed"
    )
    assert first[1][0].error == (
        "RankFailedError: another rank's step computed a number that its checks refuse, as an "
        "index out of range; its error says which. The step was rolled back on all ranks: nothing "
        "has changed, and they may go on together"
    )
    for one in (first, second):
        assert one[2][0].error == "nothing" and not one[2][0].is_unchanged


def test_an_op_of_pytorchs_that_fails_on_one_rank(tmp_path: Path) -> None:
    @torch.library.custom_op("ranks_test::picky", mutates_args=())
    def picky(x: torch.Tensor) -> torch.Tensor:
        if float(x.abs().max()) > 100:
            raise ValueError("too large a number")
        return x * 2

    picky.register_fake(torch.empty_like)
    picky.register_autograd(lambda ctx, grad: grad * 2)

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return picky(self.inner(x))

    def program(rank: int) -> tuple[Told, float]:
        torch.manual_seed(0)
        one, train = training(Picky(), shard="optimizer")
        train(*BATCH)
        x, y = BATCH
        since = time.monotonic()
        return told(one, lambda: train(x * 1e4 if rank else x, y)), time.monotonic() - since

    (first, seconds), (second, _) = ranks(program, tmp_path)
    assert first.is_unchanged and second.is_unchanged
    assert plain(second.error) == (
        "StepFailedError: call N of N of the step, ranks_test::picky (ranks_test::picky) in step "
        f"(forward), LINE, failed: too large a number{TOGETHER}"
    )
    assert plain(first.error) == (
        "StepFailedError: call N of N of the step, reduce_scatter_wait (reduce_scatter_wait) in "
        "inner (backward), LINE, failed: rank 1 of 2 failed at call 2: ValueError: too large a "
        f"number{TOGETHER}"
    )
    assert seconds < 5


def test_a_rank_that_fails_in_a_step_tells_the_others(tmp_path: Path) -> None:
    def program(rank: int) -> Told:
        one, train = training(mlp())
        for _ in range(3):
            train(*BATCH)
        if rank == 1:

            def fail(*_: Any) -> None:
                raise ValueError("a cosmic ray")

            Exchange.start = fail  # type: ignore[method-assign]
        return told(one, lambda: train(*BATCH))

    found = ranks(program, tmp_path)
    assert all(one.is_unchanged for one in found)
    assert plain(found[1].error) == (
        "StepFailedError: call N of N of the step, all_reduce_start (all_reduce_start) in 4 "
        f"(backward), LINE, failed: a cosmic ray{TOGETHER}"
    )
    assert plain(found[0].error) == (
        "StepFailedError: call N of N of the step, all_reduce_wait (all_reduce_wait) in 4 "
        "(backward), LINE, failed: rank 1 of 2 failed at call 4: ValueError: a cosmic ray"
        f"{TOGETHER}"
    )


def test_a_late_rank_is_waited_for_with_a_message(tmp_path: Path) -> None:
    def program(rank: int) -> tuple[Told, Told]:
        say_soon()
        one, train = training(mlp())
        logging.getLogger("amp_ir").addFilter(
            lambda record: (
                (tmp_path / f"waits {'compiled' in record.msg}").touch() or True
                if "waited" in record.msg
                else True
            )
        )

        def come_late(*, compiles: bool) -> None:
            """Wait until the other rank says that it waits."""
            while rank == 1 and not (tmp_path / f"waits {compiles}").exists():
                time.sleep(0.01)

        come_late(compiles=True)
        first = told(one, lambda: train(*BATCH))
        come_late(compiles=False)
        return first, told(one, lambda: train(*BATCH))

    (compiled, ran), late = ranks(program, tmp_path)
    assert {one.error for one in (compiled, ran, *late)} == {"nothing"}
    assert "rank 0 of 2 has compiled the step and has waited" in compiled.log[0]
    assert compiled.log[0].endswith("for rank 1")
    assert "s in the all_reduce of bucket 0, float32[" in ran.log[0]


def test_a_rank_that_never_comes_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    def program(rank: int) -> Told:
        say_soon()
        one, train = training(mlp())
        if rank == 1:
            time.sleep(4)
            return told(one, lambda: None)
        return told(one, lambda: train(*BATCH))

    found = ranks(program, tmp_path, timeout_seconds=2)
    assert found[0].is_unchanged
    assert re.fullmatch(
        r"RankFailedError: rank 0 waited \d+ s, the group's timeout, for rank 1 to compile the "
        r"step; see what that does, or pass timeout= to init_process_group",
        found[0].error,
    ), found[0].error


def test_a_rank_that_stops_calling_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    def program(rank: int) -> tuple[Told, float]:
        say_soon()
        one, train = training(mlp(), shard="optimizer")
        for _ in range(3):
            train(*BATCH)
        since = time.monotonic()
        if rank == 1:
            time.sleep(9)
            return told(one, lambda: None), 0.0
        return told(one, lambda: train(*BATCH)), time.monotonic() - since

    (found, seconds), _ = ranks(program, tmp_path, timeout_seconds=2)
    assert found.is_unchanged
    assert "rank 0 of 2 lost the others in the reduce_scatter of bucket 0, " in found.error
    # The timeout, and 5 s: TVM's first error in a process looks its frames up, in a second or two.
    assert seconds < 7


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_a_rank_that_fails_with_split_state_leaves_all_as_before(tmp_path: Path, kind: str) -> None:
    def program(rank: int) -> tuple[Told, float]:
        one, train = training(mlp(), shard="optimizer")
        for _ in range(3):
            train(*BATCH)
        start = Exchange.start

        def fail(self: Exchange, collective: Any, flat: Any) -> None:
            if rank == 1 and collective.kind == kind:
                raise ValueError("a cosmic ray")
            start(self, collective, flat)

        Exchange.start = fail  # type: ignore[method-assign]
        since = time.monotonic()
        return told(one, lambda: train(*BATCH)), time.monotonic() - since

    for found, seconds in ranks(program, tmp_path):
        assert found.is_unchanged
        assert "ValueError: a cosmic ray" in found.error or "failed: a cosmic ray" in found.error
        assert seconds < 10


def test_a_rank_that_fails_before_its_first_exchange_is_told_to_those_who_wait(
    tmp_path: Path,
) -> None:
    def program(rank: int) -> tuple[Told, float]:
        one, train = training(mlp())
        x, y = BATCH
        since = time.monotonic()
        # A wrong width, on one rank: its capture fails.
        found = told(one, lambda: train(x[:, :15] if rank == 1 else x, y))
        return attrs.evolve(found, error=found.error.splitlines()[0]), time.monotonic() - since

    (first, seconds), (second, _) = ranks(program, tmp_path)
    assert second.error.startswith("CaptureError: ")
    assert first.error.startswith(
        "RankFailedError: rank 1 of 2 failed before its first exchange: CaptureError: the step "
        "failed while it was traced"
    )
    assert first.is_unchanged and second.is_unchanged
    # The group's timeout is 20 seconds after the compilation.
    assert seconds < 20


def test_a_later_program_with_other_ops_is_told(tmp_path: Path) -> None:
    def program(rank: int) -> tuple[Told, Told]:
        model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
        one, train = training(model)
        begun = told(one, lambda: train(*BATCH))
        # Both compile again; rank 1 with another function between the same layers.
        model[1] = nn.GELU() if rank else nn.Tanh()
        return begun, told(one, lambda: train(*BATCH))

    found = ranks(program, tmp_path)
    assert all(begun.error == "nothing" for begun, _ in found)
    # Either rank may compile first, and go on until the other tells it.
    differs, failed = sorted(plain(later.error) for _, later in found)
    rank = next(k for k, (_, later) in enumerate(found) if later.error.startswith("Ranks"))
    ops = [f"relax.{name} float32[8, 8] of 1 (forward)" for name in ("tanh", "nn.gelu")]
    what = (
        f" from call 2 on: on rank {rank}, op 4 is {ops[rank]}, and on the rank that compiled "
        f"first {ops[1 - rank]}"
    )
    assert differs == f"{DIFFERENT}{what}. Nothing has changed on this rank. {SAME}"
    assert failed == (
        "StepFailedError: call N of N of the step, all_reduce_wait (all_reduce_wait) in 2 "
        "(backward), LINE, failed: the ranks of the process group have different programs"
        f"{what}{TOGETHER}"
    )
    assert all(later.is_unchanged for _, later in found)


class LostStore:
    """The store of a process that has ended."""

    group_name = "lost"

    def get_group_store(self) -> LostStore:
        return self

    def wait(self, *_: Any) -> None:
        raise RuntimeError("Broken pipe\nin C++")

    check = wait


def test_a_store_that_does_not_answer_is_told() -> None:
    met = meeting.Meeting(Group(LostStore(), 1, 2, 30.0))
    with pytest.raises(errors.RankFailedError) as caught:
        met._is_there(("all", 1))
    assert str(caught.value) == (
        "rank 1 of 2 lost the store of the process group, which is rank 0's: Broken pipe. See why "
        "rank 0 ended, and start all processes again"
    )
