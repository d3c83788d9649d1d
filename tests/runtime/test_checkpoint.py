# SPDX-License-Identifier: Apache-2.0
"""A run goes on bit for bit from a checkpoint, whatever the kill left of the one being written."""

from __future__ import annotations

import os
import random
import re
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.errors import ArgumentError, FileFormatError, StateError
from amp_ir.runtime import random_state

STEPS = 9
OVERFLOWS = (2, 6)


@attrs.define(eq=False)
class Run:
    """A small run that uses all that a checkpoint must keep."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: amp_ir.GradScaler
    train: Any = None

    @classmethod
    def fresh(cls, *, seed: int = 0) -> Run:
        """What the user's script makes before it loads a checkpoint."""
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        scaler = amp_ir.GradScaler(init_scale=2.0**10, growth_interval=3, hysteresis=2)
        run = cls(model, optimizer, scheduler, scaler)
        run.train = amp_ir.jit(
            run.step, model=model, optimizer=optimizer, scaler=scaler, amp_dtype="float16"
        )
        return run

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "train": self.train,
        }

    def go(self, numbers: range) -> list[torch.Tensor]:
        """Train; the batches come from torch's random state, as a data loader's would."""
        losses = []
        for number in numbers:
            x, y = torch.randn(4, 6), torch.randn(4, 2)
            if number in OVERFLOWS:
                x[0, 0] = float("inf")
            losses.append(self.train(x, y))
            if not self.train.skipped:
                self.scheduler.step()
        return losses


def everything(run: Run) -> dict[str, Any]:
    """All state of a run, and where the random generators are."""
    return {
        **{name: part.state_dict() for name, part in run.parts.items()},
        "random": [torch.get_rng_state(), random.random(), float(numpy.random.rand())],
    }


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal bit for bit, through containers."""
    if isinstance(a, torch.Tensor):
        same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
        assert a.dtype == b.dtype and bool(same.all()), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for k, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{where}[{k}]")
    else:
        assert a == b, where


def seed_all() -> None:
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)


@pytest.fixture(scope="module")
def whole() -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The losses and the final state of a run that nothing stops."""
    run = Run.fresh()
    seed_all()
    losses = run.go(range(STEPS))
    assert run.scaler.log is not None and run.scaler.log.skips == len(OVERFLOWS)
    return losses, everything(run)


@pytest.mark.parametrize("stop", [1, 3, 7])
def test_a_run_goes_on_bit_for_bit(stop: int, whole: Any, tmp_path: Path):
    path = tmp_path / "run.pt"
    first = Run.fresh()
    seed_all()
    losses = first.go(range(stop))
    amp_ir.save_checkpoint(path, **first.parts, number=stop)
    second = Run.fresh(seed=99)
    random.seed(1)
    numpy.random.seed(1)
    assert amp_ir.load_checkpoint(path, **second.parts) == {"number": stop}
    losses += second.go(range(stop, STEPS))
    assert_same(losses, whole[0])
    assert_same(everything(second), whole[1])


def test_a_run_can_go_back_within_one_process(whole: Any, tmp_path: Path):
    run = Run.fresh()
    seed_all()
    run.go(range(3))
    amp_ir.save_checkpoint(tmp_path / "run.pt", **run.parts)
    run.go(range(3, STEPS))
    amp_ir.load_checkpoint(tmp_path / "run.pt", **run.parts)
    run.go(range(3, STEPS))
    assert_same(everything(run), whole[1])


def test_the_file_is_an_ordinary_one_of_pytorch(tmp_path: Path):
    run = Run.fresh()
    seed_all()
    run.go(range(2))
    amp_ir.save_checkpoint(tmp_path / "run.pt", **run.parts, epoch=4)
    states = torch.load(tmp_path / "run.pt", weights_only=True)
    plain = Run.fresh(seed=3)
    plain.model.load_state_dict(states["model"])
    plain.optimizer.load_state_dict(states["optimizer"])
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(states["scaler"])
    assert_same(plain.model.state_dict(), run.model.state_dict())
    assert theirs.get_scale() == run.scaler.get_scale()
    assert (states["epoch"], states["train"]["random_state"].tolist()[1]) == (4, 2)


def test_a_checkpoint_of_plain_pytorch_code_loads_too(whole: Any, tmp_path: Path):
    """Saved with torch.save and restored by hand, the same run goes on bit for bit."""
    first = Run.fresh()
    seed_all()
    first.go(range(3))
    torch.save({k: v.state_dict() for k, v in first.parts.items()}, tmp_path / "plain.pt")
    generator = torch.get_rng_state()
    second = Run.fresh(seed=99)
    states = torch.load(tmp_path / "plain.pt", weights_only=True)
    for name, part in second.parts.items():
        part.load_state_dict(states[name])
    torch.set_rng_state(generator)
    second.go(range(3, STEPS))
    assert_same(second.model.state_dict(), whole[1]["model"])


# A kill runs no clean-up: it leaves what lies in the folder at that moment. So one save shows what
# every kill would leave; two kills of a fork, which take its memory's copying each, go on from it.


class TornFile:
    """A file that ticks before each write, and again when half of the bytes are there."""

    def __init__(self, file: BinaryIO, tick: Callable[[], None]) -> None:
        self._file, self._tick = file, tick

    def write(self, data: Any) -> int:
        self._tick()
        view = memoryview(data)
        self._file.write(view[: len(view) // 2])
        self._file.flush()
        self._tick()
        self._file.write(view[len(view) // 2 :])
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()


def save_ticking(path: Path, run: Run, number: int, tick: Callable[[], None]) -> None:
    """Save, with `tick` called before and within each write and around what makes it last."""
    save, replace, sync = torch.save, os.replace, os.fsync

    def torn(states: Any, file: BinaryIO) -> None:
        save(states, TornFile(file, tick))  # type: ignore[arg-type]

    def ticking(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (tick(), function(*arguments), tick())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", torn)
        patch.setattr(os, "replace", ticking(replace))
        patch.setattr(os, "fsync", ticking(sync))
        amp_ir.save_checkpoint(path, **run.parts, number=number)


def save_and_die(path: Path, run: Run, number: int, at: int) -> bool:
    """Save in a child that is killed at its `at`-th event; True when it came to the end."""
    state = random.getstate()
    child = os.fork()
    if child == 0:
        random.setstate(state)  # Python seeds it again after a fork
        left = iter(range(at))

        def tick() -> None:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            save_ticking(path, run, number, tick)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


RESTORES: list[Callable[[Any], None]] = [
    torch.set_rng_state,
    random.setstate,
    numpy.random.set_state,
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the kill needs a fork, which Windows lacks")
def test_a_kill_between_any_two_writes_leaves_a_whole_checkpoint(whole: Any, tmp_path: Path):
    path = tmp_path / "run.pt"
    run = Run.fresh()
    seed_all()
    run.go(range(3))
    amp_ir.save_checkpoint(path, **run.parts, number=3)
    old = path.read_bytes()
    run.go(range(3, 5))
    states_now = [torch.get_rng_state(), random.getstate(), numpy.random.get_state()]
    found = []
    number_in = {old: 3}

    def look() -> None:
        left = path.read_bytes()
        if left not in number_in:
            number_in[left] = torch.load(path, weights_only=True)["number"]
        found.append(number_in[left])

    save_ticking(path, run, 5, look)
    look()
    # Nothing but the two whole files was ever there.
    assert len(number_in) == 2
    assert len(found) > 50, "few writes were torn"
    assert found == sorted(found) and {3, 5} == set(found)
    # What is left goes on: after the first kill, in the midst, and after the last.
    for at in (0, len(found) // 2, len(found) - 2):
        path.write_bytes(old)
        for restore, state in zip(RESTORES, states_now, strict=True):
            restore(state)
        assert not save_and_die(path, run, 5, at)
        second = Run.fresh(seed=99)
        number = amp_ir.load_checkpoint(path, **second.parts)["number"]
        second.go(range(number, STEPS))
        assert_same(everything(second), whole[1])
        amp_ir.save_checkpoint(path, **second.parts)
        assert [one.name for one in tmp_path.iterdir()] == ["run.pt"]


# Wrong uses.


def test_a_checkpoint_that_does_not_fit_loads_nothing(tmp_path: Path):
    path = tmp_path / "run.pt"
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    amp_ir.save_checkpoint(path, models=models, epoch=1)
    before = [model.state_dict()["weight"].clone() for model in models]
    for model in models:
        nn.init.zeros_(model.weight)
    with pytest.raises(StateError) as error:
        amp_ir.load_checkpoint(path, models=models[:1], scaler=amp_ir.GradScaler())
    assert str(error.value) == (
        "the checkpoint does not fit: its entry 'models' has 2 states, 1 objects were given; it "
        "has no entry 'scaler', its entries are ['epoch', 'models', 'random']. Nothing was loaded"
    )
    assert all(torch.count_nonzero(model.weight) == 0 for model in models)
    assert amp_ir.load_checkpoint(path, models=models) == {"epoch": 1}
    assert_same([model.state_dict()["weight"] for model in models], before)


NO_CHECKPOINT = (
    "What torch.save wrote is read by torch.load and loaded by load_state_dict; nothing was loaded"
)
EARLIER = "take an earlier checkpoint; nothing was loaded"


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (
            lambda model: {"model": model.state_dict()},
            f" is not a checkpoint: it has no entry for the random state. {NO_CHECKPOINT}",
        ),
        (
            lambda model: [1, 2],
            f" is not a checkpoint: it has a list and no dictionary. {NO_CHECKPOINT}",
        ),
        (
            lambda model: model,
            " cannot be read: it holds objects of other classes than tensors, numbers, strings and "
            "containers, as torch.save(model) writes them; save the state_dict() of each with "
            f"amp_ir.save_checkpoint, or {EARLIER}",
        ),
    ],
)
@pytest.mark.filterwarnings("error")  # it was said to be of amp_ir 0.1.0
def test_a_file_of_pytorch_that_is_no_checkpoint_is_refused(made: Any, told: str, tmp_path: Path):
    path, model = tmp_path / "model.pt", nn.Linear(2, 2)
    torch.save(made(model), path)
    with pytest.raises(FileFormatError) as refused:
        amp_ir.load_checkpoint(path, model=model)
    assert str(refused.value) == f"{path}{told}"


def test_what_pytorch_cannot_read_is_refused_by_its_reason(tmp_path: Path):
    path = tmp_path / "run.pt"
    torch.save({"random": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            if not name.endswith("data/0"):
                archive.writestr(name, content)
    with pytest.raises(FileFormatError) as refused:
        amp_ir.load_checkpoint(path, model=nn.Linear(2, 2))
    assert str(refused.value) == (
        f"{path} cannot be read: torch.load(weights_only=True) says: PytorchStreamReader failed "
        f"locating file data/0: file not found; {EARLIER}"
    )


def test_what_the_refusals_of_other_files_say_to_do_works(tmp_path: Path):
    path, model, other = tmp_path / "model.pt", nn.Linear(2, 2), nn.Linear(2, 2)
    torch.save({"model": model.state_dict()}, path)
    other.load_state_dict(torch.load(path)["model"])
    amp_ir.save_checkpoint(path, model=other)
    assert amp_ir.load_checkpoint(path, model=model) == {}
    assert torch.equal(model.weight, other.weight)


def test_a_file_of_something_else_is_no_checkpoint(tmp_path: Path):
    path = tmp_path / "run.pt"
    path.write_text("epoch 3")
    with pytest.raises(FileFormatError) as refused:
        amp_ir.load_checkpoint(path)
    assert str(refused.value) == (
        f"{path} is not a checkpoint, or damaged: it has no seal of amp_ir, and as a zip file it "
        f"cannot be read: File is not a zip file; {EARLIER}"
    )


def test_some_names_are_those_of_the_file(tmp_path: Path):
    for name, what in (
        ("random", "the random state"),
        ("ranks", "the random state of each rank"),
        ("amp_ir", "what the file says of itself"),
    ):
        with pytest.raises(ArgumentError) as refused:
            amp_ir.save_checkpoint(tmp_path / "run.pt", **{name: 3})
        assert str(refused.value) == f'a part is named "{name}", which is {what}; rename it'
    amp_ir.save_checkpoint(tmp_path / "run.pt", random_number=3)
    assert amp_ir.load_checkpoint(tmp_path / "run.pt") == {"random_number": 3}


def test_random_state_of_another_step_is_refused():
    model = nn.Linear(2, 2)
    mod, _ = amp_ir.trace_model(model, (torch.ones(1, 2),))
    train = amp_ir.compile(mod)
    assert train.state_dict() == {}
    with pytest.raises(StateError) as error:
        train.load_state_dict({"random_state": torch.tensor([1, 2])})
    assert str(error.value) == (
        "the step has no random op, and the state that it is given has the entries "
        "['random_state']; it belongs to another step"
    )


def test_every_random_generator_is_kept():
    state = random_state.random_state()
    expected = random.random(), torch.rand(2).tolist(), numpy.random.rand()
    random_state.set_random_state(state)
    assert (random.random(), torch.rand(2).tolist(), numpy.random.rand()) == expected


def test_a_second_shape_draws_on_where_the_first_one_stopped():
    """Compiled again, a step does not repeat the masks of its first steps."""
    torch.manual_seed(0)
    model = nn.Dropout(0.5)
    train = amp_ir.jit(lambda x: model(x), model=model)
    first = train(torch.ones(64))
    second = train(torch.ones(1, 64))
    assert len(train.recompiles) == 1
    assert not torch.equal(first, second[0])
    assert train.state_dict()["random_state"].tolist()[1] == 2


# All or nothing.


class Stubborn:
    """A part that fails after it has drawn numbers and changed itself."""

    def __init__(self) -> None:
        self.value = 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        is_strange = state["value"] == 2
        self.value = state["value"]
        if is_strange:
            torch.rand(3), random.random(), numpy.random.rand()
            raise ZeroDivisionError("two")


def test_an_error_in_the_middle_puts_everything_back(whole: Any, tmp_path: Path):
    """The run then goes on as if the checkpoint had never been looked at."""
    path, last = tmp_path / "run.pt", Stubborn()
    last.value = 2
    amp_ir.save_checkpoint(path, **Run.fresh(seed=8).parts, last=last)
    last.value = 1
    run = Run.fresh()
    seed_all()
    losses = run.go(range(4))
    parameters = list(run.model.parameters())
    with pytest.raises(StateError) as refused:
        amp_ir.load_checkpoint(path, **run.parts, last=last)
    assert str(refused.value) == (
        "the checkpoint does not fit: its entry 'last' cannot be loaded: ZeroDivisionError: two. "
        "Nothing was loaded"
    )
    assert last.value == 1
    assert all(a is b for a, b in zip(parameters, run.model.parameters(), strict=True))
    losses += run.go(range(4, STEPS))
    assert_same(losses, whole[0])
    assert_same(everything(run), whole[1])


class Fragile(Stubborn):
    """A part that loads nothing, not even what it held."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ZeroDivisionError("never")


def test_what_cannot_be_put_back_is_said(tmp_path: Path):
    path = tmp_path / "run.pt"
    amp_ir.save_checkpoint(path, last=Fragile())
    with pytest.raises(StateError) as refused:
        amp_ir.load_checkpoint(path, last=Fragile())
    assert str(refused.value) == (
        "the entry 'last' cannot be loaded (ZeroDivisionError: never), and what was there before "
        "cannot be put back: 'last' (ZeroDivisionError: never). Create these objects again"
    )


def test_everything_that_does_not_fit_is_listed_before_anything_is_loaded(tmp_path: Path):
    path = tmp_path / "run.pt"
    saved = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2), "c": nn.Linear(1, 1)})
    wide = torch.optim.Adam(saved.parameters())
    saved["a"](torch.ones(1, 2)).sum().backward()
    wide.step()
    amp_ir.save_checkpoint(
        path, model=saved, adam=wide, sgd=torch.optim.SGD(saved["a"].parameters()), epoch=1
    )
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).double()})
    given = {
        "model": model,
        "adam": torch.optim.Adam(
            [*nn.Linear(2, 2).parameters(), *saved["b"].parameters(), *saved["c"].parameters()]
        ),
        "sgd": torch.optim.AdamW(model["a"].parameters()),
        "epoch": 7,
    }
    before = [tensor.clone() for tensor in model.state_dict().values()]
    generator = torch.get_rng_state()
    with pytest.raises(StateError) as refused:
        amp_ir.load_checkpoint(path, **given)
    assert str(refused.value) == (
        "the checkpoint does not fit: its entry 'model' has c.weight, c.bias, which the model has "
        "not; a.weight of its entry 'model' is float32[3, 2], and of the model float32[2, 2]; "
        "a.bias of its entry 'model' is float32[3], and of the model float32[2]; b.weight of its "
        "entry 'model' is float32[2, 2], and of the model float64[2, 2]; b.bias of its entry "
        "'model' is float32[2], and of the model float64[2]; exp_avg of parameter 0 of its entry "
        "'adam' is float32[3, 2], and the parameter float32[2, 2]; exp_avg_sq of parameter 0 of "
        "its entry 'adam' is float32[3, 2], and the parameter float32[2, 2]; exp_avg of parameter "
        "1 of its entry 'adam' is float32[3], and the parameter float32[2]; exp_avg_sq of "
        "parameter 1 of its entry 'adam' is float32[3], and the parameter float32[2]; its entry "
        "'sgd' is of SGD, and a AdamW was given; its entry 'epoch' is for an object with "
        "load_state_dict, and got a int. Nothing was loaded"
    )
    assert_same(list(model.state_dict().values()), before)
    assert torch.equal(torch.get_rng_state(), generator)


PLAIN = (
    "give numbers, strings, tensors and containers of these (a NumPy number is made one with "
    ".item(), an array with torch.from_numpy), and each model, optimizer or scheduler by a name of "
    "its own or in a list (net=net, ema=ema). Nothing was written"
)


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path):
    path = tmp_path / "run.pt"
    amp_ir.save_checkpoint(path, epoch=1)
    with pytest.raises(ArgumentError) as refused:
        amp_ir.save_checkpoint(path, best=numpy.float64(0.5), epoch=2)
    told = re.sub(
        r"numpy[.][^ ,]*(?=,)", "numpy...", str(refused.value)
    )  # its module has two names
    assert told == (
        "the parts hold objects of numpy..., numpy..., which a checkpoint cannot be loaded with; "
        + PLAIN
    )
    model = nn.Linear(1, 1)
    for parts in ({"net": model}, {"net": model, "ema": lambda: model}):
        with pytest.raises(ArgumentError) as refused:
            amp_ir.save_checkpoint(path, model=parts)
        assert str(refused.value).startswith("the parts hold ")
        assert str(refused.value).endswith(f"; {PLAIN}")
    hinted = {"best": numpy.float64(0.5).item(), "all": torch.from_numpy(numpy.zeros(2))}
    amp_ir.save_checkpoint(tmp_path / "other.pt", **hinted)
    assert amp_ir.load_checkpoint(tmp_path / "other.pt")["best"] == 0.5
    (tmp_path / "other.pt").unlink()
    assert amp_ir.load_checkpoint(path) == {"epoch": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["run.pt"]


def test_a_random_state_of_another_form_is_refused(tmp_path: Path, monkeypatch: Any):
    path, state = tmp_path / "run.pt", random_state.random_state()
    strange = {**state, "torch": state["torch"][:-1], "python": (2, *state["python"][1:])}
    del strange["numpy"]
    monkeypatch.setattr("amp_ir.runtime.checkpoint.random_state", lambda: strange)
    amp_ir.save_checkpoint(path)
    with pytest.raises(StateError) as refused:
        amp_ir.load_checkpoint(path)
    assert str(refused.value) == (
        "the checkpoint does not fit: the random state of torch is of another form than this "
        "version's; the random state of python is of another form than this version's; the random "
        "state of numpy is missing. Nothing was loaded"
    )


def test_the_digest_is_of_an_ordinary_file(tmp_path: Path):
    """PyTorch reads it with memory mapping too, and a file saved again by PyTorch can be loaded."""
    path = tmp_path / "run.pt"
    amp_ir.save_checkpoint(path, model=nn.Linear(2, 2), epoch=1)
    states = torch.load(path, weights_only=True, mmap=True)
    assert states["model"]["weight"].shape == (2, 2)
    del states["amp_ir"]
    torch.save(states, tmp_path / "again.pt")
    with pytest.warns(UserWarning, match="save it again with amp_ir.save_checkpoint"):
        assert amp_ir.load_checkpoint(tmp_path / "again.pt", model=nn.Linear(2, 2)) == {"epoch": 1}
