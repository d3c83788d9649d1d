# SPDX-License-Identifier: Apache-2.0
"""Which models are replicas, and what is refused with what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import amp_ir
from amp_ir import errors, jit_function, pipeline
from amp_ir.compile_cache.key import key_of
from amp_ir.distributed.contract import Contract, contract_of
from amp_ir.distributed.rank_options import DEFAULT_SIZES, check_exchange
from amp_ir.distributed.replicas import find_ranks
from amp_ir.ir.bucket_sizes import BucketSizes
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.location import from_span
from amp_ir.ir.step_module import StepModule
from amp_ir.ir.target import cpu
from amp_ir.rewrites.start_collectives import start_collectives
from amp_ir.vm.export import _check_exportable
from captured_ranks import captured, replicas
from square_steps import square_step


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step_of(width: int = 8, rows: int = 4, count: int = 2) -> StepModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    step = square_step(model, optimizer)

    mod = captured(step, (torch.ones(rows, 6),), [model], [optimizer], count)
    return mod.with_ir(start_collectives(mod.ir))


def test_options_without_a_replica_are_refused() -> None:
    model = nn.Linear(2, 2)
    told = "and no model is a DistributedDataParallel; pass data_parallel=True too"
    for name, options in (
        ("comm_dtype", {"comm_dtype": "bfloat16"}),
        ("bucket_cap_mb", {"bucket_cap_mb": 4}),
        ("process_group", {"process_group": 1}),
    ):
        with pytest.raises(errors.OptionError) as error:
            find_ranks(model, **options)
        assert str(error.value) == f"{name}= is given, {told}"
    with pytest.raises(errors.OptionError) as error:
        find_ranks(model, data_parallel=True)
    assert str(error.value) == (
        "torch.distributed has no process group, which data_parallel=True and measure_links need; "
        "start the script with torchrun and call torch.distributed.init_process_group() first"
    )
    with pytest.raises(errors.OptionError) as error:
        find_ranks(model, comm_dtype="float8")
    assert str(error.value) == (
        'comm_dtype=\'float8\' is not supported; expected "float16", "bfloat16", or None for the '
        "dtype of the gradients"
    )
    assert find_ranks(model) == (model, None)


def test_a_wrapper_says_how_it_exchanges(group_of_one: None) -> None:
    wrapped = DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=3, broadcast_buffers=False)
    model, found = find_ranks([wrapped, nn.Linear(2, 2)], data_parallel=True)
    assert model[0] is wrapped.module and found is not None
    (of_wrapper, plain) = found.replicas
    assert of_wrapper.sizes == BucketSizes(3 * 2**20, 3 * 2**20)
    assert not of_wrapper.has_buffers and plain.has_buffers
    assert plain.sizes == BucketSizes(25 * 2**20, 2**20, 2**20)
    assert len(found.groups) == 1 and not found.exchanges
    with found.no_sync():
        assert found.flags() == ((False, True), (False, True))
    assert found.flags() == ((True, True), (True, True))


def test_buckets_have_the_sizes_that_a_user_chose(group_of_one: None) -> None:
    def sizes(model: nn.Module, **options: Any) -> BucketSizes:
        found = find_ranks(model, data_parallel=True, **options)[1]
        assert found is not None
        return found.replicas[0].sizes

    assert sizes(nn.Linear(2, 2), bucket_cap_mb=0.5) == BucketSizes(2**19, 2**19)
    chosen = DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=25)
    assert sizes(chosen) == BucketSizes(25 * 2**20, 25 * 2**20)
    assert sizes(DistributedDataParallel(nn.Linear(2, 2))) == DEFAULT_SIZES
    assert sizes(DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=0)) == BucketSizes(1, 1)
    for wrong in (0, -1.0, True, "4", math.nan, math.inf):
        with pytest.raises(errors.OptionError) as error:
            find_ranks(nn.Linear(2, 2), data_parallel=True, bucket_cap_mb=wrong)
        assert str(error.value) == (
            f"bucket_cap_mb={wrong!r} is no size of a bucket; expected a finite number of MiB "
            "above 0, such as 4, or None for up to 25 MiB, smaller at the end"
        )
    with pytest.raises(errors.OptionError) as error:
        find_ranks(chosen, bucket_cap_mb=4)
    assert str(error.value) == (
        "bucket_cap_mb= is given, and a DistributedDataParallel has its own; leave it out"
    )


def test_options_that_a_wrapper_has_itself_are_refused(group_of_one: None) -> None:
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(errors.OptionError) as error:
        find_ranks(wrapped, process_group=dist.group.WORLD)
    assert str(error.value) == (
        "process_group= is given, and a DistributedDataParallel has its own; leave it out"
    )
    assert find_ranks(wrapped)[0] is wrapped.module
    with pytest.raises(errors.OptionError) as error:
        find_ranks(
            nn.Linear(2, 2), data_parallel=True, process_group=dist.GroupMember.NON_GROUP_MEMBER
        )
    assert str(error.value) == (
        "process_group= is a group that this process is not in; pass one that it is in, or None "
        "for all processes"
    )
    assert find_ranks(nn.Linear(2, 2), data_parallel=True, process_group=None)[1] is not None


def test_state_is_split_over_one_process_group(group_of_one: None) -> None:
    wrapped = DistributedDataParallel(nn.Linear(2, 2), process_group=dist.new_group([0]))
    models = [wrapped, nn.Linear(2, 2)]
    with pytest.raises(errors.OptionError) as error:
        find_ranks(models, data_parallel=True, shard="optimizer")
    assert str(error.value) == (
        "shard='optimizer' splits state over one process group, and the models of this step have "
        "2; give them one, or leave it out"
    )
    one = [DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)]
    for given, options in ((models, {}), (one, {"shard": "optimizer"})):
        assert find_ranks(given, data_parallel=True, **options)[1] is not None


def test_a_wrapper_that_joins_is_refused(group_of_one: None) -> None:
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    with wrapped.join(), pytest.raises(errors.ArgumentError) as error:
        find_ranks(wrapped)
    assert str(error.value) == (
        "a DistributedDataParallel is in join(), in which a compiled step takes no part; leave "
        "join() out, and give all ranks as many batches, as a DistributedSampler does"
    )


@pytest.mark.parametrize("option", ["on_overflow", "watch"])
def test_what_runs_other_programs_is_not_for_ranks_that_exchange(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    ranks = replicas([model], 2)
    monkeypatch.setattr(jit_function, "find_ranks", lambda *_, **__: (model, ranks))
    monkeypatch.setattr(jit_function, "check_exchange", lambda *_, **__: None)
    given = {"on_overflow": "explain"} if option == "on_overflow" else {"watch": amp_ir.Watch()}
    with pytest.raises(errors.OptionError) as error:
        amp_ir.jit(
            lambda x: model(x),
            model=model,
            amp_dtype="float16",
            scaler=amp_ir.GradScaler(),
            **given,
        )
    assert (
        str(error.value)
        == {
            "on_overflow": "on_overflow='explain' runs a skipped step again on one rank alone, and "
            "this one exchanges gradients with others; leave it out",
            "watch": "watch= runs another program every so many steps, and the ranks that exchange "
            "gradients must all run the same one; leave it out",
        }[option]
    )


def test_hooks_that_are_no_dtype_are_refused(group_of_one: None) -> None:
    wrapped = DistributedDataParallel(nn.Linear(2, 2))

    # PyTorch looks at annotations, which are text here.
    def mine(state, bucket):  # type: ignore[no-untyped-def]
        raise AssertionError

    wrapped.register_comm_hook(None, mine)
    with pytest.raises(errors.ArgumentError) as error:
        find_ranks(wrapped)
    assert str(error.value) == (
        "a DistributedDataParallel has the communication hook "
        "test_hooks_that_are_no_dtype_are_refused.<locals>.mine, which a compiled step does not "
        "call; register fp16_compress_hook, bf16_compress_hook or none, and for a reduced dtype "
        "pass comm_dtype="
    )
    model = nn.Linear(2, 2)
    model.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(errors.ArgumentError) as error:
        find_ranks(model, data_parallel=True)
    assert str(error.value) == (
        "weight has a hook after its gradient is accumulated, which would see this rank's gradient "
        "only; do what it does after backward()"
    )


def test_what_a_wrapper_does_beside_its_hook_is_refused(group_of_one: None) -> None:
    wrapped = DistributedDataParallel(nn.BatchNorm1d(2))
    wrapped._register_buffer_comm_hook(None, lambda *_: None)
    with pytest.raises(errors.ArgumentError) as error:
        find_ranks(wrapped)
    assert str(error.value) == (
        "a DistributedDataParallel has a hook for its buffers, which a compiled step does not do; "
        "make it without"
    )


def test_what_a_wrapper_does_later_is_refused(group_of_one: None) -> None:
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    _, found = find_ranks(wrapped)
    assert found is not None
    # As if there were another rank: of one, nothing is exchanged.
    found.replicas[0].group = replicas([], 2).groups[0]
    found.refuse_changed_wrappers()
    # `with wrapped.join():`
    wrapped._join_config = wrapped._join_config._replace(enable=True)
    with pytest.raises(errors.ArgumentError) as error:
        found.refuse_changed_wrappers()
    assert str(error.value) == (
        "a DistributedDataParallel is in join(), in which a compiled step takes no part; leave "
        "join() out, and give all ranks as many batches, as a DistributedSampler does"
    )
    wrapped._join_config = wrapped._join_config._replace(enable=False)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(errors.ArgumentError) as error:
        found.refuse_changed_wrappers()
    assert str(error.value) == (
        "the communication hook fp16_compress_hook was registered after amp_ir.jit was called, so "
        "the step does not have it; register it before that, and call amp_ir.jit again"
    )


def test_what_a_step_cannot_exchange_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = replicas([nn.Linear(2, 2)], 2, comm_dtype="bfloat16")
    monkeypatch.setattr(type(ranks.groups[0]), "backend_for", lambda self, device_type: "gloo")
    with pytest.raises(errors.OptionError) as option:
        check_exchange(ranks, is_cuda=False, amp_dtype="float16")
    assert str(option.value) == (
        "comm_dtype='bfloat16' and amp_dtype='float16': a step has one low dtype; make them the "
        "same, or leave one out"
    )
    check_exchange(ranks, is_cuda=False, amp_dtype="bfloat16")
    check_exchange(replicas([nn.Linear(2, 2)], 1), is_cuda=True, amp_dtype=None)


def test_a_step_of_several_ranks_is_not_written_to_a_file() -> None:
    planned = pipeline.lower(step_of())
    with pytest.raises(errors.BuildError) as error:
        _check_exportable(planned)
    first = next(one for one in planned.plan.calls if one.name == "all_reduce_start")
    assert str(error.value) == (
        f"the step cannot be written to a file: all_reduce_start ({first.locations[0]}) is a call "
        "of PyTorch's process group, which what runs the file does not have. Write the step of one "
        "rank, without data_parallel= and DistributedDataParallel, or run it with amp_ir.jit on "
        "every rank"
    )


def test_programs_of_other_numbers_of_ranks_are_kept_apart() -> None:
    keys = [key_of(step_of(count=count), {}, cpu())[0] for count in (2, 3)]
    assert keys[0] != keys[1] and keys[0] == key_of(step_of(), {}, cpu())[0]


def contract(**options: Any) -> Contract:
    mod = step_of(**options)
    return contract_of(mod, pipeline.lower(mod).plan, "step (train.py:1)")


def test_contracts_are_compared_item_by_item() -> None:
    first = contract()
    assert Contract.from_bytes(first.to_bytes()) == first == contract()
    assert contract().difference(first) == ""
    other = contract(width=9)
    assert other.digest != first.digest and other.exchange_digest != first.exchange_digest
    assert other.difference(first) == (
        "tensor of the state 1 is 0.weight float32[9, 6], and on rank 0 0.weight float32[8, 6]"
    )
    # Another batch has other ops; what is exchanged is the same.
    longer = contract(rows=5)
    assert longer.digest != first.digest and longer.exchange_digest == first.exchange_digest
    assert longer.difference(first) == ""


def test_steps_that_exchange_nothing_have_no_no_sync() -> None:
    model = nn.Linear(2, 2)
    train = amp_ir.jit(lambda x: model(x).sum(), model=model)
    with pytest.raises(errors.StateError) as error:
        train.no_sync()
    assert str(error.value) == (
        "the step exchanges nothing between ranks, so there is nothing to leave out; pass "
        "data_parallel=True to jit"
    )


def test_a_cast_between_a_start_and_its_wait_is_refused() -> None:
    mod = step_of()
    low = amp_ir.Override(op="amp_ir.all_reduce_start", to="low")
    with pytest.raises(errors.RuleError) as error:
        pipeline.lower(amp_ir.autocast(mod, None, amp_dtype="bfloat16", overrides=(low,)))
    first = next(iter(Dataflow(mod.ir).calls("amp_ir.all_reduce_start").values()))
    assert str(error.value) == (
        f"amp_ir.all_reduce_start in {from_span(first.span)} sends bfloat16, and amp_ir.cast reads "
        "what is on its way before amp_ir.all_reduce_wait has it: rules or overrides give the two "
        'other dtypes. Select both: Override(op="amp_ir.all_reduce_*", to=...)'
    )
    both = amp_ir.Override(op="amp_ir.all_reduce_*", to="low")
    pipeline.lower(amp_ir.autocast(mod, None, amp_dtype="bfloat16", overrides=(both,)))


def test_a_gradient_that_is_differentiated_again_is_refused() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward(create_graph=True)
        optimizer.step()
        return loss.detach()

    capture: Callable[[], Any] = lambda: captured(step, (torch.ones(2, 3),), [model], [optimizer])  # noqa: E731
    with pytest.raises(
        errors.CaptureError, match="reduces gradients that are differentiated again"
    ):
        capture()


@pytest.mark.parametrize("kind", ["in place", "functional"])
@pytest.mark.usefixtures("group_of_one")
def test_exchanges_of_the_steps_own_are_refused(kind: str) -> None:
    """A functional collective was called without a word, and not waited for."""
    model = nn.Linear(3, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        mean = loss.detach().clone()
        if kind == "functional":
            return functional_collectives.all_reduce(mean, "sum", dist.group.WORLD) * 1.0
        dist.all_reduce(mean)
        return mean

    with pytest.raises(errors.CaptureError) as refused:
        amp_ir.jit(step, model=model)(torch.ones(2, 3))
    op = "_c10d_functional.all_reduce" if kind == "functional" else "c10d.allreduce_"
    line = step.__code__.co_firstlineno + (5 if kind == "functional" else 6)
    assert str(refused.value) == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward), {__file__}:{line}: {op}.default exchanges tensors between ranks: a "
        "compiled step exchanges gradients, buffers of DistributedDataParallel and statistics of "
        "SyncBatchNorm only. Return the tensor, and call torch.distributed on it after the step; "
        "gradients are averaged by a DistributedDataParallel in model=, or with data_parallel=True"
    )


@pytest.mark.usefixtures("group_of_one")
def test_a_step_of_several_ranks_is_not_verified() -> None:
    """It ended in a KeyError of the wrapper's names."""
    model = nn.Linear(3, 2)
    wrapped = DistributedDataParallel(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.ones(2, 3),)
    with pytest.raises(errors.OptionError) as refused:
        amp_ir.verify(square_step(wrapped, optimizer), batch, model=wrapped, optimizer=optimizer)
    assert str(refused.value) == (
        "the step is run again here on this rank alone, and a DistributedDataParallel in model= "
        "exchanges gradients with others; pass a step that calls the model inside of it, "
        "model.module, and that module in model="
    )
    assert amp_ir.verify(square_step(model, optimizer), batch, model=model, optimizer=optimizer)
