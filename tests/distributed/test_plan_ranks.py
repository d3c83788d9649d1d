# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.plan_ranks` and `amp-ir plan --ranks`: a step on ranks that are not here."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_ir
from amp_ir import cli
from amp_ir.api.plan_ranks import plan_ranks as plan_of
from amp_ir.errors import OptionError

LINKS = amp_ir.Links(gigabytes_per_second=1.0, latency_microseconds=10.0)
BATCH = torch.randn(8, 16), torch.randint(0, 4, (8,))


def training(**options: Any) -> dict[str, Any]:
    """A small step of AdamW with clipping, as `plan_ranks` takes it."""
    model = nn.Sequential(nn.Linear(16, 640), nn.BatchNorm1d(640), nn.ReLU(), nn.Linear(640, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    made = {"step": step, "example_batch": BATCH, "model": model, "optimizer": optimizer}
    return {**made, "ranks": 4, "links": LINKS, "steps": 3, "warmup": 1, **options}


def test_a_plan_has_the_buckets_of_the_program_and_changes_nothing():
    asked = training(ranks=1024)
    before = {name: one.clone() for name, one in asked["model"].state_dict().items()}
    plan = plan_of(**asked)
    after = asked["model"].state_dict()
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    assert not asked["optimizer"].state and all(
        one.grad is None for one in asked["model"].parameters()
    )
    kinds = [one.kind for one in plan.buckets]
    # Rank 0's statistics and their count, in two dtypes; then all gradients.
    assert sorted(kinds) == ["all_reduce", "broadcast", "broadcast"]
    gradients = 4 * sum(one.numel() for one in asked["model"].parameters())
    (reduced,) = (one for one in plan.buckets if one.kind == "all_reduce")
    assert gradients <= reduced.nbytes < gradients + 64 * 6
    # 2046 messages of 10 us, and 2 * 1023/1024 of the bytes at 1 GB/s.
    assert reduced.milliseconds == pytest.approx(20.46 + 2 * 1023 / 1024 * reduced.nbytes / 1e6)
    assert plan.sent_nbytes >= reduced.sent_nbytes == round(2 * reduced.nbytes * 1023 / 1024)
    assert plan.exposed_milliseconds + plan.hidden_milliseconds == pytest.approx(
        plan.exchange_milliseconds
    )
    assert plan.milliseconds == pytest.approx(plan.compute_milliseconds + plan.exposed_milliseconds)
    assert plan.fastest_milliseconds <= plan.milliseconds <= plan.slowest_milliseconds
    assert 0 < plan.efficiency < 1


def test_one_rank_is_the_measured_step():
    plan = plan_of(**training(ranks=1, shard="optimizer"))
    assert plan.buckets == () and plan.sent_nbytes == 0 and plan.efficiency == 1
    assert plan.milliseconds == pytest.approx(plan.compute_milliseconds)
    assert str(plan).startswith("a step of one rank: ")


def test_split_state_is_a_ranks_part_and_a_reduction_of_gloo_sends_all():
    whole = plan_of(**training())
    split = plan_of(**training(shard="gradients"))
    nccl = plan_of(**training(shard="gradients", backend="nccl"))
    assert whole.optimizer_nbytes == whole.whole_optimizer_nbytes == split.whole_optimizer_nbytes
    # Steps of Adam are counted once a parameter, and ranges are of whole 64 bytes.
    assert 0.25 <= split.optimizer_nbytes / split.whole_optimizer_nbytes < 0.27
    assert split.state_nbytes < whole.state_nbytes
    kinds = [one.kind for one in split.buckets]
    assert "reduce_scatter" in kinds and "all_gather" in kinds
    for ours, theirs in zip(split.buckets, nccl.buckets, strict=True):
        factor = 2 if ours.kind == "reduce_scatter" else 1
        assert ours.sent_nbytes == factor * theirs.sent_nbytes
        assert ours.milliseconds == pytest.approx(factor * theirs.milliseconds)


def test_what_is_sent_in_a_low_dtype_has_half_the_bytes():
    asked = training(comm_dtype="bfloat16", amp_dtype="bfloat16")
    (low,) = (one for one in plan_of(**asked).buckets if one.kind == "all_reduce")
    (full,) = (one for one in plan_of(**training()).buckets if one.kind == "all_reduce")
    assert low.name.split(", ")[1].startswith("bfloat16[") and 2 * low.nbytes <= full.nbytes + 64
    asked = training(comm_dtype="bfloat16")
    (alone,) = (one for one in plan_of(**asked).buckets if one.kind == "all_reduce")
    assert alone.nbytes == low.nbytes


def test_a_plan_has_buckets_of_the_size_that_is_asked_for():
    counts = [
        sum(one.kind == "all_reduce" for one in plan_of(**training(**options)).buckets)
        for options in ({}, {"bucket_cap_mb": 0.01})
    ]
    assert counts[0] == 1 < counts[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 0}, "ranks=0 is no number of ranks; expected 1 or more, as 1024"),
        ({"ranks": 2.0}, "ranks=2.0 is no number of ranks; expected 1 or more, as 1024"),
        (
            {"links": 25.0},
            "links=25.0 is a float; expected amp_ir.Links(gigabytes_per_second=..., "
            "latency_microseconds=...)",
        ),
        ({"backend": "mpi"}, "backend='mpi' is not known; expected 'gloo' or 'nccl'"),
        (
            {"shard": "parameters"},
            'shard=\'parameters\' is not supported; expected "optimizer", "gradients", or None '
            "for all of the optimizers' state on every rank",
        ),
        (
            {"steps": 0},
            "steps=0 steps cannot be run; expected a whole number of at least 1",
        ),
    ],
)
def test_wrong_options_are_refused(wrong, message):
    with pytest.raises(OptionError) as caught:
        plan_of(**training(**wrong))
    assert str(caught.value) == message


FILE = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batch = (torch.randn(8, 64), torch.randint(0, 4, (8,)))


def step(x, y):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
"""


def test_the_command_plans_a_file(tmp_path, capsys):
    (tmp_path / "train.py").write_text(FILE)
    words = [
        "plan", "--ranks", "1024", "--bandwidth", "100Gbit/s", "--latency", "5us", "--steps", "2",
        "--algorithm", "recursive", "--json", str(tmp_path / "plan.json"),
        str(tmp_path / "train.py"),
    ]  # fmt: skip
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "a step of each of 1024 ranks: " in text
    assert "each rank sends and receives 12.5 GB/s at a time, and a message takes 5 us" in text
    assert "recursive over p ranks: an all-gather of n bytes takes ceil(lg p) latencies" in text
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["ranks"] == 1024 and document["links"]["gigabytes_per_second"] == 12.5
    assert document["assumptions"] and document["buckets"][0]["kind"] == "all_reduce"
    # 20 messages of 5 us.
    assert document["exchange_milliseconds"] == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "none"], "argument --ranks: 'none' is no number of ranks; expected 1 or more"),
        (["--ranks", "8"], "the following arguments are required: --bandwidth"),
        (
            ["--ranks", "8", "--bandwidth", "25"],
            "argument --bandwidth: '25' is no bandwidth; expected a number above 0 with MB/s, "
            "GB/s, Mbit/s or Gbit/s, such as 25GB/s or 200Gbit/s",
        ),
        (
            ["--ranks", "8", "--bandwidth", "0GB/s"],
            "argument --bandwidth: '0GB/s' is no bandwidth; expected a number above 0 with MB/s, "
            "GB/s, Mbit/s or Gbit/s, such as 25GB/s or 200Gbit/s",
        ),
        (
            ["--ranks", "8", "--bandwidth", "1GB/s", "--latency", "5"],
            "argument --latency: '5' is no latency; expected a number with ns, us or ms, such as "
            "5us",
        ),
    ],
)
def test_wrong_words_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", *words, "train.py"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"amp-ir plan: error: {message}"


def test_plans_of_casts_are_saved_as_before(tmp_path, capsys):
    (tmp_path / "train.py").write_text(FILE)
    out = str(tmp_path / "plan.json")
    assert cli.main(["plan", "save", str(tmp_path / "train.py"), "--out", out]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {out}")
