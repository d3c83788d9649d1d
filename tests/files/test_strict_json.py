# SPDX-License-Identifier: Apache-2.0
"""Reports in JSON hold no word that JSON does not have."""

from __future__ import annotations

import json
import math

import pytest

from amp_ir.files.strict_json import strict_json


def refused(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_infinities_and_nan_are_strings_that_python_reads_as_such():
    given = {"a": math.inf, "b": [-math.inf, (math.nan, 1.5)], "c": {"d": True, "e": None}}
    found = json.loads(strict_json(given), parse_constant=refused)
    assert found["a"] == "Infinity"
    assert found["b"][0] == "-Infinity"
    assert found["b"][1] == ["NaN", 1.5]
    assert found["c"] == {"d": True, "e": None}
    assert float(found["a"]) == math.inf
    assert math.isnan(float(found["b"][1][0]))


@pytest.mark.parametrize("number", [0, 1.5, -3, 1e300, True])
def test_other_numbers_stay(number):
    assert json.loads(strict_json(number)) == number
