# SPDX-License-Identifier: Apache-2.0
"""`amp-ir cache`: its arguments and output."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from amp_ir.compile_cache.cache import CACHE_VARIABLE, CompileCache, compile_cache
from amp_ir.compile_cache.transfer import export_cache, import_cache
from amp_ir.errors import OptionError
from amp_ir.files.private_cache import StoredEntry


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `amp-ir cache`."""
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="info|clear|export|import"
    )
    actions.add_parser("info", help="where it is, and how much is in it")
    actions.add_parser("clear", help="remove every compiled step")
    export = actions.add_parser("export", help="write every compiled step to one file")
    export.add_argument("file", type=Path, metavar="FILE")
    imported = actions.add_parser(
        "import", help="add the compiled steps of such a file; take none from strangers"
    )
    imported.add_argument("file", type=Path, metavar="FILE")


def manage_cache(arguments: argparse.Namespace) -> int:
    """Do what the command line says with the user's cache.

    Raises:
        OptionError: there is none, or it or the file cannot be used.
        FileFormatError: the file to import is damaged.
    """
    cache = compile_cache()
    if cache is None:
        raise OptionError(
            f"there is no compile cache: {CACHE_VARIABLE}=off, or no home directory; name a folder "
            f"in {CACHE_VARIABLE}"
        )
    try:
        print(_done(cache, arguments))
    except OSError as error:
        raise OptionError(f"{cache.files.directory}: {error}") from error
    return 0


def _done(cache: CompileCache, arguments: argparse.Namespace) -> str:
    if arguments.action == "info":
        return _described(cache)
    if arguments.action == "clear":
        cache.kernels.clear()
        removed = cache.files.clear()
        return f"removed {_size(len(removed), sum(one.nbytes for one in removed))}"
    transfer = export_cache if arguments.action == "export" else import_cache
    moved = transfer(cache, arguments.file)
    return f"{arguments.action}ed {_size(moved.count, moved.nbytes)}"


def _described(cache: CompileCache) -> str:
    entries, files, kernels = cache.files.entries(), cache.files, cache.kernels
    held = sum(one.nbytes for one in kernels.entries()) / 2**20
    lines = [
        f"folder  {files.directory}",
        f"holds   {_size(len(entries), sum(one.nbytes for one in entries))}",
        f"limit   {files.limit_nbytes / 2**20:.1f} MiB",
        f"kernels {held:.1f} of {kernels.limit_nbytes / 2**20:.1f} MiB, from which new steps take "
        "theirs",
    ]
    if entries:
        lines.append(f"used    {_day(entries[0])} to {_day(entries[-1])}")
    return "\n".join(lines)


def _size(count: int, nbytes: int) -> str:
    return f"{count} compiled step{'' if count == 1 else 's'}, {nbytes / 2**20:.1f} MiB"


def _day(entry: StoredEntry) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_at))
