# SPDX-License-Identifier: Apache-2.0
"""The op lists of `convert_model`, after MXNet's: check them, and turn them into overrides.

A name is one of `amp_ir.list_ops()`, with or without what precedes its last dot, or PyTorch's
name of a function ("linear", "conv2d", "scaled_dot_product_attention").
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import tvm

from amp_ir.amp.hints import RULES
from amp_ir.amp.overrides import Override, QuietOverride, call_attributes
from amp_ir.errors import OptionError
from amp_ir.ir.near_names import OP_OF_FUNCTION
from amp_ir.ir.selection import is_inside
from amp_ir.ir.step_graph import Op, read_step

# Names that end in the number of spatial axes, which is the rank of the data less two.
_BY_RANK = {
    "conv": "conv", "conv_transpose": "conv_transpose", "max_pool": "max_pool",
    "avg_pool": "avg_pool", "adaptive_avg_pool": "adaptive_avg_pool",
    "adaptive_max_pool": "adaptive_max_pool",
}  # fmt: skip


@attrs.frozen(kw_only=True)
class OpLists:
    """The lists of ops and modules that run low and that run in float32, as a user writes them."""

    target_dtype_ops: Any = None
    fp32_ops: Any = None
    conditional_fp32_ops: Any = None
    excluded_names: Any = ()

    def overrides(self, ir: tvm.IRModule, modules: Iterable[str]) -> list[Override]:
        """Return the overrides of a program whose modules have these names.

        Later ones win: lists, conditions, excluded modules. What selects no call of this program
        is left out, for a list may serve several models.

        Raises:
            OptionError: everything that is wrong with the lists.
        """
        ops = [op for op in read_step(ir).ops if not op.is_view]
        found = _Found(ops, [name for name in modules if name])
        found.add_list("target_dtype_ops", self.target_dtype_ops, "low")
        found.add_list("fp32_ops", self.fp32_ops, "float32")
        found.add_conditions(self.conditional_fp32_ops)
        found.add_excluded(self.excluded_names)
        found.refuse()
        return [one for one in found.overrides if any(one.matches(op, ()) for op in ops)]


@attrs.define
class _Found:
    ops: list[Op]
    modules: list[str]
    overrides: list[Override] = attrs.field(factory=list)
    errors: list[str] = attrs.field(factory=list)
    # Op, its rank or None, and the list that named it.
    taken: dict[tuple[str, int | None], tuple[str, str]] = attrs.field(factory=dict)

    def add_list(self, label: str, names: Any, to: str) -> None:
        for name in self.strings(label, names):
            for op, rank in self.resolved(label, name):
                self.take(label, name, op, rank)
                self.overrides.append(
                    QuietOverride(to=to, op=op, attributes=_of_rank(rank) or None)
                )

    def add_conditions(self, conditions: Any) -> None:
        label = "conditional_fp32_ops"
        for one in self.entries(label, conditions):
            is_triple = isinstance(one, (tuple, list)) and len(one) == 3
            if not is_triple or isinstance(one[2], str) or not isinstance(one[2], Sequence):
                self.errors.append(
                    f"{label} has {one!r}; expected (op, attribute, [values]), such as "
                    '("softmax", "axis", [1])'
                )
                continue
            name, attribute, values = one
            resolved = list(self.resolved(label, name))
            for op, rank in resolved:
                self.take(label, name, op, rank)
                wanted = {str(attribute): [_as_tuple(value) for value in values]}
                if set(wanted) & set(_of_rank(rank)):
                    wanted[str(attribute)] = [one for one in values if one == rank]
                wanted = {**_of_rank(rank), **wanted}
                self.overrides.append(QuietOverride(to="float32", op=op, attributes=wanted))
            self.check_attribute(str(name), [op for op, _ in resolved], str(attribute))

    def check_attribute(self, name: str, ops: Sequence[str], attribute: str) -> None:
        """Refuse an attribute that the calls of these ops do not have."""
        calls = [op for op in self.ops if op.name in ops]
        known = sorted({key for op in calls for key in call_attributes(op)})
        if calls and attribute not in known:
            self.errors.append(
                f"conditional_fp32_ops: {name!r} has no attribute {attribute!r}; "
                f"it has {', '.join(map(repr, known))}"
            )

    def add_excluded(self, names: Any) -> None:
        for name in self.strings("excluded_names", names):
            if any(is_inside(module, name) for module in self.modules):
                self.overrides.append(QuietOverride(to="float32", module=name))
                continue
            near = _nearest(name, self.modules)
            self.errors.append(f"excluded_names: the model has no module {name!r}{near}")

    def take(self, label: str, name: str, op: str, rank: int | None) -> None:
        """Note the list of an op; lists must be disjoint, but an op may have many conditions."""
        for (other_op, other_rank), (where, called) in self.taken.items():
            is_same = other_op == op and (rank is None or other_rank in (None, rank))
            if (is_same or (other_op == op and other_rank is None)) and where != label:
                self.errors.append(
                    f"{name!r} is in {label}, and {called!r}, the same op, is in {where}; an op "
                    "belongs to one list at most"
                )
                return
        self.taken.setdefault((op, rank), (label, name))

    def resolved(self, label: str, name: Any) -> Iterator[tuple[str, int | None]]:
        """Return the ops that a name stands for, with the rank of their data where it says so."""
        stem, rank = str(name), None
        if stem[-2:] in ("1d", "2d", "3d") and stem[:-2] in _BY_RANK:
            stem, rank = _BY_RANK[stem[:-2]], int(stem[-2]) + 2
        stem = OP_OF_FUNCTION.get(stem, stem)
        found = [op for op in sorted(RULES) if stem in (op, op.rpartition(".")[2])]
        if not found:
            known = sorted({*RULES, *(op.rpartition(".")[2] for op in RULES), *OP_OF_FUNCTION})
            near = _nearest(str(name), known)
            self.errors.append(
                f"{label}: {name!r} is not an op{near}; amp_ir.list_ops() has them all"
            )
        return iter([(op, rank) for op in found])

    def strings(self, label: str, names: Any) -> list[str]:
        entries = self.entries(label, names)
        strangers = [one for one in entries if not isinstance(one, str)]
        self.errors += [f"{label} has {one!r}; expected a name" for one in strangers]
        return [one for one in entries if isinstance(one, str)]

    def entries(self, label: str, entries: Any) -> list[Any]:
        if entries is None:
            return []
        is_one = isinstance(entries, (str, Mapping))
        if is_one or not isinstance(entries, Iterable):
            self.errors.append(f"{label} is {entries!r}; expected a list")
            return []
        return list(entries)

    def refuse(self) -> None:
        if self.errors:
            raise OptionError("; ".join(dict.fromkeys(self.errors)))


def _of_rank(rank: int | None) -> dict[str, list[Any]]:
    return {} if rank is None else {"input_ndim": [rank]}


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f"; near: {', '.join(map(repr, near))}" if near else ""
