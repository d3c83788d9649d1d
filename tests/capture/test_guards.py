# SPDX-License-Identifier: Apache-2.0
"""What a capture read from Python is an input, a guard or an error, never frozen silently."""

from __future__ import annotations

import copy
import functools
import os
import pathlib
import random
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.capture.guards.places import describe_function
from amp_ir.capture.trace import capture_step
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.errors import CaptureError
from amp_ir.ir.step_module import Role
from captured_runner import CapturedRunner
from step_comparison import Training, assert_trains_alike, integers, normal

Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
SETTING = 1.0


@attrs.define
class Program(Training):
    """A training, what is changed between its steps, and the function that the reason names."""

    change: Callable[[], Any]
    function: Any = None


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(index, 8, 6), integers(index, 3, 8)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.0), nn.Linear(5, 3))


def program(loss: Loss, change: Callable[[Any], Any], model: Any = None) -> Program:
    """A step that trains by `loss(model, x, y)`; `change(model)` is called between two steps."""
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = loss(model, x, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return Program(model, optimizer, step, lambda: change(model), loss)


def entropy(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


# What changes between the calls, and is guarded: (program, the reason).


def a_closures_number() -> Program:
    weight = 0.5

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(model, x, y) * weight

    def change(_model: Any) -> None:
        nonlocal weight
        weight += 0.25

    return program(loss, change)


def a_closures_number_in_a_class() -> Program:
    weight = 0.5

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        class Local:
            factor = weight

        return entropy(model, x, y) * Local.factor

    def change(_model: Any) -> None:
        nonlocal weight
        weight += 0.25

    return program(loss, change)


def a_closures_entry() -> Program:
    config = {"weight": 0.5, "name": "a"}

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(model, x, y) * config["weight"]

    return program(loss, lambda _m: config.update(weight=config["weight"] + 0.25))


def an_item_of_a_list() -> Program:
    weights = [0.5, 1.0]

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(model, x, y) * weights[0]

    return program(loss, lambda _m: weights.__setitem__(0, weights[0] + 0.25))


def a_list_that_grows() -> Program:
    names = ["a"]

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(model, x, y) * len(names)

    return program(loss, lambda _m: names.append("b"))


def a_global() -> Program:
    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(model, x, y) * SETTING

    def change(_model: Any) -> None:
        global SETTING
        SETTING += 0.25

    return program(loss, change)


class Config:
    """Options as an object; one is the class's."""

    scale = 1.0

    def __init__(self) -> None:
        self.kind, self.power = "sum", 2


def an_attribute_of_an_object() -> Program:
    config = Config()

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = entropy(model, x, y)
        return value if config.kind == "sum" else value / 2

    return program(loss, lambda _m: setattr(config, "kind", config.kind + "s"))


def an_attribute_of_a_class() -> Program:
    config = type("Config", (Config,), {"scale": 1.0})()

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(model, x, y) * config.scale

    return program(loss, lambda _m: setattr(type(config), "scale", config.scale + 0.25))


def a_default_argument() -> Program:
    def loss(
        model: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        options: Any = {"weight": 0.5},  # noqa: B006
    ) -> torch.Tensor:
        return entropy(model, x, y) * options["weight"]

    options = {"weight": 0.5}
    loss.__defaults__ = (options,)
    return program(loss, lambda _m: options.update(weight=options["weight"] + 0.25))


def a_partials_argument() -> Program:
    def loss(
        weight: dict[str, float], model: Any, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        return entropy(model, x, y) * weight["a"]

    weight = {"a": 0.5}
    change = lambda _m: weight.update(a=weight["a"] + 0.25)  # noqa: E731
    made = program(functools.partial(loss, weight), change)
    made.function = loss
    return made


class Tempered(nn.Module):
    """Divides by an attribute, by a method's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.temperature = nn.Linear(6, 3), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) / self.temperature


def an_attribute_of_a_module() -> Program:
    return program(
        entropy, lambda m: setattr(m, "temperature", m.temperature + 0.5), model=Tempered()
    )


def the_p_of_a_dropout() -> Program:
    # Probability 0 and 1 draw no numbers, so that eager and captured steps can be compared.
    return program(entropy, lambda m: setattr(m[2], "p", 1.0 - m[2].p))


def the_momentum_of_a_batch_norm() -> Program:
    return program(entropy, lambda m: setattr(m[1], "momentum", m[1].momentum / 2))


def the_eps_of_a_batch_norm() -> Program:
    return program(entropy, lambda m: setattr(m[1], "eps", m[1].eps * 10))


def a_swapped_submodule() -> Program:
    return program(entropy, lambda m: m.__setitem__(2, nn.Tanh()))


def a_forward_hook() -> Program:
    return program(entropy, lambda m: m[0].register_forward_hook(lambda _m, _x, y: y * 2))


def a_forward_pre_hook() -> Program:
    return program(entropy, lambda m: m[0].register_forward_pre_hook(lambda _m, x: x[0] * 2))


def a_hook_that_is_removed() -> Program:
    model = network()
    handles = [model[0].register_forward_hook(lambda _m, _x, y: y * 2) for _ in range(4)]
    return program(entropy, lambda _m: handles.pop().remove(), model=model)


def a_gradient_hook() -> Program:
    return program(entropy, lambda m: m[0].weight.register_hook(lambda g: g * 2))


def a_replaced_forward() -> Program:
    def change(model: Any) -> None:
        model[2].forward = lambda x: x * 2

    return program(entropy, change)


def an_attribute_of_a_criterion() -> Program:
    criterion = nn.CrossEntropyLoss()

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return criterion(model(x), y)

    def change(_model: Any) -> None:
        criterion.label_smoothing += 0.1

    return program(loss, change)


def a_rebound_tensor() -> Program:
    weights = torch.ones(3)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, weight=weights)

    def change(_model: Any) -> None:
        nonlocal weights
        weights = weights + torch.arange(3.0)

    return program(loss, change)


def a_tensor_read_in_python() -> Program:
    weight = torch.tensor(0.5)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(model, x, y) * weight.item()

    return program(loss, lambda _m: weight.add_(0.25))


def an_array() -> Program:
    weights = np.array([0.5, 1.0])

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(model, x, y) * float(weights[0])

    return program(loss, lambda _m: weights.__setitem__(0, weights[0] + 0.25))


def a_function_of_the_step() -> Program:
    helper: Callable[[torch.Tensor], torch.Tensor] = torch.neg

    def twice(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    functions = [twice, lambda value: value * 3, lambda value: value * 4, lambda value: value * 5]
    helper = functions[0]

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return helper(entropy(model, x, y))

    def change(_model: Any) -> None:
        nonlocal helper
        functions.append(functions.pop(0))
        helper = functions[0]

    return program(loss, change)


class Trainer:
    """A step that is a method, with a property and a default of the class."""

    _scale = 1.0

    def __init__(self) -> None:
        self.options = {"nested": {"weight": 0.5}}

    @property
    def scale(self) -> float:
        return self._scale

    def loss(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(model, x, y) * self.scale * self.options["nested"]["weight"]


def an_attribute_before_the_classes() -> Program:
    trainer = Trainer()
    return program(trainer.loss, lambda _m: setattr(trainer, "_scale", trainer._scale + 0.25))


def a_nested_entry() -> Program:
    trainer = Trainer()
    nested = trainer.options["nested"]
    return program(trainer.loss, lambda _m: nested.update(weight=nested["weight"] + 0.25))


GUARDED = [
    (
        an_attribute_before_the_classes,
        "attribute '_scale' of closure variable 'loss' of {s} was absent and is 1.25",
    ),
    (
        a_nested_entry,
        "entry 'weight' of entry 'nested' of attribute 'options' of closure variable 'loss' of "
        "{s} was 0.5 and is 0.75",
    ),
    (a_closures_number, "closure variable 'weight' of {f} was 0.5 and is 0.75"),
    (a_closures_number_in_a_class, "closure variable 'weight' of {f} was 0.5 and is 0.75"),
    (a_closures_entry, "entry 'weight' of closure variable 'config' of {f} was 0.5 and is 0.75"),
    (an_item_of_a_list, "item 0 of closure variable 'weights' of {f} was 0.5 and is 0.75"),
    (a_list_that_grows, "closure variable 'names' of {f} had 1 items and has 2"),
    (a_global, "global 'SETTING' (test_guards.py) was {setting} and is {more}"),
    (
        an_attribute_of_an_object,
        "attribute 'kind' of closure variable 'config' of {f} was 'sum' and is 'sums'",
    ),
    (an_attribute_of_a_class, "attribute 'scale' of class Config was 1.0 and is 1.25"),
    (a_default_argument, "entry 'weight' of a default argument of {f} was 0.5 and is 0.75"),
    (
        a_partials_argument,
        "entry 'a' of item 0 of arguments of closure variable 'loss' of {s} was 0.5 and is 0.75",
    ),
    (
        an_attribute_of_a_module,
        "attribute 'temperature' of module (the model itself) was 2.0 and is 2.5",
    ),
    (the_p_of_a_dropout, "attribute 'p' of module 2 was 0.0 and is 1.0"),
    (the_momentum_of_a_batch_norm, "attribute 'momentum' of module 1 was 0.1 and is 0.05"),
    (the_eps_of_a_batch_norm, "attribute 'eps' of module 1 was 1e-05 and is 0.0001"),
    (a_swapped_submodule, "module (the model itself) has other submodules or parameters"),
    (a_forward_hook, "module 0 has other forward hooks: 0 then, 1 now"),
    (a_forward_pre_hook, "module 0 has other forward pre-hooks: 0 then, 1 now"),
    (a_hook_that_is_removed, "module 0 has other forward hooks: 4 then, 3 now"),
    (a_gradient_hook, "parameter 0.weight has other gradient hooks: 0 then, 1 now"),
    (a_replaced_forward, "module 2 has another forward"),
    (
        an_attribute_of_a_criterion,
        "attribute 'label_smoothing' of closure variable 'criterion' of {f} was 0.0 and is 0.1",
    ),
    (
        a_rebound_tensor,
        "closure variable 'weights' of {f} was a tensor of shape (3,) and is another one",
    ),
    (
        a_tensor_read_in_python,
        "the value of closure variable 'weight' of {f} was 0.5 and is 0.75",
    ),
    (an_array, "the array in closure variable 'weights' of {f} has other values"),
    (a_function_of_the_step, "closure variable 'helper' of {f} was the function "),
]


@pytest.mark.parametrize(("build", "reason"), GUARDED, ids=[one.__name__ for one, _ in GUARDED])
def test_a_change_is_seen_and_captured_again(build: Callable[[], Program], reason: str) -> None:
    made = build()
    captured = made.capture(batch(0))
    assert captured.hooks.recompile_reason() == ""
    setting = SETTING
    made.change()
    words = {
        "f": describe_function(getattr(made.function, "__func__", made.function)),
        "s": describe_function(made.step),
        "setting": setting,
        "more": setting + 0.25,
    }
    text = captured.hooks.recompile_reason()
    assert captured.hooks.recompile_reason()
    assert text.startswith(reason.format(**words)), text
    if not reason.endswith(" "):
        assert text == reason.format(**words)


@pytest.mark.parametrize("build", [one for one, _ in GUARDED], ids=lambda one: one.__name__)
def test_training_goes_on_as_in_eager(build: Callable[[], Program]) -> None:
    global SETTING
    SETTING = 1.0
    once: set[int] = set()

    def between(training: Training) -> None:
        # A global is of both trainings: it changes once for the two.
        assert isinstance(training, Program)
        if build is a_global:
            once.add(id(training))
            if len(once) % 2 == 0:
                training.change()
                once.clear()
            return
        training.change()

    captures = assert_trains_alike(build, batch, steps=3, between=between)
    assert captures == 3


# What is followed by reference, without another capture.


def a_tensor_changed_in_place() -> Program:
    weights = torch.ones(3)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, weight=weights)

    return program(loss, lambda _m: weights.add_(torch.arange(3.0)))


def a_frozen_teacher() -> Program:
    teacher = nn.Linear(6, 3).requires_grad_(requires_grad=False)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), teacher(x))

    return program(loss, lambda _m: teacher.weight.mul_(0.5))


def a_teacher_without_gradients() -> Program:
    teacher = nn.Linear(6, 3)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(model(x), target)

    return program(loss, lambda _m: teacher.weight.data.mul_(0.5))


def an_averaged_copy() -> Program:
    model = network()
    averaged = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), averaged(x))

    def change(model: Any) -> None:
        with torch.no_grad():
            for mean, now in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.1)

    return program(loss, change, model=model)


def a_tensor_that_is_not_dense() -> Program:
    table = torch.arange(18.0).view(3, 6) / 18
    columns = table.t()[:3]

    def strided(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x) @ columns, x[:, :3])

    return program(strided, lambda _m: table.mul_(0.5))


def an_alias_of_a_parameter() -> Program:
    model = network()
    alias = model[0].weight.detach()

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(model, x, y) + (model[0].weight * alias).sum()

    return program(loss, lambda _m: None, model=model)


FOLLOWED = [
    a_tensor_changed_in_place, a_frozen_teacher, a_teacher_without_gradients, an_averaged_copy,
    a_tensor_that_is_not_dense, an_alias_of_a_parameter,
]  # fmt: skip


@pytest.mark.parametrize("build", FOLLOWED, ids=lambda one: one.__name__)
def test_tensors_from_outside_are_read_at_every_call(build: Callable[[], Program]) -> None:
    between = lambda training: training.change()  # noqa: E731
    assert assert_trains_alike(build, batch, steps=3, between=between) == 1


@pytest.mark.parametrize(
    "build", [a_closures_number, an_item_of_a_list, an_attribute_of_a_module, a_default_argument],
    ids=lambda one: one.__name__,
)  # fmt: skip
def test_a_number_that_changes_again_becomes_an_input(build: Callable[[], Program]) -> None:
    torch.manual_seed(0)
    made = build()
    first = made.capture(batch(0))
    made.change()
    names = first.hooks.changed_numbers()
    assert len(names) == 1 and first.hooks.recompile_reason().startswith(names[0])
    torch.manual_seed(0)
    eager = build()
    eager.change()
    eager.model.load_state_dict(made.model.state_dict())
    captured = capture_step(
        made.step,
        batch(0),
        model=made.model,
        optimizer=made.optimizer,
        numbers_as_inputs=frozenset(names),
    )
    assert captured.notes[-1] == f"Python numbers that are read at every call: {names[0]}."
    runner = CapturedRunner(captured)
    for index in range(3):
        torch.testing.assert_close(runner(*batch(index)), eager.step(*batch(index)).detach())
        made.change()
        eager.change()
        assert captured.hooks.recompile_reason() == "" and captured.hooks.changed_numbers() == ()


def test_a_number_that_is_a_size_or_a_branch_stays_a_guard() -> None:
    options = {"rows": 2, "warm": 1.0, "power": 3.0}

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = entropy(model, x[: options["rows"]], y[: options["rows"]])
        return value * int(options["warm"]) + value * options["power"]

    made = program(loss, lambda _m: None)
    names = frozenset(
        f"entry {key!r} of closure variable 'options' of {describe_function(loss)}"
        for key in options
    )
    captured = capture_step(
        made.step,
        batch(0),
        model=made.model,
        optimizer=made.optimizer,
        numbers_as_inputs=names,
    )
    rows, warm = (next(name for name in names if key in name) for key in ("rows", "warm"))
    followed = next(name for name in names if "power" in name)
    assert captured.notes[-2:] == (
        f"Python numbers that are read at every call: {followed}.",
        "Python numbers that stay guards, since they decide a branch, a size or what is not "
        f"computed with tensors: {rows}, {warm}.",
    )
    options["power"] = 2.5
    assert captured.hooks.recompile_reason() == ""
    options["rows"] = 3
    assert captured.hooks.recompile_reason() == f"{rows} was 2 and is 3"
    assert captured.hooks.changed_numbers() == ()


# PyTorch's own settings.


AMBIENT = [
    (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "torch.autocast of the CPU was off and is torch.bfloat16",
    ),
    (torch.no_grad, "the recording of gradients was True and is False"),
    (torch.inference_mode, "the recording of gradients was True and is False"),
    (
        lambda: torch.device("meta"),
        "the default device was cpu and is meta",
    ),
]


@pytest.mark.parametrize(
    ("context", "reason"), AMBIENT, ids=["autocast", "no_grad", "inference_mode", "device"]
)
def test_settings_around_the_call_are_guarded(context: Any, reason: str) -> None:
    captured = program(entropy, lambda _m: None).capture(batch(0))
    with context():
        assert captured.hooks.recompile_reason() == reason
    assert captured.hooks.recompile_reason() == ""


def test_settings_of_the_process_are_guarded() -> None:
    captured = program(entropy, lambda _m: None).capture(batch(0))
    torch.set_default_dtype(torch.float64)
    try:
        reason = "the default dtype was torch.float32 and is torch.float64"
        assert captured.hooks.recompile_reason() == reason
    finally:
        torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(mode=True)
    try:
        reason = "the use of deterministic algorithms was False and is True"
        assert captured.hooks.recompile_reason() == reason
    finally:
        torch.use_deterministic_algorithms(mode=False)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert captured.hooks.recompile_reason() == "modules have 1 global hooks, and had 0"
    handle.remove()
    assert captured.hooks.recompile_reason() == ""


def test_the_environment_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(model, x, y) * float(os.environ.get("SCALE_OF_A_TEST", "1"))

    captured = program(loss, lambda _m: None).capture(batch(0))
    assert captured.hooks.recompile_reason() == ""
    monkeypatch.setenv("SCALE_OF_A_TEST", "2")
    assert captured.hooks.recompile_reason() == "os.environ has other keys"


# What is refused.

MOVE = (
    "A compiled step changes tensors only: return what is new and change it after the call, or "
    "make it a tensor that is a buffer of the model. What it decides (if count % 4 == 0) is passed "
    "to the step as an argument, a bool"
)
RETURN = (
    "Return the tensor from the step, and keep it after the call; what only the step reads, such "
    "as what a forward hook keeps, it may drop before it ends (kept.clear())"
)
DRAW = (
    "draws a random number in Python, which a compiled step would do only when it is captured. "
    "Draw it with torch (torch.rand), or outside of the step and pass it as an argument"
)
CLOCK = (
    "reads the clock, which a compiled step would do only when it is captured. Read it outside of "
    "the step"
)
ADDRESS = (
    "data_ptr() reads an address, and no tensor has one while a step is captured. To ask whether "
    "two parameters are one, write `a is b`"
)
FILES = (
    "looks at files, which a compiled step would do only when it is captured. Do it outside of the "
    "step, and pass what it gives as an argument"
)
VERSION = (
    "_version counts the writes to a tensor, and those of a compiled step do not. Count updates in "
    "a buffer of the model, or compare the numbers themselves"
)
PASS = (
    "which a compiled step would not do. Use it outside of the step, and pass what it gives as an "
    "argument"
)


class Box:
    """Holds whatever a step leaves."""

    def __init__(self) -> None:
        self.count, self.last, self.log, self.entries = 0, None, [], {"n": 0}
        self.mean = torch.zeros(())
        self.draws = np.random.default_rng(0)
        self.items = iter([1.0, 2.0])


def counts(box: Box, value: Any) -> Any:
    box.count += 1
    return value * box.count


def counts_entry(box: Box, value: Any) -> Any:
    box.entries["n"] += 1
    return value


def counts_lazily(box: Any, value: Any) -> Any:
    box.steps = getattr(box, "steps", 0) + 1
    return value


def logs(box: Box, value: Any) -> Any:
    box.log.append(value)
    return value


def logs_numbers(box: Box, value: Any) -> Any:
    box.log.append(1.0)
    return value


def draws(box: Box, value: Any) -> Any:
    return value * random.random()


def draws_between(box: Box, value: Any) -> Any:
    return value * random.uniform(0, 1)


def draws_arrays(box: Box, value: Any) -> Any:
    return value * float(np.random.rand())


def draws_from(box: Box, value: Any) -> Any:
    return value * float(box.draws.random())


def advances(box: Box, value: Any) -> Any:
    return value * next(box.items)


def looks_at_the_clock(box: Box, value: Any) -> Any:
    return value * (time.time() > 0)


def asks_for_a_file(_box: Box, value: Any) -> Any:
    return value * (2.0 if os.path.exists("stop") else 1.0)


def asks_for_a_path(_box: Box, value: Any) -> Any:
    return value * (2.0 if pathlib.Path("stop").is_file() else 1.0)


def reads_a_file(_box: Box, value: Any) -> Any:
    with open(__file__, encoding="utf-8") as source:
        return value * (2.0 if source.readline() else 1.0)


def lists_a_folder(_box: Box, value: Any) -> Any:
    return value * (2.0 if os.listdir(".") else 1.0)


def reads_an_address(_box: Box, value: torch.Tensor) -> torch.Tensor:
    return value if value.data_ptr() else 2 * value


def reads_the_address_of_memory(_box: Box, value: torch.Tensor) -> torch.Tensor:
    return value if value.untyped_storage().data_ptr() else 2 * value


def reads_the_address_of_typed_memory(_box: Box, value: torch.Tensor) -> torch.Tensor:
    return value if value.storage().data_ptr() else 2 * value


def reads_a_version(_box: Box, value: torch.Tensor) -> torch.Tensor:
    return value if value._version else 2 * value


OF_BOX = "of closure variable 'box' of {f}"
REFUSED = [
    (counts, 1, f"changes attribute 'count' {OF_BOX}, which was 0 and becomes 1. {MOVE}"),
    (
        counts_entry,
        1,
        f"changes entry 'n' of attribute 'entries' {OF_BOX}, which was 0 and becomes 1. {MOVE}",
    ),
    (
        counts_lazily,
        1,
        f"changes attribute 'steps' {OF_BOX}, which was absent and becomes 1. {MOVE}",
    ),
    (
        logs,
        1,
        f"keeps a tensor of shape () in attribute 'log' {OF_BOX} (a list), where a compiled step "
        f"puts none. {RETURN}",
    ),
    (logs_numbers, 1, f"changes attribute 'log' {OF_BOX} (a list, at 0). {MOVE}"),
    (draws, 1, f"random.random() {DRAW}"),
    (draws_between, 1, f"random.uniform() {DRAW}"),
    (draws_arrays, 1, f"numpy.random {DRAW}"),
    (draws_from, 0, f"moves attribute 'draws' {OF_BOX} on, a random generator, {PASS}"),
    (advances, 0, f"moves attribute 'items' {OF_BOX} on, an iterator, {PASS}"),
    (asks_for_a_file, 1, f"exists() {FILES}"),
    (asks_for_a_path, 1, f"is_file() {FILES}"),
    (reads_a_file, 1, f"open() {FILES}"),
    (lists_a_folder, 1, f"listdir() {FILES}"),
    (looks_at_the_clock, 1, f"time.time() {CLOCK}"),
    (reads_an_address, 1, ADDRESS),
    (reads_the_address_of_memory, 1, ADDRESS),
    (reads_the_address_of_typed_memory, 1, ADDRESS),
    (reads_a_version, 1, VERSION),
]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    ("act", "line", "message"), REFUSED, ids=[one.__name__ for one, _, _ in REFUSED]
)
def test_what_a_compiled_step_would_not_do_is_refused(
    act: Callable[[Box, Any], Any], line: int, message: str
) -> None:
    box = Box()

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return act(box, entropy(model, x, y))

    made = program(loss, lambda _m: None)
    before = vars(box).copy()
    drawn = random.getstate(), repr(np.random.get_state()), repr(box.draws.bit_generator.state)
    with pytest.raises(CaptureError) as caught:
        made.capture(batch(0))
    place = f", {__file__}:{act.__code__.co_firstlineno + line}" if line else ""
    assert str(caught.value) == (
        "this step cannot be captured, 1 place:\n  1. step (forward)"
        f"{place}: {message.format(f=describe_function(loss))}"
    )
    # Everything is as before, and the same program without the fault is captured.
    assert vars(box) == before and box.log == [] and box.entries == {"n": 0}
    assert drawn == (
        random.getstate(),
        repr(np.random.get_state()),
        repr(box.draws.bit_generator.state),
    )
    captured = program(entropy, lambda _m: None, model=made.model).capture(batch(0))
    assert captured.hooks.recompile_reason() == ""


# What is harmless.


class Lazy(nn.Module):
    """Makes up its mind, and a table of positions, in its first call; notes its last shape."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.kind, self.table = nn.Linear(6, 3), None, None
        self.size = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = len(x)
        if self.kind is None:
            self.kind = "plain"
        if self.table is None:
            self.table = torch.arange(3.0)
        return self.head(x) + self.table


@functools.lru_cache(maxsize=4)
def positions(count: int) -> torch.Tensor:
    return torch.arange(float(count))


def lazy() -> Program:
    return program(entropy, lambda _m: None, model=Lazy())


def caching() -> Program:
    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x) + positions(3), y)

    return program(loss, lambda _m: positions.cache_clear())


@pytest.mark.parametrize("build", [lazy, caching])
def test_what_is_made_once_does_no_harm(build: Callable[[], Program]) -> None:
    between = lambda training: training.change()  # noqa: E731
    assert assert_trains_alike(build, batch, steps=3, between=between) == 1
    assert type(positions(3)) is torch.Tensor


# Through jit: compiled programs follow, or are compiled again.


def test_jit_makes_an_input_of_a_number_that_goes_on_changing() -> None:
    torch.manual_seed(0)
    made = a_closures_number()
    torch.manual_seed(0)
    eager = a_closures_number()
    train = amp_ir.jit(made.step, model=made.model, optimizer=made.optimizer)
    for index in range(6):
        torch.testing.assert_close(train(*batch(index)), eager.step(*batch(index)).detach())
        made.change()
        eager.change()
    name = f"closure variable 'weight' of {describe_function(made.function)}"
    assert [one.reason for one in train.recompiles] == [
        f"{name} was 0.5 and is 0.75",
        f"{name} was 0.75 and is 1.0",
    ]


def test_jit_follows_a_teacher() -> None:
    torch.manual_seed(0)
    made = a_frozen_teacher()
    torch.manual_seed(0)
    eager = a_frozen_teacher()
    train = amp_ir.jit(made.step, model=made.model, optimizer=made.optimizer)
    for index in range(3):
        torch.testing.assert_close(train(*batch(index)), eager.step(*batch(index)).detach())
        made.change()
        eager.change()
    assert train.recompiles == []


def test_jit_guards_a_probability_that_an_op_takes_as_a_constant() -> None:
    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.dropout(model(x), options["p"]), y)

    options = {"p": 0.25}
    made = program(loss, lambda _m: None)
    train = amp_ir.jit(made.step, model=made.model, optimizer=made.optimizer)
    for p in (0.25, 0.5, 0.75):
        options["p"] = p
        assert bool(train(*batch(0)).isfinite())
    assert len(train.recompiles) == 2


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_demo_is_captured_again(name: str) -> None:
    made = WORKLOADS[name].make(small=True)
    captured = capture_step(made.step, made.batch, model=made.model, optimizer=made.optimizer)
    captured.hooks.install_state()
    parameters = {f"{key}.grad": value for key, value in made.model.named_parameters()}
    left = [one.name for one in captured.outputs if one.role is Role.GRADIENT]
    for _ in range(5):
        assert captured.hooks.recompile_reason() == ""
        captured.hooks.after_step([torch.zeros_like(parameters[name]) for name in left])


def test_a_hook_of_all_modules_that_goes_is_seen():
    """Its program was used without it, since only hooks that come are counted."""
    model = nn.Linear(4, 2)
    run = amp_ir.jit(lambda x: model(x).sum(), model=model)
    x = torch.ones(3, 4)
    hook = nn.modules.module.register_module_forward_hook(lambda _, __, result: result * 2)
    doubled = run(x)
    hook.remove()
    torch.testing.assert_close(run(x), doubled / 2)
    assert [one.reason for one in run.recompiles] == ["modules have 0 global hooks, and had 1"]


def test_a_scripted_module_that_a_step_calls_is_refused():
    """It ended in an AttributeError of the guards, which cannot read its class."""
    model = nn.Linear(4, 2)
    teacher = torch.jit.script(nn.Linear(4, 2).requires_grad_(False))

    def step(x):
        return (model(x) - teacher(x)).square().mean()

    with pytest.raises(CaptureError) as refused:
        amp_ir.jit(step, model=model)(torch.ones(3, 4))
    assert str(refused.value) == (
        "this step cannot be captured, 1 place:\n"
        "  1. step (forward): calls closure variable 'teacher' of step "
        f"(test_guards.py:{step.__code__.co_firstlineno}), which torch.jit made. Guards do not see "
        "what it holds: call the module that it was made of"
    )
