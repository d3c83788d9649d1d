# SPDX-License-Identifier: Apache-2.0
"""Machine code of kernels on disk: a step that is new takes what others have compiled.

An entry is an object file with some kernels, after two lines: the digest of all that follows it,
and the key of each kernel by its name, in JSON. The entry is found under each of the keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import attrs
import tvm

from amp_ir.files.private_cache import PrivateCache
from amp_ir.vm.build_library import KernelObject
from amp_ir.vm.kernel_libraries import Functions


@attrs.frozen
class StoredKernels:
    """Objects of kernels, for processes in which `environment`, a digest, is the same."""

    files: PrivateCache
    environment: str

    def keys(self, kernels: Functions, compiled_for: str) -> dict[str, str]:
        """Return a key of each kernel by its name: a digest of TVM's own JSON of it.

        The JSON has every literal in full. It has the names of variables, too, which decide
        nothing; the same source makes the same ones.
        """
        # A list and an object of JSON one after the other: where one ends is in their text.
        outside = json.dumps([self.environment, compiled_for])
        return {
            variable.name_hint: _sha256((outside + tvm.ir.save_json(function)).encode())
            for variable, function in kernels.items()
        }

    def find(self, keys: Mapping[str, str], linked: Sequence[KernelObject]) -> list[KernelObject]:
        """Return objects of which at least half of the kernels are asked for.

        One that is mostly of other steps would enlarge the library of this one, to save little.

        Ensures: no kernel's name is in two of those and `linked`.
        """
        taken = {name for one in linked for name in one.key_by_name}
        found = []
        for name, key in keys.items():
            one = None if name in taken else self._read(key)
            if one is None or one.key_by_name.get(name) != key or taken & one.key_by_name.keys():
                continue
            wanted = sum(keys.get(other) == its_key for other, its_key in one.key_by_name.items())
            # Another kernel of that name could not be linked beside it.
            is_mixed = any(keys.get(other, its) != its for other, its in one.key_by_name.items())
            if 2 * wanted >= len(one.key_by_name) and not is_mixed:
                taken |= one.key_by_name.keys()
                found.append(one)
        return found

    def put(self, made: Sequence[KernelObject]) -> None:
        """Keep objects; where one cannot be kept, that is logged once."""
        for one in made:
            sealed = json.dumps(dict(one.key_by_name)).encode() + b"\n" + one.content
            first, *others = one.key_by_name.values()
            self.files.put(first, _sha256(sealed).encode() + b"\n" + sealed, also=others)

    def _read(self, key: str) -> KernelObject | None:
        """Return the object with a kernel, checked; a damaged one is removed and logged once."""
        content = self.files.get(key)
        if content is None:
            return None
        digest, _, sealed = content.partition(b"\n")
        line, _, code = sealed.partition(b"\n")
        reason = ""
        if digest != _sha256(sealed).encode():
            reason = "the digest of its content is another than it says"
        elif key not in (keys := json.loads(line)).values():
            reason = "it has other kernels than its name says"
        if reason:
            self.files.drop(key, reason)
            return None
        return KernelObject(keys, code)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
