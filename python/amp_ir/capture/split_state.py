# SPDX-License-Identifier: Apache-2.0
"""Replace what the optimizers hold by this rank's part of it, where the ranks split it."""

from __future__ import annotations

from collections.abc import Iterator

from amp_ir.capture.state import State
from amp_ir.distributed.replicas import Ranks
from amp_ir.distributed.shards import Candidate, Shards
from amp_ir.distributed.split_optimizers import shards_of
from amp_ir.errors import ShardingError


def split_state(state: State, ranks: Ranks | None) -> None:
    """Give each rank its part of the optimizers' state, where the step is to split it.

    The layout of another step of the same optimizers is kept. The optimizers hold what they held
    until the parts are installed, after the first run. What is a part already, of an earlier
    capture, stays.

    Raises:
        ShardingError: an optimizer keeps statistics of whole tensors; lists all of them. Or its
            state is split already, and not as this step would.
    """
    before = {id(one): one for o in state.optimizers if (one := shards_of(o)) is not None}
    shards = None if ranks is None else ranks.shards
    if ranks is None or shards is None:
        if before:
            raise ShardingError(
                "an optimizer of this step holds this rank's part of its state, as another step "
                "with shard= left it; pass data_parallel=True and shard= to amp_ir.jit or "
                "trace_step here too. For a tool that takes neither, as amp_ir.verify, make model "
                "and optimizer anew, and load amp_ir.gather_state_dict(optimizer) into that one"
            )
        return
    for one in before.values():
        if not shards.adopt(one):
            raise ShardingError(
                "optimizers of this step have split their state in other steps, apart or over "
                "another process group, and the parts do not fit together; make models and "
                "optimizers anew, load amp_ir.gather_state_dict(optimizer) into each, and call "
                "this step before the others"
            )
    state.shards = shards
    shards.lay_out(list(_candidates(state, ranks)))
    _refuse_statistics(state, shards)
    owned = {id(entry.tensor): entry.tensor for entry in state.parameters}
    fresh = {(index, id(parameter), key) for index, parameter, key in state.fresh}
    for (index, key_of), by_key in state.optimizer_state.items():
        parameter = owned[key_of]
        for key, entry in by_key.items():
            if not shards.is_split(parameter, entry.tensor):
                continue
            entry.like = parameter
            if shards.parameter_of(entry.tensor) is not None:
                continue
            whole, entry.tensor = entry.tensor, shards.part_of(parameter, entry.tensor)
            if (index, key_of, key) not in fresh:
                # The optimizer has it, and gets the part instead of it.
                state.wholes[id(entry.tensor)] = whole
                state.fresh.append((index, parameter, key))


def _candidates(state: State, ranks: Ranks) -> Iterator[Candidate]:
    """Return the parameters whose state may be split, in the order of the optimizers."""
    replicas = {
        id(parameter): (k, replica)
        for k, replica in enumerate(ranks.replicas)
        if replica.group.size > 1
        for _, parameter in replica.parameters()
    }
    for index, optimizer in enumerate(state.optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in replicas or parameter.dim() == 0 or not parameter.numel():
                    continue
                number, replica = replicas[id(parameter)]
                yield Candidate(
                    parameter,
                    ranks.index_of(replica.group),
                    (index, number, parameter.dtype),
                    replica.sizes,
                )


def _refuse_statistics(state: State, shards: Shards) -> None:
    owned = {id(entry.tensor): entry.tensor for entry in state.parameters}
    wrong: dict[str, list[str]] = {}
    for (index, key_of), by_key in state.optimizer_state.items():
        parameter = owned[key_of]
        if shards.place_of(parameter) is None:
            continue
        for entry in by_key.values():
            if entry.tensor.numel() > 1 and not shards.is_split(parameter, entry.tensor):
                name = type(state.optimizers[index]).__name__
                wrong.setdefault(name, []).append(f"{entry.name} {list(entry.tensor.shape)}")
    if wrong:
        listed = "; ".join(f"{name} keeps {', '.join(held[:3])}" for name, held in wrong.items())
        raise ShardingError(
            f"shard={shards.kind!r} splits state of the shape of its parameter, and {listed}; "
            "leave shard= out for this optimizer"
        )
