# SPDX-License-Identifier: Apache-2.0
"""The options of a call as plain fields, and the attribute that autocast leaves on a function."""

from __future__ import annotations

from typing import Any

import tvm

# Marks a function that went through autocast, with its low dtype.
AMP_DTYPE = "amp_ir.amp_dtype"


def attribute_fields(attributes: tvm.ir.Attrs) -> tuple[str, dict[str, Any]]:
    """Return the kind of an attribute node and its fields."""
    if isinstance(attributes, tvm.ir.attrs.DictAttrs):
        return "ir.DictAttrs", dict(attributes)
    info = type(attributes).__dict__["__tvm_ffi_type_info__"]
    return info.type_key, {field.name: getattr(attributes, field.name) for field in info.fields}
