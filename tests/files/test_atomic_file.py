# SPDX-License-Identifier: Apache-2.0
"""A file is written whole or not at all, through no link, and every writer of amp_ir does it so."""

from __future__ import annotations

import ast
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from amp_ir.files.atomic_file import SUFFIX, atomic_file, write_bytes, write_text

ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_new_content_takes_the_place_of_the_old(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new" and names(tmp_path) == ["file"]


@pytest.mark.parametrize("existed", [True, False])
def test_an_error_leaves_what_was_there(tmp_path: Path, existed: bool):
    path = tmp_path / "file"
    if existed:
        path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as file:
        file.write(b"ne")
        raise KeyboardInterrupt
    assert names(tmp_path) == (["file"] if existed else [])
    assert not existed or path.read_text() == "old"


def test_a_link_stays_a_link(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    held, path = tmp_path / "disk" / "held", tmp_path / "link"
    path.symlink_to(held)
    for text in ("first", "second"):  # leading nowhere, then to a file
        write_text(path, text)
        assert path.is_symlink() and held.read_text() == text
    assert names(tmp_path / "disk") == ["held"]


def test_a_circle_of_links_is_refused(tmp_path: Path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write_text(tmp_path / "a", "text")
    assert names(tmp_path) == ["a", "b"]


def test_the_temporary_file_is_of_no_name_that_can_be_planted(tmp_path: Path):
    """`.partial` beside the target was opened through a link."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "run.pt.partial").symlink_to(victim)
    seen = set()
    for _ in range(3):
        with atomic_file(tmp_path / "run.pt") as file:
            file.write(b"1")
            seen |= {one for one in names(tmp_path) if one.endswith(SUFFIX)}
    assert len(seen) == 3 and victim.read_text() == "kept"


def test_the_mode_is_kept_and_a_new_file_has_the_one_of_the_umask(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "new", b"1")
        (tmp_path / "old").write_text("")
        (tmp_path / "old").chmod(0o606)
        with atomic_file(tmp_path / "old"):
            (part,) = [path for path in tmp_path.iterdir() if path.suffix == SUFFIX]
            assert stat.S_IMODE(part.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "old")]
    assert modes == [0o640, 0o606]


def test_what_is_no_file_is_written_directly(tmp_path: Path):
    write_text(os.devnull, "text")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "text")


def test_a_long_name_is_no_obstacle(tmp_path: Path):
    name = "\u00e9" * 127
    write_text(tmp_path / name, "text")
    assert names(tmp_path) == [name]


def _write_and_die(path: Path) -> None:
    with atomic_file(path) as file:
        file.write(b"half")
        file.flush()
        os._exit(0)


def test_what_a_killed_writer_left_is_removed_and_a_living_ones_stays(tmp_path: Path):
    path = tmp_path / "file"
    child = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(path,))
    child.start()
    child.join()
    assert len(names(tmp_path)) == 1
    with atomic_file(path) as first:
        (living,) = names(tmp_path)
        write_text(path, "second")
        assert names(tmp_path) == sorted([living, "file"])
        first.write(b"first")
    assert names(tmp_path) == ["file"] and path.read_text() == "first"


def _write_often(path: Path, letter: bytes) -> None:
    for _ in range(40):
        write_bytes(path, letter * 5000)


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path: Path):
    path = tmp_path / "file"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(path, one)) for one in (b"a", b"b")]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            assert path.read_bytes() in (b"a" * 5000, b"b" * 5000)
    assert [writer.exitcode for writer in writers] == [0, 0] and names(tmp_path) == ["file"]


# Files in a folder of TemporaryDirectory, which no one else sees; and a switch of the kernel.
OWN_FOLDERS = {
    "python/amp_ir/cuda/nvcc.py",
    "python/amp_ir/cuda/machine_code.py",
    "python/amp_ir/vm/build_library.py",
    "python/amp_ir/vm/load.py",
}
SWITCHES = {"benchmarks/resident.py"}
# A log is read while it grows.
LOGS = {"benchmarks/gpu_suite/run_parts.py"}
METHODS = {"write_text", "write_bytes", "savez", "savez_compressed"}
FUNCTIONS = {"torch.save", "np.save", "numpy.save", "json.dump", "pickle.dump", "tempfile.mkstemp"}


def writes_of(path: Path) -> list[str]:
    """The calls in a source that write a file by a name and not through atomic_file."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if _is_write(call)]


def _is_write(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    arguments = [ast.unparse(one) for one in call.args]
    if function.split(".")[-1] == "open" and not function.startswith(("os.", "archive.")):
        given = arguments[1:] if function == "open" else arguments
        given += [ast.unparse(one.value) for one in call.keywords if one.arg == "mode"]
        return any(mode.strip("'")[:1] in "wax" for mode in given if len(mode) <= 5)
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr in METHODS
    # What is called "file" is what atomic_file has opened.
    return (is_method or function in FUNCTIONS) and "file" not in arguments


def test_every_file_is_written_through_atomic_file():
    own = {"python/amp_ir/files/atomic_file.py", *OWN_FOLDERS, *SWITCHES, *LOGS}
    wrong = [
        f"{path.relative_to(ROOT)}: {text}"
        for folder in ("python", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in own
        for text in writes_of(path)
    ]
    assert not wrong, wrong


def test_the_search_for_writers_sees_every_form(tmp_path: Path):
    source = tmp_path / "source.py"
    writes = ['open("a", "w")', 'path.open("wb")', 'path.open(mode="x")', "p.write_text(x)"]
    for text in [*writes, "np.savez(path, a=1)", "torch.save(a, path)"]:
        source.write_text(text)
        assert writes_of(source), text
    for text in ('open("a")', 'open(path, "rb")', "write_text(path, x)", "torch.save(a, file)"):
        source.write_text(text)
        assert not writes_of(source), text


def test_a_folder_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as refused:
        write_bytes(tmp_path / "absent" / "file", b"new")
    assert str(refused.value) == f"[Errno 2] There is no such folder: '{tmp_path / 'absent'}'"
