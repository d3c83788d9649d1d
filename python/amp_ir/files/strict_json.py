# SPDX-License-Identifier: Apache-2.0
"""Reports as JSON that every reader takes: JSON has no word for an infinite error.

Python writes Infinity and NaN as bare words, which jq, JavaScript and RFC 8259 refuse. As strings
they are what `float(...)` and JavaScript's `Number(...)` read, and jq puts strings after all
numbers, so that `.error > 0.01` holds for an infinite error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_INFINITY, _MINUS_INFINITY, _NAN = "Infinity", "-Infinity", "NaN"


def strict_json(document: Any) -> str:
    """Return a document as indented JSON; infinities and NaN are "Infinity", "-Infinity", "NaN"."""
    return json.dumps(_finite(document), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return _NAN
    return _INFINITY if value > 0 else _MINUS_INFINITY
