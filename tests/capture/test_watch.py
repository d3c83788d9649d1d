# SPDX-License-Identifier: Apache-2.0
"""A watch of dictionaries sees every write, in every version of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import nn

from amp_ir.capture.guards.watch import Dictionary, Items, Watch, counts_every_store, watch

WATCHES = [watch, Items]


class Options:
    """An object whose first attributes lie, in Python 3.13, outside of its dictionary."""

    def __init__(self) -> None:
        self.kind, self.power = "sum", 1000


def store(options: Any) -> None:
    options.kind = "mean"


def store_often(options: Any) -> None:
    for number in range(100):
        options.power = number


def swap(options: Any) -> None:
    options.kind, options.power = options.power, options.kind


WRITES: dict[str, Callable[[Any], Any]] = {
    "store": store,
    "store often": store_often,
    "setattr": lambda options: setattr(options, "kind", "mean"),
    "new": lambda options: setattr(options, "other", None),
    "delete": lambda options: delattr(options, "kind"),
    "swap": swap,
    "entry": lambda options: vars(options).update(kind="mean"),
    "clear": lambda options: vars(options).clear(),
    "rename": lambda options: vars(options).update(other=vars(options).pop("power")),
}


@pytest.mark.parametrize("made", WATCHES)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_one_of_many_is_seen_until_it_is_recorded(
    made: Callable[[Iterable[Dictionary]], Watch], write: Callable[[Any], Any]
) -> None:
    objects = [Options() for _ in range(3)]
    watched = made([*map(vars, objects), vars(objects[0]), {}, {"kind": None}])
    assert watched.hold() and watched.hold()
    write(objects[1])
    assert not watched.hold() and not watched.hold()
    watched.refresh()
    assert watched.hold()


@pytest.mark.parametrize("made", WATCHES)
def test_a_mode_an_attribute_and_a_replaced_tensor_of_a_module_are_seen(
    made: Callable[[Iterable[Dictionary]], Watch],
) -> None:
    layer, dropout = nn.Linear(2, 2), nn.Dropout(0.5)
    watched = made([vars(layer), layer._parameters, vars(dropout)])
    for write in (
        dropout.eval,
        lambda: setattr(dropout, "p", 0.25),
        lambda: setattr(layer, "weight", nn.Parameter(layer.weight.detach())),
    ):
        assert watched.hold()
        write()
        assert not watched.hold()
        watched.refresh()


def test_versions_are_used_only_where_each_kind_of_store_changes_them() -> None:
    assert counts_every_store(lambda own: hash(tuple(own.items())))
    assert not counts_every_store(lambda own: 0)
    assert not counts_every_store(len)
    assert not counts_every_store(lambda own: hash(own.get("value")))
