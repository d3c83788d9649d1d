# SPDX-License-Identifier: Apache-2.0
"""A damaged file is refused with a reason or loads what was written; a damaged cache is empty.

Nothing else: no other exception, no other value, no half of a state. The damage is drawn from fixed
seeds (damage.py).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import cli, standalone
from amp_ir.amp.autocast import autocast, plan_of
from amp_ir.amp.plan import CastPlan
from amp_ir.cuda.cubin_cache import CubinCache
from amp_ir.errors import AmpIrError, FileFormatError
from amp_ir.files import cache_directory
from amp_ir.files.sealed_json import sealed
from damage import damaged_bytes, damaged_document, damaged_json, damaged_zip
from random_steps import random_step

CHECKPOINTS, OLD_CHECKPOINTS, PLANS, SIDECARS, STATES, CACHES = 400, 100, 200, 100, 100, 100


@attrs.define(eq=False)
class Training:
    """Objects to save, of a few numbers each."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: amp_ir.GradScaler

    @classmethod
    def fresh(cls, seed: int) -> Training:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (seed + 1))
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        return cls(model, optimizer, amp_ir.GradScaler("cpu", init_scale=2.0 ** (10 + seed)))

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def values(self) -> str:
        """Everything that a checkpoint holds, bit for bit (of these few numbers repr shows all)."""
        torch.set_printoptions(precision=20, threshold=10_000)
        states = {name: part.state_dict() for name, part in self.parts.items()}
        generators = [
            torch.get_rng_state().sum(),
            random.getstate(),
            np.random.get_state()[1].sum(),
        ]
        text = repr([states, generators])
        torch.set_printoptions(profile="default")
        return text


def written(folder: Path) -> tuple[bytes, bytes, str]:
    """A checkpoint's bytes, those of another one, and the values in the first."""
    paths = [folder / "run.pt", folder / "other.pt"]
    found = []
    for number, path in enumerate(paths):
        training = Training.fresh(number)
        found.append(training.values())
        amp_ir.save_checkpoint(path, **training.parts, epoch=3, names=["a", ("b", 2.5)])
    return paths[0].read_bytes(), paths[1].read_bytes(), found[0]


def load_all(
    path: Path, contents: list[bytes], expected: str
) -> tuple[dict[str, int], dict[bytes, str]]:
    """Load each; what became of them, and those that went wrong."""
    training = Training.fresh(2)
    before = training.values()
    counts, wrong = {"loaded": 0, "refused": 0}, {}
    for content in contents:
        path.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is no seal
                rest = amp_ir.load_checkpoint(path, **training.parts)
        except FileFormatError as error:
            counts["refused"] += 1
            if training.values() != before:
                wrong[content] = f"changed, and {error}"
            continue
        except BaseException as error:
            wrong[content] = repr(error)
            continue
        counts["loaded"] += 1
        if training.values() != expected or rest != {"epoch": 3, "names": ["a", ("b", 2.5)]}:
            wrong[content] = "loaded wrong"
        training = Training.fresh(2)
    return counts, wrong


def test_damaged_checkpoints(tmp_path: Path):
    content, other, expected = written(tmp_path)
    rng = random.Random(14)
    damaged = [
        damaged_bytes(content, other, rng) if k % 3 else damaged_zip(content, rng)
        for k in range(CHECKPOINTS)
    ]
    # The other file is whole, and is what it says.
    damaged = [one if one != other else content[:-1] for one in damaged]
    counts, wrong = load_all(tmp_path / "damaged.pt", damaged, expected)
    assert not wrong, list(wrong.values())[:3]
    # The whole file was drawn as well, when a range was empty.
    assert counts["refused"] >= 0.95 * CHECKPOINTS, counts


def test_damaged_checkpoints_of_0_1_0(tmp_path: Path):
    """They have no seal; the CRCs of zip are held against their entries."""
    _, other, expected = written(tmp_path)
    states = torch.load(tmp_path / "run.pt", weights_only=True)
    del states["amp_ir"]
    torch.save(states, tmp_path / "old.pt")
    content = (tmp_path / "old.pt").read_bytes()
    rng = random.Random(10)
    damaged = [damaged_bytes(content, other, rng) for _ in range(OLD_CHECKPOINTS)]
    damaged = [one if one != other else content for one in damaged]
    counts, wrong = load_all(tmp_path / "damaged.pt", [content, *damaged], expected)
    assert not wrong, list(wrong.values())[:3]
    assert counts["loaded"] >= 1 and counts["refused"] >= 0.7 * OLD_CHECKPOINTS, counts


def test_a_newer_checkpoint_is_named(tmp_path: Path):
    content, _, _ = written(tmp_path)
    path = tmp_path / "newer.pt"
    path.write_bytes(content.replace(b"checkpoint format 2", b"checkpoint format 9"))
    with pytest.raises(FileFormatError) as refused:
        amp_ir.load_checkpoint(path)
    assert str(refused.value) == (
        f"{path} has format 9, and this version of amp_ir reads up to 2; it was written by a newer "
        "one: use that to load it"
    )


# Plans.


@pytest.fixture(scope="module")
def plan() -> tuple[Any, CastPlan]:
    mod = random_step(list(range(0, 200, 3)), size=6)
    return mod, plan_of(mod, amp_dtype="bfloat16")


def test_damaged_plans(plan: Any, tmp_path: Path):
    made = plan[1]
    path, rng = tmp_path / "plan.json", random.Random(20)
    made.save(path)
    content = path.read_bytes()
    plan_of(random_step([5] * 9, size=3), amp_dtype="bfloat16").save(path)
    other, refused = path.read_bytes(), 0
    for _ in range(PLANS):
        damaged = damaged_json(content, other, rng)
        path.write_bytes(damaged if damaged != other else content[1:])
        try:
            assert CastPlan.load(path) == made
        except FileFormatError as error:
            assert str(path) in str(error) and "make a new plan" in str(error)
            refused += 1
    assert refused >= 0.9 * PLANS


def test_plans_that_are_altered_and_sealed_again(plan: Any):
    """A digest shows damage and not intent: the structure is checked too."""
    mod, made = plan
    rng, loaded = random.Random(30), 0
    for _ in range(PLANS):
        data = damaged_document(made.to_json(), rng)
        try:
            altered = CastPlan.from_json(data)
        except FileFormatError:
            continue
        loaded += 1
        assert altered.hash and altered.summary() and isinstance(altered.cast_traffic(), str)
        try:
            autocast(mod, amp_dtype="bfloat16", plan=altered)
        except AmpIrError:
            continue
    assert 0 < loaded < 0.5 * PLANS


def test_a_plan_of_0_1_0_is_read_with_a_warning(plan: Any, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**plan[1].to_json(), "format": 1}))
    with pytest.warns(UserWarning, match="has format 1, which has no digest"):
        assert CastPlan.load(path) == plan[1]


def test_what_is_wrong_with_a_plan_is_said(plan: Any, tmp_path: Path):
    path = tmp_path / "plan.json"
    plan[1].save(path)
    document = json.loads(path.read_text())
    remedy = (
        "make a new plan with amp_ir.autocast and save it again; decisions are changed with "
        "autocast(..., overrides=[...])"
    )
    newer, retyped = {**document, "format": 3}, sealed({**document, "amp_dtype": 3})
    cases: list[tuple[bytes, str]] = [
        (b"\xff", f"{path} is not a plan of amp_ir: it is not UTF-8 text (byte 0); "),
        (
            b"[" * 100_000,
            f"{path} is not a plan of amp_ir: it is nested more deeply than any such file is; ",
        ),
        (
            b"[]",
            f"{path} is not a plan of amp_ir: it holds a list, and a JSON object was expected; ",
        ),
        (
            json.dumps({**document, "kind": "step"}).encode(),
            f"{path} is not a plan of amp_ir: its kind is 'step', expected 'plan of amp_ir'; ",
        ),
        (
            json.dumps(newer).encode(),
            f"{path} has format 3, and this version of amp_ir reads up to 2; it was written by a "
            "newer one: use that, or ",
        ),
        (
            json.dumps(retyped).encode(),
            "this is not a plan of amp_ir: plan.amp_dtype is an integer, 3, expected text; ",
        ),
    ]
    for content, message in cases:
        path.write_bytes(content)
        with pytest.raises(FileFormatError) as refused:
            CastPlan.load(path)
        assert str(refused.value) == message + remedy


# A compiled step: the description, the machine code, the state.


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("step")
    command = ["compile", "mlp", "--small", "--target", "cpu", "--amp-dtype", "float32"]
    files = ["--out", str(folder / "step.so"), "--state", str(folder / "state.npz")]
    assert cli.main([*command, *files]) == 0
    return folder


def test_damaged_descriptions(step: Path, tmp_path: Path):
    rng, refused = random.Random(40), 0
    path, beside = tmp_path / "step.so", tmp_path / "step.so.json"
    path.write_bytes((step / "step.so").read_bytes())
    content = (step / "step.so.json").read_bytes()
    other = json.dumps(sealed({**json.loads(content), "file": {"nbytes": 3, "sha256": "00"}}))
    for _ in range(SIDECARS):
        beside.write_bytes(damaged_json(content, other.encode(), rng))
        try:
            assert standalone.read_description(path) == json.loads(content)
        except standalone.StepFileError as error:
            assert "step.so" in str(error)
            refused += 1
    assert refused >= 0.9 * SIDECARS


def test_a_damaged_step_is_refused_before_it_can_kill_the_process(step: Path, tmp_path: Path):
    code = (step / "step.so").read_bytes()
    rng = random.Random(50)
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "step.so").write_bytes(damaged_bytes(code, b"\x7fELF", rng))
        (folder / "step.so.json").write_bytes((step / "step.so.json").read_bytes())
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from standalone import LoadedStep, StepFileError\n"
        "for folder in Path(sys.argv[2]).iterdir():\n"
        "    try: LoadedStep(folder / 'step.so')\n"
        "    except StepFileError as error: print(error)\n"
    )
    command = [sys.executable, "-c", program, str(Path(standalone.__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 20 and all("is damaged, or of another compilation" in one for one in lines)


def test_damaged_states(step: Path, tmp_path: Path):
    rng, refused = random.Random(60), 0
    content, path = (step / "state.npz").read_bytes(), tmp_path / "state.npz"
    original = standalone.read_state(step / "state.npz")
    np.savez(path, **dict.fromkeys(original, np.zeros(2)))
    other = path.read_bytes()
    for k in range(STATES):
        damaged = damaged_bytes(content, other, rng) if k % 2 else damaged_zip(content, rng)
        path.write_bytes(damaged if damaged != other else content[5:])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # zipfile's, of a doubled name
                found = standalone.read_state(path)
        except standalone.StepFileError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert standalone.state_digest(found) == standalone.state_digest(original)
    assert refused >= 0.7 * STATES


def test_a_state_without_a_digest_is_read(step: Path, tmp_path: Path):
    """Such as a user's own: numpy.savez(path, **step.state())."""
    values = standalone.read_state(step / "state.npz")
    np.savez(tmp_path / "own.npz", **values)
    found = standalone.read_state(tmp_path / "own.npz")
    assert standalone.state_digest(found) == standalone.state_digest(values)


# Caches.


def test_a_damaged_cubin_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cache, rng, misses = CubinCache(tmp_path), random.Random(70), 0
    cubin = rng.randbytes(300)
    cache.put("other", b"\x7fELF")
    cache.put("name", cubin)
    content, other = (tmp_path / "name").read_bytes(), (tmp_path / "other").read_bytes()
    for _ in range(CACHES):
        (tmp_path / "name").write_bytes(damaged_bytes(content, other, rng))
        found = cache.get("name")
        assert found in (None, cubin)
        if found is None:
            misses += 1
            assert not (tmp_path / "name").exists()
    cache.put("name", cubin)
    assert cache.get("name") == cubin and misses >= 0.9 * CACHES
    told = [record.getMessage() for record in caplog.records if record.name == "amp_ir"]
    assert len(told) == 1 and str(tmp_path / "name") in told[0]


def test_where_there_is_no_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_directory.cache_directory("cubin") is None
    cache = CubinCache()
    cache.put("name", b"1")
    assert cache.get("name") is None


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As the XDG base directory rules say."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory.cache_directory("x") == tmp_path / ".cache" / "amp_ir" / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "own"))
    assert cache_directory.cache_directory("x") == tmp_path / "own" / "amp_ir" / "x"
