# SPDX-License-Identifier: Apache-2.0
"""The key of a built step: a SHA-256 over everything that decides what building it gives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import attrs
import tvm

from amp_ir.compile_cache.environment import environment
from amp_ir.ir.step_module import InputSpec, OutputSpec, StepModule
from amp_ir.ir.target import CompileTarget


def key_of(
    mod: StepModule, options: Mapping[str, Any], target: CompileTarget
) -> tuple[str, dict[str, Any]]:
    """Return the key, 64 hexadecimal digits, and what it is the digest of, as JSON holds it.

    The program is TVM's own JSON of it: every op with its attributes, types and places, every
    constant, floats in full. `lower` reads it, the signature, the options and the target, and of
    the step nothing else: not the state, whose values are inputs, nor the plan of the casts, which
    the program has in it.

    Raises:
        UnknownEnvironmentError: something that decides it cannot be told.
    """
    parts = {
        "program": hashlib.sha256(tvm.ir.save_json(mod.ir).encode()).hexdigest(),
        "inputs": [_spec(one) for one in mod.signature.inputs],
        "outputs": [_spec(one) for one in mod.signature.outputs],
        "options": {name: _plain(value) for name, value in options.items()},
        "environment": environment(target),
    }
    # As an entry that is read back has it: lists for tuples, text for keys.
    parts = json.loads(json.dumps(parts))
    return digest_of(parts), parts


def digest_of(parts: dict[str, Any]) -> str:
    """Return the key that belongs to the parts."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return an option as JSON has it; a device or a number of NumPy's is text then."""
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def _spec(one: InputSpec | OutputSpec) -> list[Any]:
    return [*attrs.astuple(attrs.evolve(one, role=one.role.value))]  # type: ignore[arg-type]
