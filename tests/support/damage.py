# SPDX-License-Identifier: Apache-2.0
"""Ways to damage a file, drawn from a seed: its bytes, its JSON values, its zip entries."""

from __future__ import annotations

import copy
import io
import json
import random
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any


def damaged_bytes(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """The content with one of nine kinds of damage; `other` is what another file holds."""
    at, end = sorted(rng.choices(range(len(content) + 1), k=2))
    middle = content[at:end]
    kinds: list[Callable[[], bytes]] = [
        lambda: _flipped(content, rng, 1),
        lambda: _flipped(content, rng, rng.randint(2, 40)),
        lambda: content[:at],
        lambda: content + rng.randbytes(rng.randint(1, 300)),
        lambda: content[:at] + bytes(len(middle)) + content[end:],
        lambda: content[:at] + rng.randbytes(len(middle)) + content[end:],
        lambda: content[:at] + content[end:],
        lambda: content[:end] + middle + content[end:],
        lambda: rng.choice([b"", b"\x80", b"{", b"null", other, content + other, other + content]),
    ]
    return rng.choice(kinds)()


def _flipped(content: bytes, rng: random.Random, count: int) -> bytes:
    changed = bytearray(content)
    for _ in range(count):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


STRANGE: list[Any] = [
    None, True, -1, 0, 1e300, 10**30, "", "float99", "\ud800", [], {}, [[]], {"a": None},
]  # fmt: skip


def damaged_document(document: Any, rng: random.Random) -> Any:
    """The JSON document with a key dropped, renamed, added, or a value of another kind."""
    changed = copy.deepcopy(document)
    holder, key = rng.choice(list(_places(changed)))
    kinds: list[Callable[[], None]] = [
        lambda: holder.__setitem__(key, rng.choice(STRANGE)),
        lambda: holder.__setitem__(key, _other_value(holder[key], rng)),
        lambda: holder.__delitem__(key),
        lambda: _renamed(holder, key),
        lambda: holder.__setitem__(key, [holder[key]]),
        lambda: holder.__setitem__(key, copy.deepcopy(document)),
    ]
    rng.choice(kinds)()
    return changed


def deeply_nested(text: str, rng: random.Random) -> str:
    """JSON text in which a value is nested more deeply than parsers go."""
    depth = rng.choice([900, 5000, 100_000])
    inside = text[:-1] + ', "a": ' + "[" * depth
    return rng.choice(["[" * depth + "]" * depth, '{"a":' * depth, inside])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def _other_value(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + rng.choice([-3, -1, 1, 2, 1000])
    if isinstance(value, str):
        return rng.choice([value + "x", value[:-1], value.upper()])
    return rng.choice(STRANGE)


def _renamed(holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
    else:
        holder.insert(key, copy.deepcopy(holder[key]))


def damaged_zip(content: bytes, rng: random.Random) -> bytes:
    """The zip file written again with an entry removed, renamed, doubled, changed or exchanged.

    Every CRC is right. Half of the files keep the archive's comment.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
        comment = archive.comment
    at, by = rng.sample(range(len(entries)), 2)
    (name, value), (other_name, other_value) = entries[at], entries[by]
    kinds: list[Callable[[], None]] = [
        lambda: entries.__delitem__(at),
        lambda: entries.__setitem__(at, (f"{name}_", value)),
        lambda: entries.append((name, other_value)),
        lambda: entries.__setitem__(at, (name, other_value)),
        lambda: entries.__setitem__(at, (name, _flipped(value or b"\0", rng, 1))),
        lambda: entries.__setitem__(slice(None), entries[::-1]),
        lambda: entries.__setitem__(at, (other_name, value)),
    ]
    rng.choice(kinds)()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a doubled name
        for one, data in entries:
            archive.writestr(one, data)
        archive.comment = comment if rng.random() < 0.5 else b""
    return made.getvalue()


def damaged_json(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """A file of JSON, damaged in its values, its nesting, or its bytes."""
    draw = rng.random()
    if draw < 0.4:
        return damaged_bytes(content, other, rng)
    if draw < 0.5:
        return deeply_nested(content.decode().rstrip(), rng).encode()
    return json.dumps(damaged_document(json.loads(content), rng)).encode()
