# SPDX-License-Identifier: Apache-2.0
"""Models of which every rank has a copy: what a step exchanges for them, and when.

A `DistributedDataParallel` decides by its own options and flags; its module is what is captured,
and its hooks and its reducer do not run. A plain model is a replica by `data_parallel=True`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.nn.parallel import DistributedDataParallel

from amp_ir.distributed.process_group import Group, remember_splitting, world_size
from amp_ir.distributed.rank_options import (
    DEFAULT_SIZES,
    check_comm_dtype,
    check_shard,
    refuse_given,
    sizes_of,
)
from amp_ir.distributed.shards import Shards
from amp_ir.errors import ArgumentError, OptionError
from amp_ir.ir.bucket_sizes import BucketSizes
from amp_ir.ir.options import dtype_name

# Communication hooks that are a dtype on the wire, by the names that PyTorch logs.
_DTYPE_OF_HOOK = {
    "": "",
    "allreduce_hook": "",
    "fp16_compress_hook": "float16",
    "bf16_compress_hook": "bfloat16",
    "BuiltinCommHookType.ALLREDUCE": "",
    "BuiltinCommHookType.FP16_COMPRESS": "float16",
}
_HOOK_ADVICE = (
    "register fp16_compress_hook, bf16_compress_hook or none, and for a reduced dtype pass "
    "comm_dtype="
)


@attrs.define(eq=False)
class Replica:
    """A model whose copies on all ranks train together.

    `syncs` is whether the next backward pass reduces gradients, and `sends_buffers` whether the
    next forward pass begins with rank 0's buffers: the flags `require_backward_grad_sync` and
    `require_forward_param_sync` of a `wrapper`. `ignored` are names of parameters and buffers that
    a wrapper leaves alone.
    """

    module: torch.nn.Module
    group: Group
    wrapper: DistributedDataParallel | None = None
    comm_dtype: str = ""
    sizes: BucketSizes = DEFAULT_SIZES
    has_buffers: bool = True
    ignored: frozenset[str] = frozenset()
    # The communication hooks of a wrapper when the step was made.
    hooks: int = 0
    _syncs: bool = True
    _sends_buffers: bool = True

    @property
    def syncs(self) -> bool:
        """Whether the next backward pass reduces gradients."""
        if self.wrapper is not None:
            return bool(self.wrapper.require_backward_grad_sync)
        return self._syncs

    @property
    def sends_buffers(self) -> bool:
        """Whether the next forward pass begins with rank 0's buffers."""
        if self.wrapper is not None:
            return bool(self.wrapper.require_forward_param_sync)
        return self._sends_buffers

    @sends_buffers.setter
    def sends_buffers(self, value: bool) -> None:
        if self.wrapper is not None:
            self.wrapper.require_forward_param_sync = value
        else:
            self._sends_buffers = value

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters whose gradients are reduced, by name."""
        named = self.module.named_parameters()
        return [(name, one) for name, one in named if name not in self.ignored]

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers that rank 0 sends, by name."""
        if not self.has_buffers:
            return []
        named = self.module.named_buffers()
        return [(name, one) for name, one in named if name not in self.ignored]


@attrs.define(eq=False)
class Ranks:
    """All replicas of a step, and the groups of their ranks.

    `models` are those of the step as they are captured: wrappers replaced by their modules.
    """

    models: list[torch.nn.Module]
    replicas: list[Replica]
    groups: list[Group]
    # The step's name, the same on all ranks.
    step: str = "step"
    # Whether this rank's plain models have rank 0's values yet.
    are_alike: bool = False
    # Made with the first program; see agreement.py.
    agreement: Any = attrs.field(default=None, repr=False)
    # How the optimizers' state is split over the ranks; None: every rank holds all of it.
    shards: Shards | None = attrs.field(default=None, repr=False)
    # Whether the other ranks are imagined: the program is theirs, and nothing is sent.
    are_simulated: bool = False

    @property
    def exchanges(self) -> bool:
        """Whether there is another rank to exchange anything with."""
        return any(group.size > 1 for group in self.groups)

    def index_of(self, group: Group) -> int:
        """Return the number by which ops name a group."""
        return self.groups.index(group)

    def replica_of(self, module: object) -> Replica | None:
        """Return the replica that a wrapper, or a plain model, is called for."""
        for one in self.replicas:
            if module is one.wrapper or (one.wrapper is None and module is one.module):
                return one
        return None

    def refuse_changed_wrappers(self) -> None:
        """Require that wrappers do what they did when the step was made.

        Raises:
            ArgumentError: one does more now, which a compiled step would leave out.
        """
        for one in self.replicas:
            if one.wrapper is not None and one.group.size > 1:
                _refuse_unsupported(one.wrapper)
                if len(one.wrapper._comm_hooks) != one.hooks:
                    raise ArgumentError(
                        f"the communication hook {_hook_of(one.wrapper)} was registered after "
                        "amp_ir.jit was called, so the step does not have it; register it before "
                        "that, and call amp_ir.jit again"
                    )

    def flags(self) -> tuple[tuple[bool, bool], ...]:
        """Return what a capture depends on: `syncs` and `sends_buffers` of each replica."""
        return tuple((one.syncs, one.sends_buffers) for one in self.replicas)

    def flags_in_words(self, before: Sequence[tuple[bool, bool]]) -> Iterator[str]:
        """Describe each flag that differs from `before`."""
        for k, (was, now) in enumerate(zip(before, self.flags(), strict=True)):
            if was[0] != now[0]:
                is_off = "outside of" if now[0] else "inside of"
                yield f"model {k} is {is_off} no_sync() now"
            if was[1] != now[1]:
                yield f"whether model {k} begins with rank 0's buffers was {was[1]} and is {now[1]}"

    def after_step(self, sends_buffers: Sequence[bool]) -> None:
        """Leave each replica's flag as the step leaves it."""
        for replica, sends in zip(self.replicas, sends_buffers, strict=True):
            replica.sends_buffers = sends

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of every replica on each rank inside."""
        with contextlib.ExitStack() as stack:
            for one in self.replicas:
                if one.wrapper is not None:
                    stack.enter_context(one.wrapper.no_sync())
                else:
                    stack.callback(setattr, one, "_syncs", one._syncs)
                    one._syncs = False
            yield


def find_ranks(
    model: Any,
    *,
    process_group: Any = None,
    data_parallel: bool = False,
    comm_dtype: str | torch.dtype | None = None,
    bucket_cap_mb: float | None = None,
    shard: str | None = None,
    simulated: Group | None = None,
    step: str = "step",
) -> tuple[Any, Ranks | None]:
    """Return the models to capture, and their replicas; None where ranks exchange nothing.

    `step` names the step for the other ranks. `simulated` is a group without a handle, whose ranks
    are not there: all models train in it.

    Raises:
        OptionError, ArgumentError: an option cannot be honoured; says what to do.
    """
    dtype: str | None = dtype_name(comm_dtype)
    check_comm_dtype(dtype)
    check_shard(shard)
    sizes = sizes_of(bucket_cap_mb)
    is_list = isinstance(model, (list, tuple))
    given = list(model) if is_list else [model]
    wrappers = _wrappers(given)
    if not (data_parallel or wrappers or simulated):
        refuse_given(
            {
                "process_group=": process_group,
                "comm_dtype=": comm_dtype,
                "bucket_cap_mb=": bucket_cap_mb,
                "shard=": shard,
            },
            "no model is a DistributedDataParallel; pass data_parallel=True too",
        )
        return model, None
    models = [one.module if isinstance(one, DistributedDataParallel) else one for one in given]
    groups: list[Group] = []
    replicas = [
        _of_wrapper(one, _known(groups, simulated or Group.of(one.process_group)), dtype)
        for one in wrappers
    ]
    if data_parallel or simulated:
        group = _known(groups, simulated or Group.of(process_group))
        plain = [one for one in given if isinstance(one, torch.nn.Module)]
        plain = [one for one in plain if not _wrappers([one])]
        replicas += [Replica(one, group, None, dtype or "", sizes) for one in plain]
    else:
        refuse_given(
            {"process_group=": process_group, "bucket_cap_mb=": bucket_cap_mb},
            "a DistributedDataParallel has its own; leave it out",
        )
    _check_modules(replicas)
    found = models if is_list else models[0]
    ranks = Ranks([*models], replicas, groups, step, are_simulated=simulated is not None)
    if shard is not None and len(groups) > 1:
        raise OptionError(
            f"shard={shard!r} splits state over one process group, and the models of this step "
            f"have {len(groups)}; give them one, or leave it out"
        )
    if shard is not None and ranks.exchanges:
        ranks.shards = Shards(shard, groups)
        remember_splitting([*given, *models], groups[0])
    return found, ranks


def _wrappers(models: Sequence[Any]) -> list[DistributedDataParallel]:
    modules = [m for one in models if isinstance(one, torch.nn.Module) for m in one.modules()]
    found = [one for one in modules if isinstance(one, DistributedDataParallel)]
    return list(dict.fromkeys(found))


def _known(groups: list[Group], group: Group) -> Group:
    for one in groups:
        if one.handle is group.handle:
            return one
    groups.append(group)
    return group


def _of_wrapper(wrapper: DistributedDataParallel, group: Group, comm_dtype: str | None) -> Replica:
    hook = _hook_of(wrapper)
    if hook not in _DTYPE_OF_HOOK:
        raise ArgumentError(
            f"a DistributedDataParallel has the communication hook {hook}, which a compiled step "
            f"does not call; {_HOOK_ADVICE}"
        )
    _refuse_unsupported(wrapper)
    # PyTorch takes 0 for a bucket of each gradient.
    cap = max(1, int(wrapper.bucket_bytes_cap))
    return Replica(
        wrapper.module,
        group,
        wrapper,
        _DTYPE_OF_HOOK[hook] or comm_dtype or "",
        DEFAULT_SIZES if wrapper.bucket_bytes_cap_default else BucketSizes(cap, cap),
        bool(wrapper.broadcast_buffers),
        frozenset(wrapper.parameters_to_ignore),
        len(wrapper._comm_hooks),
    )


def _hook_of(wrapper: DistributedDataParallel) -> str:
    """Return the name of a wrapper's communication hook; "" for none."""
    if wrapper._comm_hooks:
        hook = wrapper._comm_hooks[-1][0]
        return str(getattr(hook, "__qualname__", type(hook).__qualname__))
    # Built-in hooks are of the reducer, in C++.
    return str(wrapper._get_ddp_logging_data().get("comm_hook") or "")


def _refuse_unsupported(wrapper: DistributedDataParallel) -> None:
    if wrapper._join_config.enable:
        raise ArgumentError(
            "a DistributedDataParallel is in join(), in which a compiled step takes no part; leave "
            "join() out, and give all ranks as many batches, as a DistributedSampler does"
        )
    unsupported = next(_unsupported(wrapper), None)
    if unsupported is not None:
        raise ArgumentError(
            f"a DistributedDataParallel has {unsupported}, which a compiled step does not do; make "
            "it without"
        )


def _unsupported(wrapper: DistributedDataParallel) -> Iterator[str]:
    if getattr(wrapper, "mixed_precision", None) is not None:
        yield "mixed_precision="
    if getattr(wrapper, "_delay_all_reduce_params", None):
        yield "delay_all_reduce_named_params="
    if hasattr(wrapper, "buffer_hook"):
        yield "a hook for its buffers"


def _check_modules(replicas: Sequence[Replica]) -> None:
    """Refuse modules and hooks that exchange tensors, or read gradients before that.

    Raises:
        ArgumentError: listing every place.
    """
    wrong = []
    for replica in replicas:
        for name, module in replica.module.named_modules():
            is_synced = isinstance(module, torch.nn.SyncBatchNorm) and replica.group.size > 1
            if is_synced and replica.group.handle is not None:
                handle = module.process_group or torch.distributed.group.WORLD
                if handle is not replica.group.handle:
                    wrong.append(
                        f"{name or 'the model'} is a SyncBatchNorm of another process group than "
                        "its model; convert it with the model's: "
                        "SyncBatchNorm.convert_sync_batchnorm(model, process_group)"
                    )
        for name, parameter in replica.parameters():
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                wrong.append(
                    f"{name} has a hook after its gradient is accumulated, which would see this "
                    "rank's gradient only; do what it does after backward()"
                )
    if wrong:
        raise ArgumentError("; ".join(wrong))


def warn_of_ranks_apart() -> None:
    """Warn, once, where a step that exchanges nothing trains in a group of several ranks."""
    if world_size() > 1:
        _warn_of(world_size())


@functools.cache
def _warn_of(count: int) -> None:
    warnings.warn(
        f"torch.distributed has a group of {count} processes, and this step exchanges nothing with "
        "the others: each rank trains a model of its own. Pass data_parallel=True, or a "
        "DistributedDataParallel in model= that the step calls",
        UserWarning,
        stacklevel=2,
    )
