# SPDX-License-Identifier: Apache-2.0
"""A new step takes kernels that other steps compiled, and none that is not the same."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import tvm

from amp_ir.compile_cache.cache import compile_cache
from amp_ir.compile_cache.stored_kernels import StoredKernels
from amp_ir.files.private_cache import PrivateCache
from amp_ir.vm import build, build_library
from amp_ir.vm.build_library import KernelObject
from cached_steps import TinyTraining, entries, is_loaded
from damage import damaged_bytes

DAMAGED = 100


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The kernels that LLVM compiled, in the order in which it did."""
    found: list[str] = []

    def noted(parts, *arguments, **options):
        found.extend(variable.name_hint for part in parts for variable in part)
        return original(parts, *arguments, **options)

    original = build_library.build_side_by_side
    monkeypatch.setattr(build_library, "build_side_by_side", noted)
    return found


@pytest.fixture(autouse=True)
def another_process() -> None:
    """Forget what this process has compiled."""
    build.LIBRARIES.clear()


def test_a_step_with_another_constant_takes_kernels_of_the_first(folder, compiled, monkeypatch):
    TinyTraining().compiled()
    every = len(compiled)
    compiled.clear()
    build.LIBRARIES.clear()
    train, found = TinyTraining(factor=0.75).train()
    assert not is_loaded(train) and 0 < len(compiled) < every / 2
    monkeypatch.setenv("AMP_IR_CACHE", "off")
    _, alone = TinyTraining(factor=0.75).train()
    assert all(map(torch.equal, found, alone))


def test_a_step_whose_lines_moved_compiles_nothing(folder, compiled, monkeypatch):
    """Its program is another one, since reports name lines; its kernels are the same."""
    first, before = TinyTraining().train()
    build.LIBRARIES.clear()
    compiled.clear()
    # As an edit above the step does it.
    monkeypatch.setattr(
        "amp_ir.api.cached_build.key_of", lambda *_: ("0" * 64, {"environment": environment})
    )
    environment = kept_environment(folder)
    second, after = TinyTraining().train()
    assert not is_loaded(first) and not is_loaded(second) and not compiled
    assert all(map(torch.equal, before, after))


def kept_environment(folder: Path) -> Mapping[str, object]:
    cache = compile_cache()
    assert cache is not None
    (path,) = entries(folder)
    entry = cache.get(path.name)
    assert entry is not None
    environment: Mapping[str, object] = entry.parts["environment"]
    return environment


def test_damaged_kernels_are_compiled_again(folder, caplog):
    _, expected = TinyTraining().train()
    for path in (folder / "kernels").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    for path in entries(folder):
        path.unlink()
    build.LIBRARIES.clear()
    _, found = TinyTraining().train()
    assert all(map(torch.equal, expected, found))
    told = [one for one in caplog.records if "is not used and is made again" in one.getMessage()]
    assert told and all(one.levelno == logging.WARNING for one in told)


@pytest.fixture
def store(tmp_path) -> StoredKernels:
    return StoredKernels(PrivateCache(tmp_path / "kernels", 1 << 20), "here")


def key(letter: str) -> str:
    return letter * 64


def holding(letters: str, content: bytes = b"code") -> KernelObject:
    return KernelObject({f"kernel_{one}": key(one) for one in letters}, content)


def asked(letters: str) -> dict[str, str]:
    return dict(holding(letters).key_by_name)


def names(objects: list[KernelObject]) -> list[str]:
    return ["".join(name[-1] for name in one.key_by_name) for one in objects]


def test_an_object_is_found_by_each_of_its_kernels(store):
    store.put([holding("ab", b"1"), holding("cd", b"2")])
    for letter, content in zip("abcd", (b"1", b"1", b"2", b"2"), strict=True):
        (found,) = store.find(asked(letter), [])
        assert (found.content, names([found])) == (content, ["ab" if letter in "ab" else "cd"])
    assert len(store.find(asked("abcd"), [])) == 2 and not store.find(asked("ef"), [])


def test_objects_that_are_mostly_of_other_steps_are_left(store):
    store.put([holding("abcdef")])
    assert not store.find(asked("ab"), []) and names(store.find(asked("abc"), [])) == ["abcdef"]


def test_no_kernel_is_linked_twice(store):
    store.put([holding("ab", b"1")])
    store.put([holding("bc", b"2")])  # of another process that compiled at the same time
    assert names(store.find(asked("abc"), [])) == ["ab"]
    assert not store.find(asked("a"), [holding("b")])


def test_a_kernel_of_the_same_name_that_is_another_is_not_taken(store):
    store.put([holding("ab")])
    assert not store.find({"kernel_a": key("c")}, [])
    assert not store.find({"kernel_a": key("a"), "kernel_b": key("c")}, [])


@pytest.mark.parametrize(
    "changed",
    [
        lambda function: (function.with_attr("tirx.noalias", False), "cpu", "here"),
        lambda function: (function, "another cpu", "here"),
        lambda function: (function, "cpu", "elsewhere"),
    ],
    ids=["kernel", "compiler", "environment"],
)
def test_whatever_decides_the_machine_code_is_in_the_key(tmp_path, changed: Callable):
    def key_of(function: tvm.tirx.PrimFunc, compiled_for: str, environment: str) -> str:
        files = PrivateCache(tmp_path, 1)
        kernels = {tvm.ir.GlobalVar("kernel"): function}
        return StoredKernels(files, environment).keys(kernels, compiled_for)["kernel"]

    function = tvm.tirx.PrimFunc([], tvm.tirx.Evaluate(tvm.tirx.IntImm("int32", 0)))
    same = key_of(function, "cpu", "here")
    assert same == key_of(function, "cpu", "here") != key_of(*changed(function))


def test_nothing_damaged_is_read(store, caplog):
    rng = random.Random(8)
    path = store.files.directory / key("a")
    store.put([holding("ab", rng.randbytes(500))])
    whole = path.read_bytes()
    for _ in range(DAMAGED):
        content = damaged_bytes(whole, b"other", rng)
        if content == whole:
            continue
        path.write_bytes(content)
        assert not store.find(asked("a"), []) and not path.exists()
    path.write_bytes(whole)
    path.rename(store.files.directory / key("c"))
    assert not store.find({"kernel_a": key("c")}, [])
    assert [one.getMessage() for one in caplog.records][-1] == (
        f"{store.files.directory / key('c')} is not used and is made again: it has other kernels "
        "than its name says"
    )
