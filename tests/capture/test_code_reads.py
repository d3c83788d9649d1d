# SPDX-License-Identifier: Apache-2.0
"""What a function's bytecode names is found, whichever instructions a version of Python has."""

from __future__ import annotations

from typing import Any

from amp_ir.capture.guards.code_reads import reads_of

LIMIT, ROWS = 1, ()
count = 0


class Base:
    """Something to inherit from."""

    rate = 1.0

    def scaled(self, factor: float) -> float:
        return factor


class Derived(Base):
    """Reads through `super`."""

    def read(self) -> Any:
        return super().rate * super().scaled(2.0)


def loads(options: Any) -> Any:
    kept = [row.name for row in ROWS if row.size > LIMIT]
    text = f"{options.title:{options.width}}"
    lazy = (lambda: options.later)()
    return options.first, options.method(text), kept, lazy


def stores(options: Any) -> None:
    global count
    count = 1
    options.new = options.old
    options.sum += 1
    del options.gone
    options.entries["a"] = count


def test_attributes_and_globals_in_expressions_comprehensions_and_lambdas() -> None:
    found = reads_of(loads.__code__)
    expected = {"name", "size", "title", "width", "later", "first", "method"}
    assert found.attributes == expected
    assert {"ROWS", "LIMIT"} == found.global_names
    assert not found.attribute_stores and not found.global_stores and not found.traverses


def test_stores_have_their_lines_and_order() -> None:
    found = reads_of(stores.__code__)
    first = stores.__code__.co_firstlineno
    assert found.attribute_stores == {"new": first + 3, "sum": first + 4, "gone": first + 5}
    assert found.global_stores == {"count": first + 2}
    assert found.entry_lines == [first + 6]
    assert found.attributes == {"old", "sum", "entries"}
    assert found.stored_first == {"count", "new", "gone"}


def test_attributes_through_super() -> None:
    assert reads_of(Derived.read.__code__).attributes >= {"rate", "scaled"}


def test_closure_variables_of_functions_and_of_class_bodies() -> None:
    in_function, in_class, written, passed_on = 1.0, 2.0, 3.0, 4.0

    def step() -> Any:
        nonlocal written
        written = in_function

        class Local:
            rate = in_class

        def inner() -> float:
            return passed_on

        return Local, inner

    found = reads_of(step.__code__)
    assert found.cell_loads == {"in_function", "in_class", "passed_on"}
    assert found.cell_stores == {"written": step.__code__.co_firstlineno + 2}
    assert found.stored_first == {"written"}
