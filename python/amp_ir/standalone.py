# SPDX-License-Identifier: Apache-2.0
"""Runs a file of `amp-ir compile` with TVM's runtime alone. Copy this file to where it shall run.

It imports nothing of amp_ir, neither PyTorch nor TVM's compiler, and needs numpy, the wheels
apache-tvm and apache-tvm-ffi, the files step.so and step.so.json, and the libraries that the
description names: `libamp_ir_*.so` in the same folder, or those of an installed amp_ir:

    step = LoadedStep("step.so", state="state.npz")     # written by amp-ir compile --state
    results = step.run({"batch.0": x, "batch.1": y})    # numpy arrays, by the description's names
    step.write("sgd.lr", 0.01)                          # for the runs from now on
    weight = step.read("weight")
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

KIND, FORMAT = "step of amp_ir", 2
# The entry of a state's file that is the digest of the others.
STATE_DIGEST = "amp_ir.sha256"
# Dtypes that numpy does not have or kernels do not take, as numpy has the elements that are stored.
_AS_NUMPY = {"bool": "bool", "bfloat16": "uint16"}
# The compiled module's function that takes the thread pool of its parallel loops (vm/build.py), and
# the one that gives OpenMP's, which the libraries use too.
SET_LAUNCH, LAUNCH_ADDRESS = "amp_ir_use_openmp", "amp_ir.openmp.launch_address"
# Roles of what a run gives, and the next one does not go on from.
_RESULTS = ("result", "index_extremes")
# TVM's numbers of devices and of its allocator that keeps what it took.
_CPU, _CUDA, _POOLED = 1, 2, 2


class StepFileError(RuntimeError, ValueError):
    """A file of a step is damaged, altered, or of a format that this file does not read."""


class LoadedStep:
    """A compiled step with memory for all it works on, on the device that it was compiled for.

    `description` is the JSON file stored beside the step; `tensors` are the arguments of its
    function, by name, flat and of the stored dtype, on the device.

    Args:
        path: the compiled file; its description is `path` with ".json" appended.
        state: the values that the state begins with, or a .npz file of them; a hyper-parameter that
            is not among them is what it was when the step was compiled, everything else is zero.
        libraries: the folder with libamp_ir_*.so; by default the one of `path`, and for what is not
            there that of an installed amp_ir.
        device: the number of the GPU.

    Raises:
        StepFileError: a file is damaged, or of a format that this file does not read; the step is
            not loaded then, for a damaged one kills the process.
        RuntimeError: a library, a function of one, or a value of the state is missing; the message
            names them all and where they come from.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        state: str | Path | Mapping[str, np.ndarray] | None = None,
        libraries: str | Path | None = None,
        device: int = 0,
    ) -> None:
        # The linker looks for a bare name elsewhere, and not where we are.
        path = Path(path).resolve()
        self.description = read_description(path)
        given = read_state(state) if isinstance(state, (str, Path)) else dict(state or {})
        given.pop(STATE_DIGEST, None)
        folder = Path(libraries or path.parent).resolve()
        _load_libraries(self.description["libraries"], folder, or_installed=libraries is None)
        import tvm

        is_cuda = self.description["target"] != "cpu"
        self._device = tvm.cuda(device) if is_cuda else tvm.cpu()
        self._arguments = {one["name"]: one for one in self.description["main"]}
        self.tensors = {
            name: tvm.runtime.empty((one["count"],), one["stored_dtype"], self._device)
            for name, one in self._arguments.items()
        }
        vm = _virtual_machine(str(path), is_cuda)
        devices = [(_CUDA, device), (_CPU, 0)] if is_cuda else [(_CPU, 0)]
        vm["vm_initialization"](*(x for kind, k in devices for x in (kind, k, _POOLED)))
        self._main, self._vm = vm["main"], vm
        self._begin(given)

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one step on `batch`, and return its results by name.

        Raises IndexError for an index out of range, of the batch or computed; nothing has changed.
        """
        self._check_batch(batch)
        for name, value in batch.items():
            self.write(name, value)
        checks = [one for one in self.description["indices"] if one["input"] is None]
        # State is kept by the step itself; gradients that it leaves are new tensors of it.
        left = {name: self.tensors[name].numpy() for name in self._names("gradient") if checks}
        self._main(*self.tensors.values())
        errors = self._computed_errors(checks) if checks else []
        if errors:
            for name, before in left.items():
                self.tensors[name].copyfrom(before)
            raise IndexError("; ".join(errors) + ". The step was rolled back: nothing has changed")
        return {name: self.read(name) for name in self._names("result")}

    def write(self, name: str, value: Any) -> None:
        """Set an argument: a batch's tensor, a learning rate, a parameter.

        Raises ValueError for another shape. bfloat16 is given as it is stored, in uint16.
        """
        one = self._arguments[name]
        array = np.asarray(value, _AS_NUMPY.get(one["dtype"], one["dtype"]))
        if list(array.shape) != one["shape"]:
            raise ValueError(f"{name} has shape {one['shape']}, and was given {list(array.shape)}")
        flat = np.ascontiguousarray(array).reshape(-1).view(one["stored_dtype"])
        # An empty tensor has one element that nobody reads.
        self.tensors[name].copyfrom(flat if flat.size else np.zeros(1, one["stored_dtype"]))

    def read(self, name: str) -> np.ndarray:
        """Return an argument as it is after the runs so far; bfloat16 as stored, in uint16."""
        one = self._arguments[name]
        array = self.tensors[name].numpy().view(_AS_NUMPY.get(one["dtype"], one["dtype"]))
        return array[: int(np.prod(one["shape"]))].reshape(one["shape"])

    def state(self) -> dict[str, np.ndarray]:
        """Return everything that runs change, by name, as `state=` takes it."""
        return {name: self.read(name) for name, one in self._arguments.items() if _is_kept(one)}

    def _begin(self, state: dict[str, np.ndarray]) -> None:
        for name, one in self._arguments.items():
            if name in state:
                self.write(name, state.pop(name))
            elif one["role"] not in ("arena", "batch", *_RESULTS):
                self.write(name, np.full(one["shape"], one.get("value", 0)))
        if state:
            raise RuntimeError(f"the step has no {', '.join(sorted(state))}, which its state names")

    def _check_batch(self, batch: Mapping[str, np.ndarray]) -> None:
        errors = []
        for check in self.description["indices"]:
            if check["input"] in batch:
                held = np.asarray(batch[check["input"]])
                held = held[held != check["ignored"]] if check["ignored"] is not None else held
                extremes = (int(held.min()), int(held.max())) if held.size else ()
                what = f"{check['input']} holds the index"
                errors += _index_errors(check, extremes, what)
        if errors:
            raise IndexError("; ".join(errors) + ". Nothing was run and nothing has changed")

    def _computed_errors(self, checks: list[dict[str, Any]]) -> list[str]:
        extremes = self.read(self._names("index_extremes")[0]).reshape(2, len(checks)).T
        errors = []
        for check, pair in zip(checks, extremes.tolist(), strict=True):
            errors += _index_errors(check, pair, "the step computed the index")
        return errors

    def _names(self, role: str) -> list[str]:
        return [name for name, one in self._arguments.items() if one["role"] == role]


def _index_errors(check: dict[str, Any], extremes: Iterable[int], what: str) -> list[str]:
    """Return the first of the extremes that is out of range, as the text of an error."""
    wrong = [one for one in extremes if not check["least"] <= one < check["extent"]]
    return [f"{what} {one}, {check['expectation']}" for one in wrong[:1]]


def read_description(path: Path) -> dict[str, Any]:
    """Read the description stored beside a step, and check the digests of both.

    Raises:
        StepFileError: they differ, or the format is another.
    """
    beside = path.with_name(path.name + ".json")
    remedy = "copy both files again, or compile the step again"
    try:
        description = json.loads(beside.read_bytes().decode())
        digest = json.dumps(
            {key: value for key, value in description.items() if key != "sha256"},
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )
    except (ValueError, RecursionError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise StepFileError(
            f"{beside} is not a description of a step: {reason}; {remedy}"
        ) from None
    if description.get("format") != FORMAT or description.get("kind") != KIND:
        raise StepFileError(
            f"{beside.name} has format {description.get('format')!r}, and this file reads "
            f"{FORMAT}; take standalone.py of the amp_ir that compiled the step"
        )
    if description.get("sha256") != hashlib.sha256(digest.encode()).hexdigest():
        raise StepFileError(f"{beside} was altered or damaged after it was written; {remedy}")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != description["file"]["sha256"]:
        raise StepFileError(
            f"{path} is damaged, or of another compilation than {beside.name}: it has "
            f"{len(content)} bytes, expected {description['file']['nbytes']}, and another SHA-256; "
            f"{remedy}"
        )
    return dict(description)


def read_state(path: str | Path) -> dict[str, np.ndarray]:
    """Read a .npz file of a state, and hold it against its digest if it has one.

    Raises:
        StepFileError: it is damaged, or no such file.
    """
    remedy = "write the state again"
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                names = archive.files
                values = {name: archive[name] for name in names}
        except Exception as error:  # any, for damage reaches every part of the readers
            reason = f"{type(error).__name__}: {error}"
            raise StepFileError(f"{path} is not a state, or damaged: {reason}; {remedy}") from error
    digest = values.pop(STATE_DIGEST, None)
    strange = [
        name
        for name, value in values.items()
        if not isinstance(value, np.ndarray) or name.startswith(STATE_DIGEST)
    ]
    if len(set(names)) != len(names) or strange:
        reason = (
            f"entries that are not values, {strange}" if strange else "entries of the same name"
        )
        raise StepFileError(f"{path} is damaged: it has {reason}; {remedy}")
    if digest is not None and str(digest) != state_digest(values):
        raise StepFileError(f"{path} was altered or damaged after it was written; {remedy}")
    return values


def state_digest(values: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of arrays with their names, dtypes and shapes."""
    digest = hashlib.sha256()
    for name in sorted(values):
        array = values[name]
        digest.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _virtual_machine(path: str, is_cuda: bool) -> Any:
    import tvm
    import tvm_ffi

    module = tvm.runtime.load_module(path)
    launch_address = tvm_ffi.get_global_func(LAUNCH_ADDRESS, allow_missing=True)
    if not is_cuda and launch_address is not None:
        set_launch = module.get_function(SET_LAUNCH, query_imports=True)
        set_launch(ctypes.c_void_p(launch_address()))
    return module["vm_load_executable"]()


def _is_kept(argument: dict[str, Any]) -> bool:
    return bool(argument["is_updated"]) and argument["role"] not in _RESULTS


def _load_libraries(libraries: list[dict[str, Any]], folder: Path, *, or_installed: bool) -> None:
    """Load what the step calls from `folder`, and what that needs in turn, before.

    With `or_installed`, what the folder lacks is taken from an installed amp_ir.

    Raises:
        RuntimeError: functions are missing then.
    """
    reasons: dict[str, str] = {}
    for one in libraries:
        for need in one["needs"]:
            reasons[need["file"]] = load_shared(need["file"], need["wheel"])
    _import_runtime()
    import tvm_ffi

    missing = []
    for one in libraries:
        why = ""
        if not _has_all(tvm_ffi, one["functions"]):
            why = _load_library(one, folder, or_installed=or_installed)
        if not _has_all(tvm_ffi, one["functions"]):
            needs = [reasons[need["file"]] for need in one["needs"] if reasons[need["file"]]]
            missing.append("\n  ".join([f"{one['file']}: {why or 'lacks a function'}", *needs]))
    if missing:
        message = "the step cannot run without these libraries:\n  "
        raise RuntimeError(message + "\n  ".join(missing))


def _load_library(one: dict[str, Any], folder: Path, *, or_installed: bool) -> str:
    """Load a library that the step calls; return "", or why it cannot be loaded."""
    if one["wheel"] is not None:
        return load_shared(one["file"], one["wheel"])
    beside, installed = folder / one["file"], _installed_library(one["file"])
    if beside.exists() or not or_installed or installed is None:
        return load_shared(str(beside), None)
    # The arguments of a function may differ between builds, and nothing would notice.
    if hashlib.sha256(installed.read_bytes()).hexdigest() != one.get("sha256"):
        return (
            f"{installed} is another build than the one that the step was compiled with; install "
            f"that amp_ir, or copy its {one['file']} into {folder}"
        )
    return load_shared(str(installed), None)


def _installed_library(file: str) -> Path | None:
    """Return a library of an installed amp_ir, if there is one, without importing amp_ir."""
    found = importlib.util.find_spec("amp_ir")
    places = (found.submodule_search_locations if found else None) or ()
    paths = [Path(place) / "lib" / file for place in places]
    return next((path for path in paths if path.exists()), None)


def _import_runtime() -> None:
    """Import TVM without its compiler, which is not needed and takes a second to load."""
    variable = "TVM_USE_RUNTIME_LIB"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        import tvm  # noqa: F401  (where it is imported already, it stays as it is)
    finally:
        # Programs that this one starts may want the compiler.
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _has_all(tvm_ffi: Any, functions: list[str]) -> bool:
    return all(tvm_ffi.get_global_func(one, allow_missing=True) for one in functions)


def load_shared(file: str, wheel: str | None) -> str:
    """Load a shared library by the linker's knowledge of its name, else from a wheel.

    Returns "", or why it cannot be loaded.
    """
    tried = [file, *(str(path) for path in ([] if wheel is None else files_of_wheel(wheel, file)))]
    reasons = []
    for one in tried:
        try:
            ctypes.CDLL(one)
        except OSError as error:
            reasons.append(str(error))
        else:
            return ""
    return "; ".join(reasons) + (f" (pip install {wheel})" if wheel else "")


def files_of_wheel(wheel: str, prefix: str) -> Iterator[Path]:
    """Yield the files of an installed wheel whose names begin so; none if it is missing."""
    try:
        files = importlib.metadata.files(wheel) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name.startswith(prefix):
            yield Path(str(file.locate())).resolve()
