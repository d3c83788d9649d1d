# SPDX-License-Identifier: Apache-2.0
"""Which kernel each value of a step is computed in, without writing any kernel."""

from __future__ import annotations

from typing import Any

import attrs
import tvm
from tvm import relax

from amp_ir.loops.fuse import group_values
from amp_ir.loops.grouping import Group, Grouping, storage_of
from amp_ir.loops.ir import Pointwise, Value


@attrs.frozen
class Membership:
    """The kernel or library call that computes a value, and whether it does nothing but cast."""

    kernel: int
    only_casts: bool


def memberships(ir: tvm.IRModule) -> dict[relax.Var, Membership]:
    """The place of every bound value that gets computed in a kernel or by a library call.

    Views, and values that each reader computes anew, are in no kernel of their own and are left
    out. Of several results the first one counts.

    Requires: as `fuse_loops`.
    """
    values, grouping = group_values(ir)
    found = {}
    for variable, value in values.items():
        place = _place(grouping, value)
        if place is not None:
            found[variable] = place
    return found


def _place(grouping: Grouping, value: Any) -> Membership | None:
    while isinstance(value, tuple) and value:
        value = value[0]
    if not isinstance(value, Value):
        return None
    owner = storage_of(value)
    group = grouping.group_of.get(id(owner))
    if group is not None:
        is_made = group.stored and any(owner is one for one in group.members)
        return Membership(group.number, _only_casts(grouping, group)) if is_made else None
    unit = grouping.unit_of(owner)
    return None if unit is None else Membership(unit, False)


def _only_casts(grouping: Grouping, group: Group) -> bool:
    # A kernel that reads nothing fills memory with a number, and would in any dtype.
    return bool(group.inputs) and not any(_computes(grouping, one) for one in group.members)


def _computes(grouping: Grouping, value: Value) -> bool:
    """Whether a member of a group does more than cast, itself or by what it computes anew."""
    if not isinstance(value, Pointwise):
        return True
    # Lowerings mark arithmetic that readers are to do anew as views; moves have one source.
    is_move = id(value) not in grouping.group_of and len({id(one.value) for one in value.reads}) < 2
    if not (value.is_cast or is_move):
        return True
    anew = [one.value for one in value.reads if isinstance(one.value, Pointwise)]
    return any(one.is_view and _computes(grouping, one) for one in anew)
