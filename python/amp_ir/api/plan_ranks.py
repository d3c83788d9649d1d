# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.plan_ranks`: a step on more ranks than there are, from kernels measured here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from amp_ir.amp.overrides import Override
from amp_ir.api.measure import program_on_copies
from amp_ir.api.precision import autocast, autocast_between_ranks
from amp_ir.api.trace import Models, Optimizers, rewrite, trace_unchanged
from amp_ir.distributed.links import Links, sent_nbytes
from amp_ir.distributed.process_group import Group
from amp_ir.distributed.replicas import find_ranks
from amp_ir.distributed.simulate_schedule import (
    Compute,
    Event,
    Schedule,
    Start,
    Wait,
    simulate_schedule,
)
from amp_ir.distributed.stand_in_exchange import Half, StandInExchange
from amp_ir.errors import OptionError
from amp_ir.ir.collective_call import SYMBOLS
from amp_ir.ir.memory_plan import PlannedCall
from amp_ir.ir.public_function import public_function
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.ir.tensor_layout import dtype_nbytes
from amp_ir.report.rank_plan import PlannedBucket, RankPlan
from amp_ir.runtime.call_times import StepTimes, time_calls

BACKENDS = ("gloo", "nccl")


@public_function("amp_ir.plan_ranks")
def plan_ranks(
    step: Callable[..., Any],
    example_batch: tuple[Any, ...],
    *,
    model: Models,
    optimizer: Optimizers = None,
    scaler: Any = None,
    ranks: int,
    links: Links,
    backend: str = "gloo",
    shard: str | None = None,
    comm_dtype: str | torch.dtype | None = None,
    bucket_cap_mb: float | None = None,
    amp_dtype: str | torch.dtype | None = None,
    overrides: Sequence[Override] = (),
    policy: str = "default",
    steps: int = 10,
    warmup: int = 3,
) -> RankPlan:
    """Simulate a data parallel step on ranks that are not here.

    The program is the one that each of the ranks would run, with its exchanges where they begin
    and are waited for. Its kernels are timed in this process, on copies of the state, and the
    program's order is replayed with those times and `links`: what an exchange takes, and how much
    of it the step waits for. No process group is needed, and nothing is sent.

    Args:
        step: as for `trace_step`.
        example_batch: the batch of one rank.
        model: the plain models, or `DistributedDataParallel`, whose bucket sizes are kept.
        optimizer: as for `trace_step`.
        scaler: as for `trace_step`.
        ranks: how many ranks train together.
        links: their bandwidth and latency; `measure_links` measures those of a process group.
        backend: "gloo", which has no reduce-scatter of its own, or "nccl".
        shard: as for `jit`; this process plans rank 0.
        comm_dtype: as for `jit`, as is `bucket_cap_mb`.
        amp_dtype: as for `jit`.
        overrides: as for `autocast`.
        policy: as for `autocast`.
        steps: how many steps are timed; the plan is of the one of median length.
        warmup: how many run before.

    Raises:
        OptionError: an option has a value that it does not accept.
        ShardingError: the optimizer's state cannot be split as `shard=` asks.
        What `trace_step` raises.
    """
    _check(ranks, links, backend)
    group = Group(None, 0, ranks, 0.0)
    captured, found = find_ranks(
        model, comm_dtype=comm_dtype, bucket_cap_mb=bucket_cap_mb, shard=shard, simulated=group
    )
    mod = rewrite(
        trace_unchanged(
            step, example_batch, model=captured, optimizer=optimizer, scaler=scaler, ranks=found
        )
    )
    if amp_dtype is not None:
        mod = autocast(mod, example_batch, amp_dtype=amp_dtype, overrides=overrides, policy=policy)
    mod = autocast_between_ranks(mod, example_batch)
    return _planned(mod, example_batch, ranks, links, backend, shard, steps, warmup)


def _check(ranks: Any, links: Any, backend: Any) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise OptionError(f"ranks={ranks!r} is no number of ranks; expected 1 or more, as 1024")
    if not isinstance(links, Links):
        raise OptionError(
            f"links={links!r} is a {type(links).__name__}; expected amp_ir.Links("
            "gigabytes_per_second=..., latency_microseconds=...)"
        )
    if backend not in BACKENDS:
        accepted = " or ".join(map(repr, BACKENDS))
        raise OptionError(f"backend={backend!r} is not known; expected {accepted}")


def _planned(
    mod: StepModule, batch: Any, ranks: int, links: Links, backend: str, shard: str | None,
    steps: int, warmup: int,
) -> RankPlan:  # fmt: skip
    program, planned, tensors = program_on_copies(mod, "cpu", batch, 3)
    recorder = _Recorder(program, tensors)
    times = time_calls(program, tensors, warmup=warmup, steps=steps, step=recorder.step)
    plan = planned.plan

    def milliseconds(half: Half) -> float:
        kind = _kind_on_wire(half.collective.kind, backend)
        return links.milliseconds(kind, half.nbytes, ranks)

    simulated = sorted(
        (
            simulate_schedule(list(_events(plan.calls, one, halves, milliseconds)))
            for one, halves in zip(times, recorder.halves[-steps:], strict=True)
        ),
        key=lambda one: one.milliseconds,
    )
    middle = simulated[len(simulated) // 2]
    starts = [half for half in recorder.halves[-1] if half.is_start]
    return RankPlan(
        ranks=ranks,
        links=links,
        backend=backend,
        shard=shard,
        milliseconds=middle.milliseconds,
        compute_milliseconds=middle.compute_milliseconds,
        fastest_milliseconds=simulated[0].milliseconds,
        slowest_milliseconds=simulated[-1].milliseconds,
        steps=steps,
        buckets=tuple(_buckets(starts, middle, backend, ranks)),
        state_nbytes=plan.state_bytes,
        optimizer_nbytes=_optimizer_nbytes(mod),
        whole_optimizer_nbytes=_optimizer_nbytes(mod if mod.whole is None else mod.whole),
        peak_nbytes=plan.peak_bytes,
    )


def _optimizer_nbytes(mod: StepModule) -> int:
    kept = (one for one in mod.signature.inputs if one.role is Role.OPTIMIZER_STATE)
    return sum(math.prod(one.shape) * dtype_nbytes(one.dtype) for one in kept)


@attrs.define(eq=False)
class _Recorder:
    """Runs steps, and keeps the starts and waits of each."""

    program: Any
    batch: Sequence[torch.Tensor]
    halves: list[list[Half]] = attrs.field(factory=list)

    def step(self) -> None:
        self.program.run(self.batch)
        exchange = self.program.exchange
        # A single rank has none.
        self.halves.append(exchange.halves if isinstance(exchange, StandInExchange) else [])


def _events(
    calls: Sequence[PlannedCall],
    times: StepTimes,
    halves: Sequence[Half],
    milliseconds: Callable[[Half], float],
) -> Iterator[Event]:
    """Return a timed step as a simulation takes it; what is between calls computes too."""
    left = iter(halves)
    number_of: dict[tuple[int, int], int] = {}
    since = 0.0
    for call, begin, end in zip(
        calls, times.begin_milliseconds, times.end_milliseconds, strict=True
    ):
        yield Compute(begin - since)
        since = end
        if call.symbol not in SYMBOLS:
            yield Compute(end - begin)
            continue
        half = next(left)
        key = half.collective.group, half.collective.bucket
        if half.is_start:
            number_of[key] = len(number_of)
            yield Compute(max(0.0, end - begin - half.stand_in_seconds * 1e3))
            yield Start(number_of[key], milliseconds(half))
        else:
            yield Wait(number_of[key])
            # What is received is copied to where it belongs.
            yield Compute(end - begin)
    yield Compute(times.milliseconds - since)


def _buckets(
    starts: Sequence[Half], schedule: Schedule, backend: str, ranks: int
) -> Iterator[PlannedBucket]:
    for number, half in enumerate(starts):
        kind = half.collective.kind
        yield PlannedBucket(
            str(half.collective),
            kind,
            half.nbytes,
            sent_nbytes(_kind_on_wire(kind, backend), half.nbytes, ranks),
            schedule.channel_milliseconds[number],
            schedule.exposed_milliseconds[number],
        )


def _kind_on_wire(kind: str, backend: str) -> str:
    return "all_reduce" if (kind, backend) == ("reduce_scatter", "gloo") else kind
