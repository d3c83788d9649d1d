# SPDX-License-Identifier: Apache-2.0
"""`amp-ir cache`, and the environment variables of the compile cache."""

from __future__ import annotations

import random
import re
import zipfile
from pathlib import Path

import pytest

from amp_ir import cli
from amp_ir.compile_cache.cache import DEFAULT_LIMIT_NBYTES, compile_cache
from amp_ir.errors import OptionError
from amp_ir.files.sealed_zip import Seal
from cached_steps import TinyTraining, entries, is_loaded
from damage import damaged_bytes, damaged_zip

DAMAGED = 60


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["cache", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_info_and_clear(folder, capsys):
    assert run(capsys, "info") == (
        0,
        f"folder  {folder}\nholds   0 compiled steps, 0.0 MiB\nlimit   2048.0 MiB\n"
        "kernels 0.0 of 128.0 MiB, from which new steps take theirs\n",
        "",
    )
    TinyTraining().compiled()
    code, out, _ = run(capsys, "info")
    assert code == 0 and "holds   1 compiled step, 0." in out
    assert re.search(r"used    \d{4}-\d\d-\d\d \d\d:\d\d to \d{4}-", out)
    code, out, _ = run(capsys, "clear")
    assert code == 0 and out.startswith("removed 1 compiled step, 0.")
    assert not [one for one in folder.rglob("*") if one.is_file()]
    assert not is_loaded(TinyTraining().compiled())


def test_export_and_import(folder, capsys, tmp_path, monkeypatch):
    TinyTraining().compiled()
    TinyTraining(factor=0.75).compiled()
    path = tmp_path / "steps.zip"
    code, out, _ = run(capsys, "export", path)
    assert code == 0 and out.startswith("exported 2 compiled steps, 0.")
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("AMP_IR_CACHE", str(tmp_path / "other"))
    code, out, _ = run(capsys, "import", path)
    assert code == 0 and out.startswith("imported 2 compiled steps, 0.")
    assert is_loaded(TinyTraining().compiled()) and is_loaded(TinyTraining(factor=0.75).compiled())


def test_a_damaged_entry_is_not_exported(folder, capsys, tmp_path):
    TinyTraining().compiled()
    (path,) = entries(folder)
    path.write_bytes(path.read_bytes()[:-1] + b"z")
    code, out, _ = run(capsys, "export", tmp_path / "steps.zip")
    assert (code, out) == (0, "exported 0 compiled steps, 0.0 MiB\n")


def test_a_damaged_file_is_refused_as_a_whole(folder, capsys, tmp_path, monkeypatch):
    TinyTraining().compiled()
    TinyTraining(factor=0.75).compiled()
    path, rng = tmp_path / "steps.zip", random.Random(90)
    run(capsys, "export", path)
    content = path.read_bytes()
    entry, _ = entries(folder)
    monkeypatch.setenv("AMP_IR_CACHE", str(tmp_path / "other"))
    for number in range(DAMAGED):
        bad = (
            damaged_bytes(content, entry.read_bytes(), rng)
            if number % 2
            else damaged_zip(content, rng)
        )
        path.write_bytes(bad if bad != content else content[1:])
        code, out, err = run(capsys, "import", path)
        assert (code, out) == (2, "") and err.startswith(f"amp-ir cache: {path}")
    assert not (tmp_path / "other").exists()


def _exported(path: Path, files: dict[str, bytes]) -> None:
    with path.open("w+b") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        Seal("cache", 1, "").append(file)


def test_every_entry_of_a_file_is_checked(folder, capsys, tmp_path):
    TinyTraining().compiled()
    (entry,) = entries(folder)
    content, path = entry.read_bytes(), tmp_path / "steps.zip"
    remedy = "export the cache again, or take another copy of the file; nothing was imported"
    _exported(path, {"0" * 64: content})
    assert run(capsys, "import", path)[2] == (
        f"amp-ir cache: {path}/{'0' * 64} is the entry {entry.name}, and {'0' * 64} was "
        f"expected; {remedy}\n"
    )
    for name in ("../escaped", "/tmp/escaped"):
        _exported(path, {name: content})
        code, _, err = run(capsys, "import", path)
        assert code == 2 and "was expected" in err
    _exported(path, {entry.name: content[:-1]})
    assert "has no seal at its end" in run(capsys, "import", path)[2]
    assert entries(folder) == [entry]


def test_wrong_uses_are_said(folder, capsys, tmp_path, monkeypatch):
    path = tmp_path / "none.zip"
    code, _, err = run(capsys, "import", path)
    assert code == 2
    assert err == f"amp-ir cache: {folder}: [Errno 2] No such file or directory: '{path}'\n"
    path.write_bytes(b"something")
    assert run(capsys, "import", path)[2] == (
        f"amp-ir cache: {path} is not a compile cache of amp_ir, or damaged: it has no seal at its "
        "end; export the cache again, or take another copy of the file; nothing was imported\n"
    )
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    assert run(capsys, "clear") == (
        2, "", f"amp-ir cache: {folder}: other users can write it (mode 777)\n"
    )  # fmt: skip
    monkeypatch.setenv("AMP_IR_CACHE", "off")
    assert run(capsys, "info")[2] == (
        "amp-ir cache: there is no compile cache: AMP_IR_CACHE=off, or no home directory; name a "
        "folder in AMP_IR_CACHE\n"
    )


# The environment variables.


@pytest.mark.parametrize("word", ["0", "off", "OFF", "Off"])
def test_a_word_turns_it_off(word, monkeypatch):
    monkeypatch.setenv("AMP_IR_CACHE", word)
    assert compile_cache() is None


def test_the_limit_is_a_number_of_bytes(folder, monkeypatch):
    cache = compile_cache()
    assert cache is not None and cache.files.limit_nbytes == DEFAULT_LIMIT_NBYTES == 2 << 30
    monkeypatch.setenv("AMP_IR_CACHE_NBYTES", "1000")
    cache = compile_cache()
    assert cache is not None and cache.files.limit_nbytes == 1000
    assert not is_loaded(TinyTraining().compiled()) and not is_loaded(TinyTraining().compiled())
    for wrong in ("1e9", "-1", "0", "2 GiB"):
        monkeypatch.setenv("AMP_IR_CACHE_NBYTES", wrong)
        with pytest.raises(OptionError) as refused:
            compile_cache()
        assert str(refused.value) == (
            f"AMP_IR_CACHE_NBYTES={wrong} is not a number of bytes; expected one such as 2147483648"
        )


def test_a_relative_folder_is_refused(monkeypatch):
    monkeypatch.setenv("AMP_IR_CACHE", "cache")
    with pytest.raises(OptionError) as refused:
        compile_cache()
    assert str(refused.value) == (
        'AMP_IR_CACHE=cache is not an absolute path; expected a folder, or "off"'
    )


def test_where_there_is_no_home_nothing_is_kept(folder, monkeypatch, caplog):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("AMP_IR_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    caplog.set_level("INFO", "amp_ir")
    assert compile_cache() is None and compile_cache() is None
    (told,) = [one.getMessage() for one in caplog.records]
    assert told == (
        "there is no home directory, so compiled steps are not kept; name a folder in AMP_IR_CACHE"
    )
