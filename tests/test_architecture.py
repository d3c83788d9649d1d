# SPDX-License-Identifier: Apache-2.0
"""The rules of the house: who may import whom, and what must be documented."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import amp_ir

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "amp_ir"

# What may import what: a name imports those above it, and its own folder. The stages stand on one
# line, in the order in which a step passes through them, and none of them imports another.
STAGES = (
    "capture importer loss_scaling padding rewrites amp dispatch loops memory vm runtime report"
)
LAYERS = [
    "version",
    "deprecation",
    "errors",
    "standalone",  # runs a compiled file with TVM's runtime alone, so it imports nothing
    "loaded_step",  # its old name
    "files",
    "host",
    "cuda",
    "dialect",
    "ir",
    "distributed",  # replicas of models, and what their ranks exchange
    STAGES,
    "pipeline",
    "replay",  # a step run again on copies, to explain it
    "compile_cache",  # built steps on disk
    "api",
    "demo",
    "buckets",
    "jit_step",
    "jit_function",
    "inference",
    "compat",
    "integrations",  # inside of other tools; only an entry point and the user import it
    "verification",  # checks of a step's numbers
    "testing",  # helpers for the tests of those who use amp_ir
    "step_names",  # those of the next that a jitted step brings
    "public_names",  # what `amp_ir.jit` and its like are found in
    "selftest",
    "commands",
    "cli",
    "__main__",
    "__init__",
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}
KITCHEN_SINKS = {"utils", "util", "common", "helpers", "helper", "misc"}


def imported_modules(source: str, package: tuple[str, ...]) -> set[str]:
    """First name below amp_ir of everything that the source imports from it, at any depth.

    `package` is the package of the file below amp_ir, for relative imports.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = ["amp_ir", *package[: len(package) - node.level + 1], *base]
            names = [".".join([*base, alias.name]) for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "amp_ir" and len(parts) > 1:
                found.add(parts[1])
    return found


def imports_of(path: Path) -> set[str]:
    return imported_modules(path.read_text(), path.relative_to(PACKAGE).parent.parts)


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_module_has_a_layer():
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in python_files()}
    assert found == set(RANK)


def test_imports_go_up_the_list_of_layers_and_never_down():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports amp_ir.{name}"
        for path in python_files()
        for own in [path.relative_to(PACKAGE).parts[0].removesuffix(".py")]
        for name in sorted(imports_of(path))
        if own != "__init__" and name in RANK and name != own and RANK[name] >= RANK[own]
    ]
    assert not wrong, "; ".join(wrong) + "; what two stages need is in ir/, and pipeline.py joins"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import amp_ir.amp.plan", {"amp"}),
        ("from amp_ir.loops import ir", {"loops"}),
        ("from amp_ir import memory", {"memory"}),
        ("from ..amp import plan", {"amp"}),
        ("from .trace import x", {"capture"}),
        ("def f():\n    from amp_ir.runtime.step import run", {"runtime"}),
        ("import numpy", set()),
    ],
)
def test_the_import_rule_sees_every_form(source, expected):
    assert imported_modules(source, ("capture",)) == expected


def test_only_the_dataflow_view_knows_the_blocks_of_main():
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in python_files()
        if "blocks" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "blocks"
        if isinstance(node.value, ast.Attribute) and node.value.attr == "body"
    ]
    assert wrong == ["ir/dataflow.py"], "read `main` by amp_ir.ir.dataflow.Dataflow"


def test_no_kitchen_sinks():
    folders = [
        ROOT / name for name in ("python", "src", "include", "tests", "tutorials", "benchmarks")
    ]
    wrong = [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in folder.rglob("*")
        if path.stem in KITCHEN_SINKS and "__pycache__" not in path.parts
    ]
    assert not wrong, f"{wrong}: name a file after the thing it holds"


def test_every_public_name_is_documented():
    undocumented = [
        name for name in amp_ir.__all__ if not (getattr(amp_ir, name).__doc__ or "").strip()
    ]
    assert not undocumented


def test_every_source_names_its_licence():
    suffixes = {".py", ".cc", ".h", ".cmake", ".cu"}
    folders = [
        ROOT / n for n in ("python", "src", "include", "cmake", "tests", "tutorials", "benchmarks")
    ]
    wrong = [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in suffixes
        and path.stat().st_size > 0
        and "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]
    ]
    assert not wrong


def test_no_test_imports_another():
    wrong = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        if name.split(".")[0].startswith("test_")
    ]
    assert not wrong, f"{wrong}: what two tests need is in tests/support"
