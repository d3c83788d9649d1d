# SPDX-License-Identifier: Apache-2.0
"""The key of a step: another where anything differs that building it depends on, else the same."""

from __future__ import annotations

import inspect
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import tvm
from torch import nn

import amp_ir
from amp_ir.amp import PrimType
from amp_ir.compile_cache import environment as environment_module
from amp_ir.compile_cache.environment import UnknownEnvironmentError, environment
from amp_ir.compile_cache.key import digest_of, key_of
from amp_ir.ir.target import cpu
from cached_steps import TinyTraining, batch, is_loaded

OPTIONS = {
    "device": "cpu", "opt_level": 3, "rounding": "fast", "memory_budget": None, "recompute": True
}  # fmt: skip


def never_low(args: Any, ret_type: Any, amp_dtype: str) -> Any:
    """A rule of the user's: these ops stay in float32."""
    return [PrimType("float32")] * len(args)


def key(training: TinyTraining | None = None, rows: int = 4, **options) -> str:
    mod = (training or TinyTraining()).traced(rows)
    return key_of(mod, {**OPTIONS, **options}, cpu())[0]


@pytest.fixture(scope="module")
def usual() -> str:
    return key()


def test_the_same_step_has_the_same_key(usual):
    assert key() == usual == key(TinyTraining(factor=0.5))
    made, parts = key_of(TinyTraining().traced(), OPTIONS, cpu())
    assert digest_of(parts) == made == usual


def test_values_of_the_state_are_not_part_of_it(usual):
    training = TinyTraining()
    with torch.no_grad():
        for one in training.model.parameters():
            one.mul_(2)
    assert key(training) == usual


def test_another_process_has_the_same_key(usual):
    """Whatever its hashes are seeded with."""
    program = (
        "from cached_steps import TinyTraining\n"
        "from amp_ir.compile_cache.key import key_of\nfrom amp_ir.ir.target import cpu\n"
        f"print(key_of(TinyTraining().traced(), {OPTIONS}, cpu())[0])\n"
    )
    variables = {**os.environ, "PYTHONHASHSEED": "7"}
    support = str(Path(__file__).parents[1] / "support")
    variables["PYTHONPATH"] = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    assert done.stdout.strip() == usual


@pytest.mark.parametrize(
    "training",
    [
        {"amp_dtype": None}, {"amp_dtype": "float16"}, {"width": 9},
        {"factor": 0.50000006},  # the next number of float32
        {"scaler": amp_ir.GradScaler("cpu")},
    ],
    ids=", ".join,
)  # fmt: skip
def test_another_program_has_another_key(training, usual):
    assert key(TinyTraining(**training)) != usual


def test_another_layout_of_a_parameter_has_another_key(usual):
    """The program is the same up to `lower`, which reads the order from the signature."""
    training = TinyTraining()
    weight = next(one for one in training.model.parameters() if one.dim() == 2)
    weight.data = weight.data.t().contiguous().t()
    assert key(training) != usual


def test_another_shape_has_another_key(usual):
    assert key(rows=5) != usual


@pytest.mark.parametrize(
    "option",
    [{"opt_level": 2}, {"rounding": "strict"}, {"memory_budget": 9_999}, {"memory_budget": 9_998},
     {"recompute": False}],
    ids=str,
)  # fmt: skip
def test_every_option_is_part_of_it(option, usual):
    assert key(**option) != usual


def test_every_option_of_compile_is_an_option_of_the_key():
    parameters = inspect.signature(amp_ir.compile).parameters
    assert set(parameters) - {"mod"} == set(OPTIONS)


def test_rules_and_overrides_are_part_of_it(usual):
    with amp_ir.CustomTypeHint({"relax.matmul": never_low}):
        assert key() != usual
    training = TinyTraining()
    options = {"model": training.model, "optimizer": training.optimizer}
    mod, args = amp_ir.trace_step(training.step, batch(0), **options)
    override = amp_ir.Override(op="relax.matmul", to="float32")
    cast = amp_ir.autocast(mod, args, amp_dtype="bfloat16", overrides=[override])
    assert key_of(cast, OPTIONS, cpu())[0] != usual
    assert key() == usual


def test_a_rule_around_a_call_is_never_answered_with_the_program_of_another(folder):
    """The program after autocast is what the key is of."""
    TinyTraining().compiled()
    with amp_ir.CustomTypeHint({"relax.matmul": never_low}):
        assert not is_loaded(TinyTraining().compiled())
        assert is_loaded(TinyTraining().compiled())
    assert is_loaded(TinyTraining().compiled())


def constant_step(values: torch.Tensor) -> amp_ir.StepModule:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def forward(x):
        return model(x) * torch.tensor(values.tolist())

    return amp_ir.trace_step(forward, (torch.zeros(2, 4),), model=model)[0]


def test_every_bit_of_a_constant_is_part_of_it():
    values = torch.tensor([1.0, 2.0, 3.0, 0.0])
    keys = {key_of(constant_step(values), OPTIONS, cpu())[0]}
    for number in range(4):
        other = values.clone()
        other[number] = torch.nextafter(other[number], torch.tensor(9.0))
        keys.add(key_of(constant_step(other), OPTIONS, cpu())[0])
    assert len(keys) == 5


def test_every_field_of_the_signature_is_part_of_it():
    mod = TinyTraining().traced()
    keys = {key_of(mod, OPTIONS, cpu())[0]}
    signature = mod.signature
    first, *rest = signature.outputs
    changed = [
        attrs.evolve(signature, outputs=(attrs.evolve(first, updates=3), *rest)),
        attrs.evolve(signature, outputs=tuple(rest)),
        attrs.evolve(signature, inputs=signature.inputs[1:]),
        attrs.evolve(
            signature, inputs=(attrs.evolve(signature.inputs[0], name="x"), *signature.inputs[1:])
        ),
    ]
    for one in changed:
        keys.add(key_of(attrs.evolve(mod, signature=one), OPTIONS, cpu())[0])
    assert len(keys) == 5


# What is around the step.


def test_the_target_is_part_of_it(usual):
    mod = TinyTraining().traced()
    targets = [
        attrs.evolve(cpu(), arch="x86-64-v3"),
        attrs.evolve(cpu(), libraries=("torch",)),
        attrs.evolve(cpu(), libraries=("torch", "onednn")),
        attrs.evolve(cpu(), allow_tf32=True),
    ]
    assert len({usual, *(key_of(mod, OPTIONS, one)[0] for one in targets)}) == 5


@pytest.mark.parametrize(
    "name", ["ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "AMP_IR_DISABLE", "OMP_NUM_THREADS"]
)
def test_settings_of_libraries_are_part_of_it(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    before = environment(cpu())
    monkeypatch.setenv(name, "1")
    assert environment(cpu()) != before


@pytest.mark.parametrize("name", ["AMP_IR_CACHE", "AMP_IR_CACHE_NBYTES", "AMP_IR_DUMP", "HOME"])
def test_what_decides_nothing_is_not(name, monkeypatch):
    before = environment(cpu())
    monkeypatch.setenv(name, "/elsewhere")
    assert environment(cpu()) == before


def test_what_the_libraries_answer_is_part_of_it(monkeypatch):
    before = environment(cpu())
    patches = {
        "torch.backends.cpu.get_cpu_capability": lambda: "DEFAULT",
        "amp_ir.host.native.has_fast_bfloat16": lambda: None,
        "torch.get_num_threads": lambda: 77,
        "amp_ir.compile_cache.environment._answer": lambda name: "sse41",
        "tvm_ffi.registry.list_global_func_names": lambda: ["amp_ir.min_cut"],
    }
    found = [before]
    for name, value in patches.items():
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            found.append(environment(cpu()))
    with tvm.transform.PassContext(opt_level=1):
        found.append(environment(cpu()))
    with tvm.transform.PassContext(disabled_pass=["FoldConstant"]):
        found.append(environment(cpu()))
    with tvm.target.Target("llvm"):
        found.append(environment(cpu()))
    if torch.set_flush_denormal(True):
        found.append(environment(cpu()))
        torch.set_flush_denormal(False)
    texts = {str(one) for one in found}
    assert len(texts) == len(found)


def test_ops_of_somebody_else_turn_the_cache_off(monkeypatch):
    monkeypatch.setitem(environment_module.LOWERINGS, "amp_ir.theirs", never_low)
    with pytest.raises(UnknownEnvironmentError) as refused:
        environment(cpu())
    assert str(refused.value) == (
        f"amp_ir.theirs is an op of {never_low.__module__}, which is not amp_ir's"
    )


def test_versions_are_part_of_it(monkeypatch):
    patches = {
        "torch.__version__": "2.99",
        "torch.version.git_version": "0123",
        "tvm.__version__": "9",
        "tvm_ffi.__version__": "9",
        "amp_ir.compile_cache.environment.VERSION": "9",
        "tvm.target.codegen.llvm_version_major": lambda **_options: 99,
        "tvm.target.codegen.llvm_get_system_cpu": lambda: "z80",
        "amp_ir.compile_cache.environment._cpu": lambda: ["z80"],
        "amp_ir.compile_cache.environment._libraries": lambda: [],
        "amp_ir.compile_cache.environment._sources": lambda *_where: "",
        "platform.python_version": lambda: "4.0",
        "platform.machine": lambda: "z80",
    }
    uncached = environment_module._of_process.__wrapped__
    found = [uncached()]
    for name, value in patches.items():
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            found.append(uncached())
    assert len({str(one) for one in found}) == len(patches) + 1


def test_every_source_and_library_is_part_of_it(tmp_path: Path):
    (tmp_path / "inner").mkdir()
    files = [tmp_path / "a.py", tmp_path / "inner" / "b.py", tmp_path / "inner" / "lib.so"]
    for one in files:
        one.write_bytes(b"12345")
    later = files[0].stat().st_mtime + 100
    digests = {environment_module._sources(tmp_path, later)}
    for one in files:
        one.write_bytes(b"12346")
        digests.add(environment_module._sources(tmp_path, later))
        one.write_bytes(b"12345")
    files[0].rename(tmp_path / "c.py")
    digests.add(environment_module._sources(tmp_path, later))
    assert len(digests) == 5
    libraries = environment_module._libraries()
    named = {name for name, _, _ in libraries}
    assert any(one.startswith("libtvm_compiler") for one in named)
    assert any(one.startswith("libtorch_cpu") for one in named)


def test_sources_that_changed_while_they_run_turn_the_cache_off(
    tmp_path, folder, monkeypatch, caplog
):
    (tmp_path / "a.py").write_text("changed")
    with pytest.raises(UnknownEnvironmentError) as refused:
        environment_module._sources(tmp_path, (tmp_path / "a.py").stat().st_mtime - 1)
    assert str(refused.value) == f"{tmp_path / 'a.py'} has changed since this process began"
    with pytest.raises(UnknownEnvironmentError, match="there are no sources in "):
        environment_module._sources(tmp_path / "empty", 0.0)

    def unknown():
        raise refused.value

    monkeypatch.setattr(environment_module, "_of_process", unknown)
    caplog.set_level("INFO", "amp_ir")
    for _ in range(2):
        assert "cache" not in TinyTraining().compiled().report.seconds
    (told,) = [one.getMessage() for one in caplog.records]
    assert told == (
        "compiled steps are not kept, since what they depend on cannot be told: "
        f"{tmp_path / 'a.py'} has changed since this process began"
    )
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "counts"), [("libtvm_runtime_cuda.so", False), ("libtvm_other.so", True)]
)
def test_what_is_loaded_for_a_gpu_later_is_not_part_of_it(
    name: str, counts: bool, tmp_path: Path
) -> None:
    """The key of a step for a CPU is the same before and after one for a GPU is made."""
    before = environment_module._libraries()
    file = tmp_path / name
    file.write_bytes(b"code")
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ):
        added = [one for one in environment_module._libraries() if one not in before]
    assert [one[0] for one in added] == [name] * counts
