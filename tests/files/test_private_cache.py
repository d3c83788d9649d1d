# SPDX-License-Identifier: Apache-2.0
"""Entries that hold code: whose folder is used, what is removed, and what is logged."""

from __future__ import annotations

import logging
import multiprocessing
import os
import stat
import time
from pathlib import Path

import pytest

from amp_ir.files import cache_directory, private_cache
from amp_ir.files.private_cache import PrivateCache

NAMES = [f"{number:064x}" for number in range(6)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> PrivateCache:
    monkeypatch.setattr(cache_directory, "_TOLD", set())
    caplog.set_level(logging.INFO, "amp_ir")
    return PrivateCache(tmp_path / "above" / "cache", 1000)


def told(caplog) -> list[tuple[str, str]]:
    return [(one.levelname, one.getMessage()) for one in caplog.records]


def refusal(cache: PrivateCache, reason: str) -> str:
    return (
        f"{cache.directory} is not used, and steps are compiled at every start: {reason}. What is "
        "stored there runs as you; give the folder to yourself alone (chmod 700), or name another "
        "in AMP_IR_CACHE"
    )


def test_an_entry_comes_back_and_is_its_users_alone(cache):
    assert cache.get(NAMES[0]) is None and cache.entries() == []
    before = os.umask(0)
    try:
        cache.put(NAMES[0], b"code")
    finally:
        os.umask(before)
    assert cache.get(NAMES[0]) == b"code"
    assert stat.S_IMODE((cache.directory / NAMES[0]).stat().st_mode) == 0o600
    for folder in (cache.directory, cache.directory.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_is_not_used(cache, mode, caplog):
    cache.put(NAMES[0], b"code")
    cache.directory.chmod(mode)
    for _ in range(2):
        assert cache.get(NAMES[0]) is None
        cache.put(NAMES[1], b"code")
    assert not (cache.directory / NAMES[1]).exists()
    reason = f"other users can write it (mode {mode:03o})"
    assert told(caplog) == [("WARNING", refusal(cache, reason))]
    with pytest.raises(PermissionError):
        cache.clear()


def test_a_folder_of_another_user_is_not_used(cache, caplog, monkeypatch):
    cache.put(NAMES[0], b"code")
    monkeypatch.setattr(private_cache.os, "geteuid", lambda: os.getuid() + 1)
    assert cache.get(NAMES[0]) is None
    cache.put(NAMES[1], b"code")
    assert [one.name for one in cache.directory.iterdir()] == [NAMES[0]]
    reason = f"it belongs to another user (number {os.getuid()})"
    assert told(caplog) == [("WARNING", refusal(cache, reason))]


def test_root_makes_no_folders_in_another_users_home(cache, tmp_path, caplog, monkeypatch):
    if os.getuid() == 0:
        os.chown(tmp_path, 12345, -1)
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(private_cache.os, "geteuid", lambda: 0)
    cache.put(NAMES[0], b"code")
    assert not list(tmp_path.iterdir())
    message = (
        f"{cache.directory} cannot be used, and steps are compiled at every start: {tmp_path} "
        f"belongs to the user of number {owner}, and not to root"
    )
    assert told(caplog) == [("INFO", message)]


def test_a_link_in_place_of_the_folder_is_not_followed(cache, tmp_path, caplog):
    cache.directory.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    cache.directory.symlink_to(tmp_path / "elsewhere")
    cache.put(NAMES[0], b"code")
    assert cache.get(NAMES[0]) is None and not list((tmp_path / "elsewhere").iterdir())
    ((level, message),) = told(caplog)
    assert level == "INFO"
    assert message.startswith(f"{cache.directory} cannot be used, and steps are compiled at every ")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "writable", "large"])
def test_a_strange_file_is_removed_or_left(cache, tmp_path, kind, caplog):
    cache.put(NAMES[1], b"code")
    path = cache.directory / NAMES[0]
    if kind == "link":
        path.symlink_to(cache.directory / NAMES[1])
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "large":
        path.write_bytes(bytes(1001))
    else:
        path.write_bytes(b"code")
    if kind == "writable":
        path.chmod(0o666)
    elif kind == "large":
        path.chmod(0o600)
    assert cache.get(NAMES[0]) is None
    assert path.exists() == (kind == "folder")
    reasons = {
        "link": "it is a link",
        "writable": "other users can write it (mode 666)",
        "large": "it has 1001 bytes, more than a whole cache",
    }
    reason = reasons.get(kind, "it is not a file")
    message = f"{path} is not used and is made again: {reason}"
    assert told(caplog) == [("WARNING", message)]
    assert cache.get(NAMES[1]) == b"code"


def test_a_folder_that_cannot_be_made_is_said_once(cache, caplog):
    cache.directory.parent.write_text("a file")
    for name in NAMES:
        cache.put(name, b"code")
        assert cache.get(name) is None
    ((level, message),) = told(caplog)
    assert level == "INFO" and message.startswith(f"{cache.directory} cannot be used, and steps ")


def test_a_disk_that_is_full_is_said_once(cache, caplog, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_cache, "write_bytes", full)
    cache.put(NAMES[0], b"code")
    cache.put(NAMES[0], b"code")
    message = (
        f"{cache.directory} cannot be used, and steps are compiled at every start: [Errno 28] No "
        "space left on device"
    )
    assert told(caplog) == [("INFO", message)]


def test_those_unused_for_longest_go_first(cache):
    for age, name in enumerate(NAMES[:3]):
        cache.put(name, bytes(300))
        os.utime(cache.directory / name, (0, 1000 - age))
    assert cache.get(NAMES[2]) is not None  # now the last that was used
    cache.put(NAMES[3], bytes(300))
    assert {one.name for one in cache.entries()} == {NAMES[0], NAMES[2], NAMES[3]}
    cache.put(NAMES[4], bytes(1001))  # larger than all may be
    assert sum(one.nbytes for one in cache.entries()) == 900
    assert len(cache.clear()) == 3 and cache.entries() == []


def test_what_a_killed_writer_left_goes(cache):
    cache.put(NAMES[0], b"code")
    old, new = (cache.directory / f".{name}.{'0' * 16}.part" for name in ("a", "b"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, time.time() - 7200))
    (cache.directory / "notes.txt").write_text("the user's")
    assert [one.name for one in cache.entries()] == [NAMES[0]]
    assert not old.exists() and new.exists() and len(cache.clear()) == 1
    assert (cache.directory / "notes.txt").exists()


def test_a_cache_is_listed_once_for_many_entries(tmp_path, monkeypatch):
    """Listing a full one takes longer than writing; other processes' entries count at the next."""
    cache, listed = PrivateCache(tmp_path / "cache", 40 * 1000), []
    usual = PrivateCache.entries
    monkeypatch.setattr(PrivateCache, "entries", lambda one: listed.append(one) or usual(one))
    for number in range(30):
        cache.put(f"{number:064x}", bytes(1000))
    assert len(listed) == 1
    for number in range(20):
        (cache.directory / f"{100 + number:064x}").write_bytes(bytes(1000))
    for number in range(30, 90):
        cache.put(f"{number:064x}", bytes(1000))
    assert sum(one.nbytes for one in cache.entries()) <= cache.limit_nbytes


def _put_often(cache: PrivateCache, letter: bytes) -> None:
    for number in range(60):
        cache.put(NAMES[number % 4], letter * 300)


def test_processes_write_and_read_at_once(cache):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_put_often, args=(cache, one)) for one in (b"a", b"b")]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        for name in NAMES[:4]:
            assert cache.get(name) in (None, b"a" * 300, b"b" * 300)
    assert [writer.exitcode for writer in writers] == [0, 0]
    cache.put(NAMES[0], b"c" * 300)  # by a process that has not counted the others' entries
    assert sum(one.nbytes for one in cache.entries()) <= 1000


def test_an_entry_has_several_names(cache):
    cache.put(NAMES[0], b"x" * 300, also=NAMES[1:3])
    assert [cache.get(name) for name in NAMES[:4]] == [b"x" * 300] * 3 + [None]
    # Counted once.
    assert [one.nbytes for one in cache.entries()] == [100] * 3
    cache.put(NAMES[3], b"y" * 900, also=[NAMES[0]])
    # What has a name keeps it, and what was unused for longest goes with all of its names.
    assert [one.name for one in cache.entries()] == [NAMES[3]]
    assert [cache.get(name) for name in NAMES[:4]] == [None] * 3 + [b"y" * 900]


def test_without_links_an_entry_has_its_first_name(cache, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    cache.put(NAMES[0], b"code", also=NAMES[1:])
    assert cache.get(NAMES[0]) == b"code" and cache.get(NAMES[1]) is None


def test_one_of_a_cache_and_its_part_is_told_of(cache, caplog):
    part = PrivateCache(cache.directory / "part", 1000, cache.directory)
    part.put(NAMES[0], b"code")
    for one in (part, cache):
        one.directory.chmod(0o777)
        assert one.get(NAMES[0]) is None
    reason = "other users can write it (mode 777)"
    assert told(caplog) == [("WARNING", refusal(part, reason))]
