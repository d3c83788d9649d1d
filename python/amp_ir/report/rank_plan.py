# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.plan_ranks`: what a step takes on a cluster that is not here."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from amp_ir.distributed.links import Links
from amp_ir.files.strict_json import strict_json

_MIB = 2.0**20
# Buckets of a table; a large model has hundreds.
_SHOWN = 12


@attrs.frozen
class PlannedBucket:
    """One exchange of a simulated step.

    `nbytes` are those of the bucket, `sent_nbytes` what a rank sends for it. `exposed_milliseconds`
    is the part of `milliseconds` in which the rank waits.
    """

    name: str
    kind: str
    nbytes: int
    sent_nbytes: int
    milliseconds: float
    exposed_milliseconds: float

    @property
    def hidden_milliseconds(self) -> float:
        """Return the part in which the rank computes meanwhile."""
        return self.milliseconds - self.exposed_milliseconds


@attrs.frozen(kw_only=True)
class RankPlan:
    """The simulated step of one of `ranks` ranks; nothing was sent.

    Attributes:
        ranks: how many train together, each on a batch like the example.
        links: what they send with.
        backend: whose exchanges are simulated; gloo's reduce-scatter is an all-reduce.
        shard: how the optimizers' state is split; None: every rank has all of it.
        milliseconds: the step with its exchanges.
        compute_milliseconds: what of it was measured here: kernels, and what is between them.
        fastest_milliseconds: the simulated step with the least of the measured ones, whose median
            is `milliseconds`.
        slowest_milliseconds: that with the most.
        steps: how many steps were measured.
        buckets: the exchanges, in the order in which they begin.
        state_nbytes: what a rank keeps between steps.
        optimizer_nbytes: what of that the optimizers keep.
        whole_optimizer_nbytes: what they keep without `shard`.
        peak_nbytes: what it needs in a step, the state included.
    """

    ranks: int
    links: Links
    backend: str
    shard: str | None
    milliseconds: float
    compute_milliseconds: float
    fastest_milliseconds: float
    slowest_milliseconds: float
    steps: int
    buckets: tuple[PlannedBucket, ...] = attrs.field(repr=False)
    state_nbytes: int
    optimizer_nbytes: int
    whole_optimizer_nbytes: int
    peak_nbytes: int

    @property
    def exchange_milliseconds(self) -> float:
        """Return the time of all exchanges."""
        return sum(one.milliseconds for one in self.buckets)

    @property
    def exposed_milliseconds(self) -> float:
        """Return the time in which the rank waits."""
        return sum(one.exposed_milliseconds for one in self.buckets)

    @property
    def hidden_milliseconds(self) -> float:
        """Return the time of exchanges in which the rank computes."""
        return self.exchange_milliseconds - self.exposed_milliseconds

    @property
    def sent_nbytes(self) -> int:
        """Return the bytes that a rank sends in a step."""
        return sum(one.sent_nbytes for one in self.buckets)

    @property
    def efficiency(self) -> float:
        """Return the computing share of the step: 1 where all of the exchange is hidden."""
        return self.compute_milliseconds / self.milliseconds

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return what the simulation takes for granted, a sentence each."""
        links = self.links
        steps = "p - 1" if links.algorithm == "ring" else "ceil(lg p)"
        scatter = (
            "gloo has no reduce-scatter of its own, so one takes as long as an all-reduce"
            if self.backend == "gloo"
            else "a reduce-scatter takes as long as an all-gather"
        )
        return (
            f"each rank sends and receives {links.gigabytes_per_second:.4g} GB/s at a time, and a "
            f"message takes {links.latency_microseconds:.4g} us more; all links are alike",
            f"{links.algorithm} over p ranks: an all-gather of n bytes takes {steps} latencies and "
            "(p - 1)/p n bytes of a link, an all-reduce twice that (Thakur et al. 2005; Patarasuk "
            f"and Yuan 2009); {scatter}",
            "one exchange at a time, in the order in which the program starts them; exchanging "
            "slows no kernel, and adding what was received takes no time",
            f"kernels take what they took on this machine, in {self.steps} steps of one process on "
            "numbers of one rank; the other ranks are as fast, and none is waited for",
        )

    def to_json(self) -> str:
        """Return everything as JSON."""
        names = (
            "exchange_milliseconds", "exposed_milliseconds", "hidden_milliseconds", "sent_nbytes",
            "efficiency", "assumptions",
        )  # fmt: skip
        document = attrs.asdict(self) | {name: getattr(self, name) for name in names}
        return strict_json(document) + "\n"

    def __str__(self) -> str:
        """Return the plan as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        who = "one rank" if self.ranks == 1 else f"each of {self.ranks} ranks"
        yield (
            f"a step of {who}: {self.milliseconds:.4g} ms, simulated "
            f"({self.fastest_milliseconds:.4g} to {self.slowest_milliseconds:.4g} over "
            f"{self.steps} measured steps)"
        )
        yield (
            f"  computing  {self.compute_milliseconds:.4g} ms, as measured here: "
            f"{self.efficiency:.0%} of the step"
        )
        yield (
            f"  exchange   {self.exchange_milliseconds:.4g} ms, of which "
            f"{self.exposed_milliseconds:.4g} ms exposed and {self.hidden_milliseconds:.4g} ms "
            "hidden"
        )
        yield f"  sends      {self.sent_nbytes / _MIB:.4g} MiB a step"
        yield (
            f"  memory     {self.peak_nbytes / _MIB:.4g} MiB at the peak, of which "
            f"{self.state_nbytes / _MIB:.4g} MiB stay; {self._optimizers()}"
        )
        if self.buckets:
            yield ""
            yield from self._table()
        yield ""
        yield "assumed:"
        yield from (f"- {one}" for one in self.assumptions)

    def _optimizers(self) -> str:
        own, whole = self.optimizer_nbytes / _MIB, self.whole_optimizer_nbytes / _MIB
        if self.shard is None:
            return f"{own:.4g} MiB are the optimizer's"
        if self.whole_optimizer_nbytes and self.optimizer_nbytes == self.whole_optimizer_nbytes:
            return (
                f"the optimizer's {own:.4g} MiB are whole on each rank: shard={self.shard!r} "
                "finds nothing that is large enough to split"
            )
        return f"{own:.4g} of the optimizer's {whole:.4g} MiB are this rank's"

    def _table(self) -> Iterator[str]:
        shown = sorted(self.buckets, key=lambda one: -one.exposed_milliseconds)[:_SHOWN]
        titles = ("MiB", "ms", "exposed", "hidden")
        width = max(len(one.name) for one in shown)
        yield f"  {'bucket':<{width}} " + " ".join(f"{one:>9}" for one in titles)
        for one in self.buckets:
            if one in shown:
                numbers = (
                    one.nbytes / _MIB, one.milliseconds, one.exposed_milliseconds,
                    one.hidden_milliseconds,
                )  # fmt: skip
                yield f"  {one.name:<{width}} " + " ".join(f"{n:>9.4g}" for n in numbers)
        if len(self.buckets) > _SHOWN:
            yield f"  and {len(self.buckets) - _SHOWN} more with less exposed time"
