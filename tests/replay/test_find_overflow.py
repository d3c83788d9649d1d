# SPDX-License-Identifier: Apache-2.0
"""Planted infinities and NaN are found, in steps of every kind; what is said to help does help."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import amp_ir
from amp_ir.api.precision import stored_variables
from amp_ir.api.replay import with_overrides
from amp_ir.ir.interpreter import interpret
from amp_ir.replay.find_overflow import Replay, find_overflow
from amp_ir.replay.overflow import override_text
from planted_overflows import PLANTED, Planted, PlantedStep


def found_by_interpreter(case: Planted) -> amp_ir.Overflow:
    """As `find_overflow` of a compiled step, with the interpreter instead of kernels."""
    planted = PlantedStep.of(case)
    mod = planted.traced()

    def run(state: Any) -> list[torch.Tensor]:
        held = [state[one.name] if one.is_state else planted.batch for one in mod.signature.inputs]
        return interpret(mod, [one if torch.is_tensor(one) else one() for one in held])

    def recast(overrides: Sequence[amp_ir.Override]) -> amp_ir.StepModule | None:
        return with_overrides(mod, overrides)

    stored = None if mod.plan is None else stored_variables
    return find_overflow(Replay(mod, run, recast, stored), [planted.batch])


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_overflow_is_found(name):
    case = PLANTED[name]
    found = found_by_interpreter(case)
    is_op = case.cause in ("op", "constant")
    assert (found.cause, found.value, found.dtype) == (case.cause, case.value, case.dtype)
    assert (found.op, found.module, found.tensor) == (case.op, case.module, case.tensor)
    assert (found.phase, found.line) == ((case.phase, case.line) if is_op else ("", 0))
    helps = {"scale": found.helping_scale is not None, "override": bool(found.overrides)}
    assert tuple(word for word, does in helps.items() if does) == case.helps
    if case.cause == "op":
        assert found.is_in_float32 == (not case.helps)


FINITE = Planted(forward=PLANTED["NaN in the batch"].forward)


def compiled(case: Planted, **options: Any) -> tuple[PlantedStep, Any]:
    planted = PlantedStep.of(case)
    train = amp_ir.jit(
        planted.step,
        model=planted.net,
        optimizer=planted.optimizer,
        scaler=planted.scaler,
        amp_dtype=case.amp_dtype,
        **options,
    )
    return planted, train


def state_of(planted: PlantedStep) -> Any:
    return copy.deepcopy((planted.net.state_dict(), planted.optimizer.state_dict()))


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rounding", ["fast", "strict"])
def test_a_skipped_step_is_explained_and_nothing_changes(rounding):
    planted, train = compiled(PLANTED["a product after dropout"], rounding=rounding)
    train(planted.batch)
    assert train.skipped
    before, random_before = state_of(planted), train.state_dict()
    scale, log = planted.scaler.get_scale(), planted.scaler.state_dict()
    found = train.find_overflow(planted.batch)
    assert_same(state_of(planted), before)
    assert_same(train.state_dict(), random_before)
    assert (planted.scaler.get_scale(), planted.scaler.state_dict()) == (scale, log)
    # The scale of the step, not the one that it left.
    assert found.scales == (2.0**16,)
    assert (found.op, found.module, found.cast) == (
        "relax.matmul", "blocks.1.1", "float32 -> float16"
    )  # fmt: skip


def test_the_overrides_that_are_named_make_the_step_finite():
    planted, train = compiled(PLANTED["a product that is stored"])
    train(planted.batch)
    found = train.find_overflow(planted.batch)
    code = ", ".join(map(override_text, found.overrides))
    pasted = eval(f"[{code}]", {"amp_ir": amp_ir})
    assert tuple(pasted) == found.overrides
    planted, train = compiled(PLANTED["a product that is stored"], overrides=pasted)
    train(planted.batch)
    assert not train.skipped
    assert train.find_overflow(planted.batch).cause == "none"


def test_the_scale_that_is_named_is_the_largest_that_helps():
    planted, train = compiled(PLANTED["a scaled gradient"])
    train(planted.batch)
    scale = train.find_overflow(planted.batch).helping_scale
    for init_scale, is_skipped in ((scale, False), (scale * 2, True)):
        planted = PlantedStep.of(PLANTED["a scaled gradient"])
        planted.scaler = amp_ir.GradScaler(init_scale=init_scale)
        train = amp_ir.jit(
            planted.step,
            model=planted.net,
            optimizer=planted.optimizer,
            scaler=planted.scaler,
            amp_dtype="float16",
        )
        train(planted.batch)
        assert train.skipped == is_skipped


def test_what_only_a_kernel_makes_is_a_difference_from_the_plan():
    planted, train = compiled(FINITE)
    train(planted.batch)
    assert train.find_overflow(planted.batch).cause == "none"
    program = train.compiled.program
    main = program.executable.vm["main"]

    class Broken:
        """A virtual machine whose last result is a NaN."""

        def __getitem__(self, name: str) -> Any:
            def run(*arguments: Any) -> None:
                main(*arguments)
                torch.utils.dlpack.from_dlpack(arguments[-1]).fill_(math.nan)

            return run

    object.__setattr__(program.executable, "vm", Broken())
    found = train.find_overflow(planted.batch)
    assert (found.cause, found.tensor) == ("kernels", "result0")


def test_rounding_that_fused_kernels_leave_out_is_no_overflow():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.rest(net.first(x) * 3e4 * 3e4 * 1e-4 * 1e-4)

    for rounding in ("fast", "strict"):
        planted, train = compiled(
            Planted(forward=forward, is_scaled=False),
            rounding=rounding,
            overrides=[amp_ir.Override(op="relax.multiply", phase="forward", to="low")],
        )
        train(planted.batch)
        found = train.find_overflow(planted.batch)
        is_finite = all(bool(one.isfinite().all()) for one in planted.net.state_dict().values())
        assert is_finite == (rounding == "fast")
        assert found.cause == ("none" if is_finite else "state")


def test_a_batch_that_no_program_fits_is_refused():
    planted, train = compiled(PLANTED["exp"])
    with pytest.raises(amp_ir.errors.StateError) as caught:
        train.find_overflow(planted.batch)
    assert str(caught.value) == (
        "no program has been compiled for a batch like this; call the step on the batch first, "
        "then find_overflow"
    )


def test_a_step_that_leaves_gradients_is_explained():
    planted, train = compiled(
        Planted(forward=PLANTED["exp"].forward, is_scaled=False, amp_dtype="float32")
    )
    net = planted.net

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x)
        loss.backward()
        return loss.detach()

    train = amp_ir.jit(step, model=net)
    train(planted.batch)
    # The next call would run another program, which adds to the gradients.
    assert train.find_overflow(planted.batch).op == "relax.exp"


def test_what_reads_float32_and_is_stored_low_is_recast():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    scaler = amp_ir.GradScaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # The gradient of one column is an outer product: float32 to low.
        loss = ((model(x)[:, 0] - y) ** 2).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer, scaler=scaler, amp_dtype="float16")
    batch = torch.randn(8, 4), torch.randn(8) * 1e4
    train(*batch)
    assert train.skipped
    found = train.find_overflow(*batch)
    assert found.phase == "backward"
    assert found.helping_scale is not None


def test_a_scale_that_falls_too_low_is_explained_in_the_log(caplog):
    planted, train = compiled(PLANTED["exp"], on_overflow="explain", explain_below=20000.0)
    with caplog.at_level(logging.WARNING, "amp_ir"):
        train(planted.batch)
        assert not caplog.records
        train(planted.batch)
        assert not planted.scaler.get_scale() > 20000.0 or not caplog.records
        train(planted.batch)
    first = caplog.records[0].getMessage()
    assert first.startswith("a step was skipped, and its loss scale fell from 32768 to 16384:\n")
    assert f"planted_overflows.py:{PLANTED['exp'].line}" in first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_overflow": "log"}, "on_overflow='log' is not known; expected None or 'explain'"),
        (
            {"on_overflow": "explain", "explain_below": 0},
            "explain_below=0 is not a loss scale; expected a number above 0",
        ),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        compiled(PLANTED["exp"], **options)
    assert str(caught.value) == message


def test_the_text_of_an_overflow():
    found = amp_ir.Overflow(
        cause="op",
        value="infinity",
        op="relax.matmul",
        cast="float32 -> float16",
        module="encoder.0",
        phase="backward",
        file="train.py",
        line=12,
        dtype="float16",
        largest_input=123456.0,
        scales=(65536.0,),
        helping_scale=4096.0,
        overrides=(amp_ir.Override(op="relax.matmul", module="encoder.0", to="float32"),),
        is_in_float32=False,
        others=("relax.exp in step (forward), train.py:3",),
        reached=("2 of 9 checked gradients", "result0"),
    )
    assert str(found) == (
        "An infinity is made by the cast float32 -> float16 for relax.matmul (float16) in "
        "encoder.0 (backward), train.py:12.\n"
        "    The largest finite number that it reads is 1.235e+05.\n"
        "    It reaches 2 of 9 checked gradients, result0.\n"
        "    So do, from finite numbers, relax.exp in step (forward), train.py:3.\n"
        "    With a loss scale of 2**12 or less the step is finite (it was 2**16); a dynamic scale "
        "gets there by itself.\n"
        "    In float32 there the step is finite:\n"
        "        overrides=[amp_ir.Override(op='relax.matmul', module='encoder.0', to='float32')]"
    )
