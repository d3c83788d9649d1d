# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.save` and `amp_ir.load`: a converted model or a compiled step as one file.

The file is a zip, sealed with a digest of all its bytes (files/sealed_zip.py):

    model.json             kind, versions of amp_ir and TVM, and a description a program
    weights.safetensors    parameters, buffers and other state, by name
    program0.ir.json       the IR, as TVM writes it
    program0.so            the machine code, with the kernels and the virtual machine's program

The seal finds damage and alterations; it is not a signature. Nothing in a file is unpickled, but
machine code runs: load none from strangers.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
import tvm

from amp_ir.errors import FileFormatError, OptionError
from amp_ir.files.atomic_file import atomic_file
from amp_ir.files.check_path import check_path
from amp_ir.files.sealed_zip import Seal
from amp_ir.inference.converted_model import ConvertedModel
from amp_ir.inference.program_record import (
    ProgramRecord,
    load_program,
    read_module,
    record_program,
)
from amp_ir.inference.stored_parameters import StoredParameters
from amp_ir.ir.step_module import StepModule
from amp_ir.ir.target import target_of
from amp_ir.runtime.arena import Arena
from amp_ir.runtime.step import CompiledStep
from amp_ir.version import VERSION

FORMAT = 1
_REMEDY = "save the model again, or take another copy of the file; nothing was loaded"
_SEAL = Seal("model", FORMAT, _REMEDY)
_DESCRIPTION, _WEIGHTS = "model.json", "weights.safetensors"


def save(
    model: ConvertedModel | CompiledStep,
    path: str | os.PathLike[str],
    remove_amp_cast: bool = False,
) -> None:
    """Write a converted model or a compiled step to one file, which `amp_ir.load` reads.

    The file replaces an earlier one as a whole. It holds the IR, the plan and the weights of every
    program, and machine code for this CPU or GPU.

    Args:
        model: what `convert_model` or `compile` returns. The file has the programs that a
            converted model keeps: of the shapes called last, as many as its `max_shapes`.
        path: the file.
        remove_amp_cast: write the float32 program without the casts that autocast inserted, with
            float32 weights. A converted model takes these from the model that it was made of, which
            must not have changed.

    Raises:
        ArgumentError: `path` is no path.
        OptionError: `model` is something else; it returns what a file cannot hold; it was loaded
            from a file, and `remove_amp_cast` asks for weights that the file does not have.
        StateError: the model changed after its conversion.
        BuildError: there is no linker.
    """
    if not isinstance(model, (ConvertedModel, CompiledStep)):
        raise OptionError(
            f"save takes what amp_ir.convert_model or amp_ir.compile returns, and got a "
            f"{type(model).__name__}"
        )
    check_path(path)
    if isinstance(model, ConvertedModel):
        kind, steps = "converted model", model.programs
        modules = model.without_casts() if remove_amp_cast else [one.module for one in steps]
    else:
        kind, steps = "compiled step", [model]
        modules = [model.module.without_casts() if remove_amp_cast else model.module]
    options = steps[0].report.options
    records = [record_program(mod, options, Path(path)) for mod in modules]
    description = {
        "kind": kind,
        "amp_ir": VERSION,
        "tvm": tvm.__version__,
        "programs": [one.description for one in records],
    }
    with atomic_file(path) as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(_DESCRIPTION, json.dumps(description))
            archive.writestr(_WEIGHTS, safetensors.torch.save(_tensors_of(modules)))
            for number, one in enumerate(records):
                archive.writestr(f"program{number}.ir.json", one.ir)
                archive.writestr(f"program{number}.so", one.library)
        _SEAL.append(file)


def load(path: str | os.PathLike[str], device: str = "cpu") -> ConvertedModel | CompiledStep:
    """Read a file that `amp_ir.save` wrote; ready to call, on tensors of its own.

    A converted model has programs for the shapes that it was saved with, keeps them all, and
    refuses others. On another kind of CPU than that which wrote the file, programs are compiled
    from their IR.

    Raises:
        ArgumentError: `path` is no path.
        FileFormatError: the file is damaged, altered, cut off, or of another version.
        DeviceError: the device is missing.
        OSError: it cannot be read.
    """
    check_path(path)
    target_of(device)
    with open(path, "rb") as file:
        if not _SEAL.check(file, path):
            raise FileFormatError(
                f"{path} is not a model of amp_ir, or damaged: it has no seal at its end; {_REMEDY}"
            )
        with _faults_named(path):
            description, weights, records = _read(file, path)
            # Copies have memory of their own, aligned for kernels.
            tensors = {name: one.to(device, copy=True) for name, one in weights.items()}
            modules = [read_module(one, tensors, device) for one in records]
    pairs = zip(records, modules, strict=True)
    arena = Arena()
    programs = [load_program(record, mod, device, arena) for record, mod in pairs]
    if description["kind"] == "compiled step":
        return programs[0]
    stored = StoredParameters(tensors)
    return ConvertedModel(None, stored, arena=arena, programs=programs)


@contextlib.contextmanager
def _faults_named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in whatever its readers raise: it was altered, and sealed again."""
    try:
        yield
    except FileFormatError:
        raise
    except Exception as error:  # any, for it may come from every part of the readers
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise FileFormatError(f"{path} cannot be read: {reason}; {_REMEDY}") from error


def _read(
    file: BinaryIO, path: str | os.PathLike[str]
) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[ProgramRecord]]:
    with zipfile.ZipFile(file) as archive:
        description = json.loads(archive.read(_DESCRIPTION))
        _check_versions(description, path)
        weights = safetensors.torch.load(archive.read(_WEIGHTS))
        records = [
            ProgramRecord(
                one,
                archive.read(f"program{number}.ir.json").decode(),
                archive.read(f"program{number}.so"),
            )
            for number, one in enumerate(description["programs"])
        ]
    return description, weights, records


def _check_versions(description: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Refuse IR and machine code of another version, whose meaning may differ."""
    here = {"amp_ir": VERSION, "tvm": tvm.__version__}
    written = {name: description.get(name) for name in here}
    if written != here:
        words = [f"amp_ir {one['amp_ir']} with TVM {one['tvm']}" for one in (written, here)]
        raise FileFormatError(
            f"{path} was written by {words[0]}, and this is {words[1]}; use those versions, or "
            "convert the model again and save it"
        )


def _tensors_of(modules: list[StepModule]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for mod in modules:
        for name, held in mod.state.items():
            value = held if isinstance(held, torch.Tensor) else held()
            if name not in found:
                found[name] = value.detach().cpu().contiguous()
    return found
