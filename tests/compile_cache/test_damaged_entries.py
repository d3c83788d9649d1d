# SPDX-License-Identifier: Apache-2.0
"""A damaged entry is removed and made again; a wrong one is never loaded."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from pathlib import Path

import pytest
import torch

from amp_ir.api import cached_build
from amp_ir.compile_cache.cache import compile_cache
from amp_ir.compile_cache.entry import entry_from_bytes
from amp_ir.errors import FileFormatError
from amp_ir.files.sealed_zip import Seal
from amp_ir.ir.built_step import BuiltStep
from cached_steps import TinyTraining, entries, is_loaded
from damage import damaged_bytes, damaged_zip

DAMAGED = 200


def the_entry(folder: Path) -> Path:
    (path,) = entries(folder)
    return path


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, bytes]]:
    """Two entries, of steps that differ in one constant: their keys and bytes."""
    folder = tmp_path_factory.mktemp("contents")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMP_IR_CACHE", str(folder))
        TinyTraining().compiled()
        first = the_entry(folder)
        TinyTraining(factor=0.75).compiled()
    (second,) = set(entries(folder)) - {first}
    return [(one.name, one.read_bytes()) for one in (first, second)]


def mutated(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Flip a bit, cut off, empty, add bytes, swap with another entry, or worse."""
    kind = rng.randrange(8)
    if kind == 0:
        place = rng.randrange(len(content))
        return (
            content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        )
    if kind == 1:
        return content[: rng.randrange(len(content))]
    if kind == 2:
        return b""
    if kind == 3:
        return content + rng.randbytes(rng.randrange(1, 300))
    if kind == 4:
        return other
    if kind == 5:
        return rng.randbytes(rng.randrange(1, 3 * len(content) // 2))
    return damaged_bytes(content, other, rng) if kind == 6 else damaged_zip(content, rng)


def test_nothing_wrong_is_read(folder, contents, caplog):
    """200 mutations: each is a miss, removed, and logged once with its reason."""
    (key, content), (_, other) = contents
    rng, cache, refused = random.Random(80), compile_cache(), 0
    assert cache is not None
    for _ in range(DAMAGED):
        cache.files.put(key, mutated(content, other, rng))
        found = cache.get(key)
        if found is None:
            refused += 1
            assert not (folder / key).exists()
        else:
            assert found == entry_from_bytes(content, key, "whole")
    assert refused >= 0.95 * DAMAGED
    # One warning a file and process.
    (told,) = [one.getMessage() for one in caplog.records if one.name == "amp_ir"]
    assert told.startswith(f"{folder / key} is not used and is made again: ")


def test_damaged_entries_are_compiled_again(folder, contents):
    _, expected = TinyTraining().train(2)
    path, rng = the_entry(folder), random.Random(81)
    content = path.read_bytes()
    for _ in range(8):
        path.write_bytes(mutated(content, contents[1][1], rng))
        train, found = TinyTraining().train(2)
        assert not is_loaded(train)
        assert all(map(torch.equal, found, expected))
        train, found = TinyTraining().train(2)
        assert is_loaded(train) and all(map(torch.equal, found, expected))


def test_what_is_wrong_is_said_in_full(folder, contents, caplog):
    (key, content), (second, other) = contents
    cache, path = compile_cache(), folder / key
    assert cache is not None
    flipped = content[:100] + bytes([content[100] ^ 1]) + content[101:]
    digests = [content[-64:].decode(), _digest_of(flipped)]
    newer = content.replace(b"amp_ir program format 1", b"amp_ir program format 7")
    cases = {
        flipped: f"{path} is damaged: the SHA-256 of its content is {digests[1]}, and its seal "
        f"says '{digests[0]}'; it is made again",
        content[:-200]: f"{path} has no seal at its end; it is made again",
        other: f"{path} is the entry {second}, and {key} was expected; it is made again",
        newer: f"{path} has format 7, and this version of amp_ir reads up to 1; it was written by "
        "a newer one: use that to load it",
        _altered(content, lambda one: one.pop("memory")): f"{path} cannot be read: KeyError: "
        "'memory'; it is made again",
        _altered(content, lambda one: one["parts"]["options"].update(opt_level=2)): f"{path} is "
        "the entry ",
    }  # fmt: skip
    for bad, message in cases.items():
        with pytest.raises(FileFormatError) as refused:
            entry_from_bytes(bad, key, path)
        assert str(refused.value).startswith(message)
    cache.files.put(key, other)
    assert cache.get(key) is None and not path.exists()
    (told,) = [one.getMessage() for one in caplog.records]
    assert told == f"{path} is not used and is made again: {cases[other]}"


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content[:-64]).hexdigest()


def _altered(content: bytes, alter) -> bytes:
    """Return the entry with another description, sealed again."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    description = json.loads(files["program.json"])
    alter(description)
    files["program.json"] = json.dumps(description).encode()
    return _zipped(files)


def _zipped(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as archive:
        for name, one in files.items():
            archive.writestr(name, one)
    Seal("program", 1, "").append(made)
    return made.getvalue()


def test_a_compressed_entry_is_not_unpacked(contents):
    key, _ = contents[0]
    bomb = _zipped({"program.json": b" " * (1 << 20), "program.so": b""}, zipfile.ZIP_DEFLATED)
    with pytest.raises(FileFormatError) as refused:
        entry_from_bytes(bomb, key, "bomb")
    assert str(refused.value) == (
        "bomb cannot be read: ValueError: program.json is compressed; it is made again"
    )


def test_machine_code_that_does_not_load_is_made_again(folder, contents, caplog, monkeypatch):
    _, expected = TinyTraining().train(2)
    path = the_entry(folder)
    whole = entry_from_bytes(path.read_bytes(), path.name, path)
    cache = compile_cache()
    assert cache is not None
    broken = BuiltStep(b"no ELF", whole.built.plan, 1, ())
    cache.put(type(whole)(whole.parts, broken))
    train, found = TinyTraining().train(2)
    assert not is_loaded(train) and all(map(torch.equal, found, expected))
    (told,) = [one.getMessage() for one in caplog.records]
    assert told.startswith(
        f"{path} is not used and is made again: its machine code cannot be loaded: "
    )
    assert is_loaded(TinyTraining().compiled())


def test_without_a_folder_for_temporary_files_an_entry_stays(folder, monkeypatch, caplog):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    _, expected = TinyTraining().train(2)
    caplog.set_level("INFO", "amp_ir")
    with monkeypatch.context() as patch:
        patch.setattr("amp_ir.vm.load.tempfile.TemporaryDirectory", full)
        train, found = TinyTraining().train(2)
    assert not is_loaded(train) and all(map(torch.equal, found, expected))
    told, _ = [one.getMessage() for one in caplog.records]
    assert told == "no compiled step can be loaded: [Errno 28] No space left on device"
    assert is_loaded(TinyTraining().compiled())


def test_what_is_loaded_is_what_was_checked(folder, monkeypatch):
    """The entry's file is exchanged after its check: the bytes that were read are loaded."""
    _, expected = TinyTraining().train(2)
    path = the_entry(folder)
    original = cached_build.load_library

    def exchanged(library, *arguments):
        path.write_bytes(b"something else")
        return original(library, *arguments)

    monkeypatch.setattr(cached_build, "load_library", exchanged)
    train, found = TinyTraining().train(2)
    assert is_loaded(train) and all(map(torch.equal, found, expected))
