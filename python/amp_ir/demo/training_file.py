# SPDX-License-Identifier: Apache-2.0
"""A training of the user's own, from a Python file that names its parts."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import attrs
import torch

from amp_ir.demo.first_call import calls_jit_in_a_function, first_call
from amp_ir.demo.jit_call import jit_call, value_of
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.errors import OptionError
from amp_ir.report.step_name import function_name

_NEEDED = {
    "step": "the function to capture",
    "batch": "the tuple of its arguments",
    "model": "a module or a list of them",
}
_SEE = "`amp-ir examine --help` shows a file that the commands take"
# What to add to a script whose parts are made in a function.
_THROUGH_JIT = (
    "where a function such as main() makes them, have it call the step through amp_ir, and the "
    "commands take them from its first call: `train = amp_ir.jit(step, model=model, "
    "optimizer=optimizer)` and `train(*batch)`"
)


@attrs.frozen
class TrainingFile:
    """The names that a user's file defines, as `amp_ir.trace_step` takes them."""

    name: str
    step: Callable[..., Any]
    batch: tuple[Any, ...]
    model: torch.nn.Module | list[torch.nn.Module]
    optimizer: Any = None
    scaler: Any = None
    batches: Sequence[tuple[Any, ...]] = ()


def load_training(path: Path, arguments: Sequence[str] = ()) -> TrainingFile:
    """Run a file and return its `step`, `batch` and `model`, and what else it names.

    That is `optimizer`, `scaler`, and `batches`, a list of more batches. Where the file passes
    `step` to `amp_ir.jit` below, `model`, `optimizer` and `scaler` are those of that call.

    The file runs as a module of another name than "__main__", so a training loop below
    `if __name__ == "__main__":` does not run. As when Python runs it, its folder is where it
    imports from, and `arguments` are its command line.

    A file that does not bind all of them at its top level, and uses `amp_ir.jit`, runs as
    "__main__" until it calls a jitted step; the parts are those of this call.

    Raises:
        OptionError: there is no such file, it fails, it does not define a required name, or it
            ends without calling a jitted step.
    """
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "neither a workload nor a file"
        known = ", ".join(WORKLOADS)
        raise OptionError(f"{path} is {kind}; expected one of {known}, or a .py file; {_SEE}")
    # Bytes, whose encoding the file may declare itself.
    if calls_jit_in_a_function(path.read_bytes(), _NEEDED):
        return _of_first_call(path, arguments)
    with _as_script(path, arguments):
        names = runpy.run_path(str(path))
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        wanted = ", ".join(f"`{name}` ({_NEEDED[name]})" for name in missing)
        raise OptionError(
            f"{path} does not define {wanted}{_other_functions(path, names, missing)}; "
            f"define {'it' if len(missing) == 1 else 'them'} at its top level: {_SEE}; or, "
            f"{_THROUGH_JIT}"
        )
    names = {**names, **_passed_to_jit(path, names)}
    batch, model = names["batch"], names["model"]
    if not isinstance(batch, tuple):
        raise OptionError(
            f"`batch` in {path} is a {type(batch).__name__}; expected the tuple of the arguments "
            "of `step`: (x, y), or (batch,) for a single one"
        )
    models = model if isinstance(model, list | tuple) else [model]
    wrong = [type(one).__name__ for one in models if not isinstance(one, torch.nn.Module)]
    if wrong or not models:
        raise OptionError(
            f"`model` in {path} holds {f'a {wrong[0]}' if wrong else 'nothing'}; expected a "
            "torch.nn.Module or a list of them"
        )
    return TrainingFile(
        path.name,
        names["step"],
        batch,
        names["model"],
        names.get("optimizer"),
        names.get("scaler"),
        names.get("batches", ()),
    )


def _passed_to_jit(path: Path, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the file's own call of `jit` passes otherwise than the names say, and say so."""
    found = jit_call(path.read_bytes(), names)
    passed: dict[str, Any] = {}
    if found is None:
        return passed
    for owner in found.owners:
        text = f"{found.text(owner)} of the call of jit in line {found.line}"
        try:
            value = value_of(found.owners[owner], names)
        except (AttributeError, LookupError):
            print(
                f"`{owner}` at the top level of {path} is taken, and not {text}, which is no name "
                f"or list of names that are there; make `{owner}` there what the call passes",
                file=sys.stderr,
            )
            continue
        if value is not names.get(owner) and value != [names.get(owner)]:
            print(f"took {text}", file=sys.stderr)
            passed[owner] = value
    return passed


def _of_first_call(path: Path, arguments: Sequence[str]) -> TrainingFile:
    """Run a file as a script until it calls a jitted step, and say so on the error stream."""
    print(
        f"{path} does not define all of {', '.join(_NEEDED)} at its top level, so it runs as a "
        "script until it calls a step of amp_ir.jit",
        file=sys.stderr,
    )
    with _as_script(path, arguments):
        found = first_call(lambda: runpy.run_path(str(path), run_name="__main__"))
    if found is None:
        raise OptionError(
            f"{path} ran to its end and called no step of amp_ir.jit; define `step`, `batch` and "
            f"`model` at its top level: {_SEE}; or, {_THROUGH_JIT}"
        )
    code = getattr(found.step, "__code__", None)
    line = f" (line {code.co_firstlineno})" if code and code.co_filename == str(path) else ""
    name = function_name(found.step)
    print(
        f"took {name}{line} and its batch, model and optimizer from its first call, and stopped "
        "the script there; casts, device and other options are those of this command, not of jit",
        file=sys.stderr,
    )
    return TrainingFile(
        path.name, found.step, found.batch, found.model, found.optimizer, found.scaler
    )


@contextmanager
def _as_script(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Give the file its command line and its folder, and say where it failed."""
    folder = str(path.resolve().parent)
    # It stays: a step may import when it is captured.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    own, sys.argv = sys.argv, [str(path), *arguments]
    try:
        yield
    except SystemExit as stop:
        raise OptionError(
            f"{path} ended ({_exit_text(stop)}) before its parts could be read. What it reads from "
            f"its command line follows --: amp-ir examine {path} -- --lr 0.1; what trains belongs "
            'below `if __name__ == "__main__":`'
        ) from stop
    except Exception as error:
        raise OptionError(
            f"{path} failed while its parts were read:\n{_from_file_on(path, error)}"
            f"Check that `python {path}` gets past this line"
        ) from error
    finally:
        sys.argv = own


def _exit_text(stop: SystemExit) -> str:
    return f"exit code {stop.code or 0}" if isinstance(stop.code, int | None) else str(stop.code)


def _from_file_on(path: Path, error: Exception) -> str:
    """Return the error's traceback, which begins in the file; whole for an error of syntax."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename != str(path):
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at))


def _other_functions(path: Path, names: Mapping[str, Any], missing: Sequence[str]) -> str:
    """Return what to write where the step has another name, if the file has functions."""
    own = [
        name
        for name, one in names.items()
        if isinstance(one, FunctionType) and one.__code__.co_filename == str(path)
    ]
    if "step" not in missing or not own:
        return ""
    # One whose name says so first.
    likely = next((name for name in own if "step" in name), None)
    return f"; `step = {likely}` names it" if likely else ""
