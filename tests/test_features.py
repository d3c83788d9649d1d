# SPDX-License-Identifier: Apache-2.0
"""docs/features.md: every row names what exists and a test that proves it."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import amp_ir
import feature_table
from feature_table import FEATURES, PAGE, STATUSES, SYSTEMS, Feature

TESTS = Path(__file__).resolve().parent


def object_of(name: str) -> Any:
    """What a dotted name below amp_ir is."""
    found: Any = amp_ir
    path = "amp_ir"
    for part in name.split("."):
        path += f".{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def missing_name(name: str) -> str:
    """Say what of "name" or "name(option)" does not exist, "" if it all does."""
    function, _, option = name.rstrip(")").partition("(")
    try:
        found = object_of(function)
    except (ImportError, AttributeError) as error:
        return f"{name}: {error}"
    if not option:
        return ""
    options = inspect.signature(found).parameters
    return "" if option in options else f"{name}: there is no such option"


@functools.cache
def defined_in(file: str) -> frozenset[str]:
    path = TESTS / file
    if not path.is_file() or not path.name.startswith("test_"):
        return frozenset()
    body = ast.parse(path.read_text()).body
    functions = (one.name for one in body if isinstance(one, ast.FunctionDef))
    return frozenset(name for name in functions if name.startswith("test_"))


def errors_of(one: Feature) -> list[str]:
    errors = [error for name in one.names if (error := missing_name(name))]
    file, _, function = one.test.partition("::")
    if one.test and function not in defined_in(file):
        errors.append(f"there is no test {one.test}")
    if one.status in ("yes", "other") and not one.test:
        errors.append("there is no test")
    if one.status not in STATUSES or one.system not in SYSTEMS or not one.ours:
        errors.append("status, system or reason is missing")
    return errors


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_names_what_exists_and_its_test(system: str):
    errors = {one.theirs: errors_of(one) for one in FEATURES if one.system == system}
    assert not {row: found for row, found in errors.items() if found}


def test_no_feature_stands_twice():
    rows = [(one.system, one.theirs) for one in FEATURES]
    assert len(rows) == len(set(rows)) >= 80


def test_the_page_is_the_table():
    assert PAGE.read_text() == feature_table.page(), (
        "write it again: python tests/support/feature_table.py"
    )


def test_what_is_missing_is_found():
    row = Feature("RAF", "x", "yes", "y", ("none", "jit(none)"), "test_features.py::test_none")
    errors = errors_of(row)
    assert len(errors) == 3 and re.match("none: ", errors[0]) and "no such option" in errors[1]
    assert errors[2] == "there is no test test_features.py::test_none"
