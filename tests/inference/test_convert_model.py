# SPDX-License-Identifier: Apache-2.0
"""Models converted for inference: numbers, what is stored, shapes, lists, and wrong uses."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.errors import CopyError, OptionError, StateError
from amp_ir.ir.dataflow import Dataflow, op_name

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Net(nn.Module):
    """A convolution with its normalization, dropout, an embedding tied to the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.5)
        self.table = nn.Embedding(128, 32)
        self.mixer = nn.Linear(8, 32)
        self.head = nn.Linear(32, 128, bias=False)
        self.head.weight = self.table.weight

    def forward(self, image: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        pooled = torch.relu(self.norm(self.conv(image))).mean((2, 3))
        mixed = self.mixer(self.dropout(pooled))
        hidden = torch.softmax(mixed, -1) + self.table(ids)
        return {"scores": self.head(hidden), "ids": ids}


def net() -> Net:
    torch.manual_seed(3)
    made = Net()
    made.norm.running_mean.normal_()
    made.norm.running_var.uniform_(0.5, 2)
    return made.train()


def inputs(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.linspace(-3, 3, rows * 3 * 64).sin().reshape(rows, 3, 8, 8)
    return images, torch.arange(rows) % 128


def expected(model: nn.Module, *args: torch.Tensor):
    with torch.no_grad():
        return copy.deepcopy(model).eval()(*args)


def ops_of(converted: amp_ir.ConvertedModel) -> dict[str, list[str]]:
    """The dtypes of the results of each op of the program."""
    found: dict[str, list[str]] = {}
    for variable, value in Dataflow(converted.compiled.module.ir).values.items():
        if op_name(value):
            found.setdefault(op_name(value), []).append(str(getattr(variable.ty, "dtype", "")))
    return found


def dtypes_read(converted: amp_ir.ConvertedModel, op: str) -> list[str]:
    calls = Dataflow(converted.compiled.module.ir).calls(op).values()
    return [str(call.args[0].ty.dtype) for call in calls]


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
def test_numbers_dtypes_and_the_model_itself(dtype):
    model, args = net(), inputs()
    before = copy.deepcopy(model.state_dict())
    converted = amp_ir.convert_model(model, args, dtype)
    got, wanted = converted(*args), expected(model, *args)
    scale = float(wanted["scores"].abs().max())
    # Three roundings of 2^-9 to 2^-8 in a row of bfloat16; float32 differs by its order of sums.
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    torch.testing.assert_close(got["scores"], wanted["scores"], rtol=0, atol=tolerance * scale)
    assert got["ids"].dtype is torch.int64 and torch.equal(got["ids"], args[1])
    assert model.training and model.dropout.training and model.norm.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    ops = ops_of(converted)
    assert "amp_ir.dropout" not in ops and "relax.rsqrt" not in ops


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_weights_are_stored_low_once(dtype):
    converted = amp_ir.convert_model(net(), inputs(), dtype)
    stored = {name: one.dtype for name, one in converted.parameters.items()}
    assert stored["conv.weight"] is stored["mixer.weight"] is DTYPES[dtype]
    assert "norm.running_var" not in stored
    # The embedding reads it in float32 and the last layer low.
    assert stored["table.weight"] is torch.float32
    casts = [one for one in ops_of(converted).get("amp_ir.cast", []) if one == dtype]
    optional = amp_ir.convert_model(net(), inputs(), dtype, cast_optional_params=True)
    assert optional.parameters["table.weight"].dtype is DTYPES[dtype]
    assert optional.nbytes < converted.nbytes
    assert ops_of(optional)["amp_ir.cast"].count(dtype) == len(casts) - 1
    table = net().table.weight.detach().to(DTYPES[dtype])
    assert torch.equal(optional.parameters["table.weight"], table)


def test_a_stored_cast_changes_no_bit():
    """The program that casts its weights at every call is the measure."""
    model, args = net().eval(), inputs()
    mod, _ = amp_ir.trace_model(model, args)
    plain = amp_ir.compile(amp_ir.autocast(mod, args, amp_dtype="bfloat16"))
    model.norm = nn.Identity()
    mod, _ = amp_ir.trace_model(model, args)
    plain = amp_ir.compile(amp_ir.autocast(mod, args, amp_dtype="bfloat16"))
    converted = amp_ir.convert_model(model, args, "bfloat16")
    assert torch.equal(converted(*args)["scores"], plain(*args)["scores"])


def test_any_batch_size_shares_the_parameters():
    model = net()
    converted = amp_ir.convert_model(model, inputs(2), "bfloat16")
    tensors = converted.parameters
    for rows in (1, 5, 2, 5):
        got = converted(*inputs(rows))["scores"]
        wanted = expected(model, *inputs(rows))["scores"]
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-2 * float(wanted.abs().max()))
    assert converted.shapes == [[(n, 3, 8, 8), (n,)] for n in (2, 1, 5)]
    assert {name: id(one) for name, one in converted.parameters.items()} == {
        name: id(one) for name, one in tensors.items()
    }
    assert repr(converted).startswith("ConvertedModel(3 programs, parameters 0.0")


def test_programs_of_the_inputs_used_last_are_kept(caplog: pytest.LogCaptureFixture):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, factor=1):
            return self.linear(x) * factor

    model = Scaled()
    caplog.set_level(logging.INFO, logger="amp_ir")
    converted = amp_ir.convert_model(model, torch.zeros(2, 4), "float32", max_shapes=2)
    assert converted.recompiles == []
    for rows, factor in ((2, 1), (3, 1), (2, 1), (2, 3)):
        x = torch.randn(rows, 4)
        args = (x,) if factor == 1 else (x, factor)
        torch.testing.assert_close(converted(*args), expected(model, *args))
    # 3 rows gave way to the factor and not 2 rows, which were used between.
    assert converted.shapes == [[(2, 4)], [(2, 4)]]
    reasons = [
        "argument 0 was of shape (2, 4) and is of shape (3, 4) (dimension 0)",
        "the structure of the arguments was (Tensor,) and is (Tensor, int)",
    ]
    assert [one.reason for one in converted.recompiles] == reasons
    assert [(one.program, one.unlike) for one in converted.recompiles] == [(1, 0), (2, 0)]
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    seconds = warning.split("Compiling took ")[1].split(" s")[0]
    name = Scaled.__qualname__
    assert warning == (
        f"a converted model {name} was called with inputs of more than 2 shapes, dtypes, "
        f"structures or plain values (the last new one: {reasons[1]}). Programs for the 2 used "
        "last are kept; results stay right, and a shape that comes back is compiled again. "
        f"Compiling took {seconds} s so far. Pad the inputs to fewer shapes, or pass max_shapes= "
        "of at least their number: they share one arena. Said once; model.recompiles lists every "
        "time"
    )
    for factor in (4, 5, 6):
        x = torch.randn(2, 4)
        torch.testing.assert_close(converted(x, factor), expected(model, x, factor))
    assert len(converted.programs) == 2 and len(converted.recompiles) == 5
    assert sum(one.levelname == "WARNING" for one in caplog.records) == 1
    with pytest.raises(OptionError) as refused:
        amp_ir.convert_model(model, torch.zeros(2, 4), "float32", max_shapes=0)
    assert str(refused.value) == (
        "max_shapes=0 is not a number of programs; expected a positive int"
    )


def test_parameters_are_copies_and_changed_ones_are_refused():
    model = net()
    converted = amp_ir.convert_model(model, inputs(2), "bfloat16")
    before = converted(*inputs(2))["scores"].clone()
    with torch.no_grad():
        model.mixer.weight.add_(1)
    assert torch.equal(converted(*inputs(2))["scores"], before)
    with pytest.raises(StateError) as refused:
        converted(*inputs(3))
    assert str(refused.value) == (
        "the model's mixer.weight changed after amp_ir.convert_model, which copied them; a program "
        "for another shape would mix old and new values. Convert the model again"
    )
    model.mixer.weight = nn.Parameter(model.mixer.weight.clone())
    with pytest.raises(StateError) as refused:
        converted(*inputs(3))
    assert str(refused.value) == (
        "the model is no longer as it was converted: mixer.weight was replaced by another tensor. "
        "Convert it again"
    )
    assert torch.equal(converted(*inputs(2))["scores"], before)


def assigned(model):
    model.mixer.weight.data = model.mixer.weight.data * 2


def written_in_numpy(model):
    model.mixer.weight.detach().numpy()[:] *= 2


def trained(model):
    optimizer = torch.optim.SGD(model.mixer.parameters(), lr=0.1, fused=True)
    model.mixer.weight.grad = torch.ones_like(model.mixer.weight)
    optimizer.step()


@pytest.mark.parametrize("change", [assigned, written_in_numpy, trained])
def test_changes_that_no_version_counts_are_refused(change):
    model = net()
    converted = amp_ir.convert_model(model, inputs(2), "bfloat16")
    version = model.mixer.weight._version
    change(model)
    assert model.mixer.weight._version == version
    with pytest.raises(StateError, match=r"^the model's mixer\.weight changed after"):
        converted(*inputs(3))


@pytest.mark.parametrize("name", ["resnet50", "bert1"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_workloads(name, dtype):
    training = WORKLOADS[name].make(small=True)
    args = training.batch[:1]
    wanted = expected(training.model, *args).logits
    converted = amp_ir.convert_model(training.model, args, dtype, cast_optional_params=True)
    got = converted(*args).logits
    assert got.dtype is torch.float32
    assert float((got - wanted).abs().max()) <= 1e-2 * float(wanted.abs().max())
    # Biases and the scale of layer norms stay in float32; these models are small.
    full = sum(4 * one.numel() for one in training.model.parameters())
    assert converted.nbytes < 0.52 * full


# Lists of ops.


def test_lists_decide():
    fp32 = amp_ir.convert_model(net(), inputs(), "bfloat16", fp32_ops=["linear"])
    assert set(dtypes_read(fp32, "relax.matmul")) == {"float32"}
    assert dtypes_read(fp32, "amp_ir.conv") == ["bfloat16"]
    low = amp_ir.convert_model(net(), inputs(), "bfloat16", target_dtype_ops=["softmax"])
    assert dtypes_read(low, "relax.nn.softmax") == ["bfloat16"]
    assert dtypes_read(fp32, "relax.nn.softmax") == ["float32"]


def test_conditions_see_attributes_and_types():
    def convolution(*condition):
        made = amp_ir.convert_model(net(), inputs(), "bfloat16", conditional_fp32_ops=[condition])
        return dtypes_read(made, "amp_ir.conv")

    assert convolution("conv2d", "groups", [1]) == ["float32"]
    assert convolution("conv2d", "groups", ["1", "2"]) == ["float32"]
    assert convolution("conv2d", "groups", [3]) == ["bfloat16"]
    assert convolution("amp_ir.conv", "padding", [(1, 1)]) == ["float32"]
    assert convolution("conv", "input_ndim", [4]) == ["float32"]
    assert convolution("conv3d", "input_ndim", [4]) == ["bfloat16"]


def test_excluded_modules_stay_in_float32():
    made = amp_ir.convert_model(net(), inputs(), "bfloat16", excluded_names=["mixer", "c*"])
    assert made.parameters["mixer.weight"].dtype is torch.float32
    assert made.parameters["conv.weight"].dtype is torch.float32
    assert sorted(dtypes_read(made, "relax.matmul")) == ["bfloat16", "float32"]


def test_everything_wrong_with_the_lists_is_said_at_once():
    with pytest.raises(OptionError) as refused:
        amp_ir.convert_model(
            net(),
            inputs(),
            "bfloat16",
            target_dtype_ops=["conv2d", "sotfmax"],
            fp32_ops=["convolution", 3],
            conditional_fp32_ops=[("softmax", "axes", [1]), ("gelu", "x"), ("matmul", "x", "y")],
            excluded_names="mixer",
        )
    assert str(refused.value) == (
        "target_dtype_ops: 'sotfmax' is not an op; near: 'softmax', 'logsoftmax', 'log_softmax'; "
        "amp_ir.list_ops() has them all; fp32_ops has 3; expected a name; 'convolution' is in "
        "fp32_ops, and 'conv2d', the same op, is in target_dtype_ops; an op belongs to one list at "
        "most; conditional_fp32_ops: 'softmax' has no attribute 'axes'; it has 'axis', "
        "'input_dtype', 'input_ndim', 'input_shape'; conditional_fp32_ops has ('gelu', 'x'); "
        'expected (op, attribute, [values]), such as ("softmax", "axis", [1]); '
        "conditional_fp32_ops has ('matmul', 'x', 'y'); "
        'expected (op, attribute, [values]), such as ("softmax", "axis", [1]); '
        "excluded_names is 'mixer'; expected a list"
    )
    with pytest.raises(OptionError) as refused:
        amp_ir.convert_model(net(), inputs(), "bfloat16", excluded_names=["mixr"])
    assert str(refused.value) == ("excluded_names: the model has no module 'mixr'; near: 'mixer'")


def test_wrong_options_are_said_at_once():
    with pytest.raises(OptionError) as refused:
        amp_ir.convert_model(3, (), "int8", cast_optional_params="yes")  # type: ignore[arg-type]
    assert str(refused.value) == (
        "model is a int; expected a torch.nn.Module; target_dtype is 'int8'; expected \"float16\", "
        '"bfloat16" or "float32"; cast_optional_params is \'yes\'; expected True or False'
    )


def test_a_weight_that_float16_cannot_hold_is_refused():
    model = nn.Linear(64, 64)
    with torch.no_grad():
        model.weight[3, 4] = 1e5
    with pytest.raises(OptionError) as refused:
        amp_ir.convert_model(model, torch.zeros(2, 64), "float16")
    assert str(refused.value) == (
        'weight: a value is beyond float16\'s range (65504). Convert to "bfloat16", or exclude its '
        "module with excluded_names="
    )
    amp_ir.convert_model(model, torch.zeros(2, 64), "bfloat16")


def test_a_converted_model_is_not_copied():
    converted = amp_ir.convert_model(nn.Linear(4, 4), torch.zeros(2, 4), "float32")
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CopyError) as refused:
            copying(converted)
        assert str(refused.value) == (
            "a converted model cannot be copied or pickled: it is machine code of this process. "
            "Write it to a file with amp_ir.save, or convert a copy of the model"
        )
