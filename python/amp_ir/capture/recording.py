# SPDX-License-Identifier: Apache-2.0
"""The mode that sees every ATen op of the traced step.

It marks the new graph nodes with their location, and handles the few ops that need care.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_ir.capture.checked_reads import checked_read
from amp_ir.capture.constant_selections import select_by_constants
from amp_ir.capture.constant_values import constant_value
from amp_ir.capture.custom_ops import call_written, is_custom, unsupported_reason
from amp_ir.capture.decompositions.class_numbers import CLASS_LOSSES
from amp_ir.capture.decompositions.ctc import CTC
from amp_ir.capture.decompositions.foreach import call_foreach, is_foreach
from amp_ir.capture.decompositions.grouped_matmul import GROUPED_MATMUL
from amp_ir.capture.decompositions.loss_numbers import LOSS_NUMBERS
from amp_ir.capture.decompositions.random_integers import RANDOM_INTEGERS
from amp_ir.capture.decompositions.recurrent_cells import FUSED_CELLS
from amp_ir.capture.diagnostics import Diagnostics, TracingStopped
from amp_ir.capture.empty_reductions import check_reduced
from amp_ir.capture.failure_advice import ONE_DTYPE
from amp_ir.capture.guards.observer import Observer
from amp_ir.capture.guards.state_reads import PLACE_ADVICE, StateReads
from amp_ir.capture.locations import Locator, NodeMarker
from amp_ir.capture.patches.seeding import SEEDED_ADVICE, Seeding
from amp_ir.capture.refused_dtypes import refused_dtypes
from amp_ir.capture.refused_layouts import refused_layout
from amp_ir.capture.repeated_ops import RepeatedOps
from amp_ir.capture.texts_of_numbers import is_read_for_text, refuse_text
from amp_ir.capture.traced_node import traced_node
from amp_ir.capture.transaction import Transaction
from amp_ir.capture.value_checks import CHECKED_OPS, checks_of
from amp_ir.capture.written_outside import WrittenOutside
from amp_ir.capture.zero_tangents import ZeroTangents
from amp_ir.ir.empty_tensors import results_by_evaluation
from amp_ir.ir.index_check import ASSERTIONS
from amp_ir.ir.location import Location

aten = torch.ops.aten

_MOST_READS = 200
_READ_ADVICE = (
    "Keep it a tensor: return it and read it after the call, or choose with torch.where. A check "
    "of tensors that raises (if not torch.isfinite(loss): raise ...) stays; to skip a step whose "
    "gradients are not finite, use amp_ir.GradScaler"
)
_SELECTION_ADVICE = (
    "An if around a selection by this mask may go: of no rows a[mask] = f(b[mask]) changes nothing "
    "(and the parameters of f have gradients of 0, where they had none)"
)
_SHAPE_ADVICE = (
    "A compiled step has fixed shapes: multiply by the mask or use torch.where instead of "
    "selecting. A mask that the step makes of constants (torch.eye, torch.arange) may select"
)
_VALUES = "makes a shape or a branch depend on the data"
# (what an op does, what to do) where the default message would mislead.
_OF_OPS: dict[Any, tuple[str, str]] = {
    aten.linalg_lstsq: (
        "returns residuals whose shape depends on the data",
        "Use torch.linalg.pinv(a) @ b, or torch.linalg.solve where the matrices are square",
    ),
    aten.bincount: (
        _VALUES,
        "Count into a tensor of fixed size: torch.zeros(n).index_add(0, ids, torch.ones(len(ids)))",
    ),
}
_OF_ONE_DTYPE = {
    aten.mm.default, aten.bmm.default, aten.mv.default, aten.addmm.default, aten.addmv.default,
    aten.baddbmm.default, aten.convolution.default,
}  # fmt: skip
_CHECK_ERRORS = aten._linalg_check_errors.default
_DEVICE = torch.ops.prim.device.default
_READ = aten._local_scalar_dense.default
_READ_TEXT = "a tensor's value is read in Python, by .item(), float(), int(), bool(), if or while"

_DEFAULT_DTYPE = (
    "Leave torch.set_default_dtype out: give dtype= where a tensor is made, and convert integers "
    "before arithmetic, .to(torch.float64)"
)
_ANOMALY_TEXT = "torch.autograd.set_detect_anomaly reads the values of every gradient"
_ANOMALY_ADVICE = (
    "Leave it off around a compiled step; train.find_overflow(*batch) says which op and line makes "
    'a NaN, and so does jit(..., on_overflow="explain")'
)
_OWN_GENERATOR = (
    "Leave generator= out: a compiled step draws numbers of its own, other ones at each call, from "
    "the seed of torch.manual_seed before it is compiled. Or draw before the step, and pass the "
    "tensor in the batch"
)
_PACKED_ADVICE = (
    "Where it is the batch sizes of a PackedSequence that the step is passed: pass the padded rows "
    "and their lengths, and call pack_padded_sequence inside of the step"
)

_CLUSTER_ADVICE = (
    "AdaptiveLogSoftmaxWithLoss selects the rows of each cluster: use "
    "F.nll_loss(layer.log_prob(x), y), which is the same loss over all classes"
)
_METRIC_ADVICE = (
    "Update a metric of torchmetrics after the step, with what the step returns; in Lightning in "
    "on_train_batch_end"
)


class Recorder(TorchDispatchMode):
    """A mode that marks every op with its location, and rejects reads of values, outside writes."""

    def __init__(
        self,
        locator: Locator,
        diagnostics: Diagnostics,
        batch: list[torch.Tensor],
        transaction: Transaction,
        mode: FakeTensorMode,
        observer: Observer,
        checks: list[torch.Tensor],
        seeding: Seeding,
        state_reads: StateReads,
        written: WrittenOutside,
        *,
        takes_packed: bool = False,
    ) -> None:
        super().__init__()
        self._seeding = seeding
        self._state_reads = state_reads
        self._takes_packed = takes_packed
        self._checks = checks
        self._zero_tangents = ZeroTangents()
        self._observer = observer
        self._transaction = transaction
        self._locator = locator
        self._diagnostics = diagnostics
        self._batch_storages = {_storage(tensor) for tensor in batch}
        self._written = written
        self._reads = 0
        self._default_dtype = torch.get_default_dtype()
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        self._marker = NodeMarker(proxy_mode.tracer.graph)
        self._repeated = RepeatedOps(proxy_mode, mode)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: Dynamo is not there, and PyTorch's wrapper to keep it out takes time."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Trace one op."""
        self._observer.pause()
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            self._observer.go_on()

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _DEVICE:
            # PyTorch asks for it twice per op; the modes below would return the same.
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if is_foreach(func):
            with self:
                return call_foreach(func, args, kwargs)
        location = self._locator.here()
        if func is _READ:
            if not _is_known(args[0]):
                constant = constant_value(args[0])
                return self._read(args[0]) if constant is None else constant.item()
            if not isinstance(args[0], FakeTensor):
                self._state_reads.read_outside(args[0], location)
        unsupported = self._unsupported(func, args, kwargs)
        if unsupported is not None:
            self._diagnostics.add(unsupported[0], location, unsupported[1])
            raise TracingStopped
        self._check_arguments(func, args, kwargs, location)
        args, kwargs = self._with_checked_writes(func, args, kwargs)
        try:
            out = self._traced(func, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            out = select_by_constants(func, args, kwargs)
            self._check_dependence(out, error, location)
        if torch.get_default_dtype() is not self._default_dtype:
            self._check_default_dtype(func, (args, kwargs), out, location)
        if func is aten.zero_.default:
            self._transaction.cleared(args[0])
        self._marker.mark(location)
        return out

    def _unsupported(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str, str] | None:
        """Return why a step cannot have an op, and what to do; None where it can."""
        if kwargs.get("generator") is not None:
            return f"{func} draws from a torch.Generator", _OWN_GENERATOR
        seeded_by = self._seeding.before(func, args, kwargs)
        if seeded_by:
            return f"{func} draws random numbers after the step called {seeded_by}", SEEDED_ADVICE
        return unsupported_reason(func) if is_custom(func) else None

    def _check_dependence(self, out: Any, error: Any, location: Location) -> None:
        """Refuse an op whose results' shapes depend on the data, which constants do not decide."""
        if out is None:
            self._diagnostics.add(*_data_dependence(error.func, location))
            raise TracingStopped from error

    def _check_default_dtype(self, func: Any, given: Any, out: Any, location: Location) -> None:
        """Refuse an op whose dtype is the default one, which the step has set.

        What the graph is made into afterwards runs with the default dtype of the call.
        """
        tensors, results = (
            [one for one in pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]
            for tree in (given, out)
        )
        is_given = given[1].get("dtype") is not None or any(map(_is_float, tensors))
        if not is_given and any(map(_is_float, results)):
            what = f"{func} makes {torch.get_default_dtype()}, to which the step sets the default"
            self._diagnostics.add(f"{what} dtype", location, _DEFAULT_DTYPE)

    def _in_inference_mode(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an op that is special in inference mode; NotImplemented for others."""
        if getattr(func, "is_view", False) and not args[0].is_inference():
            # A view of a plain tensor is one too, and counts writes with it.
            with torch.inference_mode(False), torch.no_grad():
                return self._traced(func, args, kwargs)
        # The ops that are made of others arrive whole, with special ones in them.
        with self:
            return func.decompose(*args, **kwargs)

    def _traced(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the op, and mark its nodes."""
        if func in ASSERTIONS or (func is _CHECK_ERRORS and _checked_by_op(args[0])):
            return None
        if is_custom(func) and func._schema.is_mutable:
            return call_written(func, args, kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        zeros = self._zero_tangents.call(func, args, kwargs)
        if zeros is not None:
            return zeros
        if torch.is_inference_mode_enabled():
            out = self._in_inference_mode(func, args, kwargs)
            if out is not NotImplemented:
                return out
        detached = self._repeated.renamed(func, args)
        if detached is not None:
            return detached
        try:
            return self._called(func, args, kwargs)
        except (ArithmeticError, RuntimeError, TypeError):
            results = results_by_evaluation(func, args, kwargs)
            if results is None:
                raise
            return results

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = self._repeated.begin(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        out = self._repeated.repeat(call, func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
            self._repeated.learn(call, func, args, kwargs, out)
        return out

    def _read(self, tensor: torch.Tensor) -> int | float | bool:
        """Record the read and continue with 1, to find the other places too.

        A bool that decides whether the step raises is checked by the compiled step; what the state
        before the step decides alone is a guard.
        """
        check = checked_read(sys._getframe(1)) if tensor.dtype is torch.bool else None
        if check is not None:
            with self:
                self._require(tensor.ne(check.wanted), check.message)
            return check.wanted
        if is_read_for_text(sys._getframe(1)):
            refuse_text(self._diagnostics, self._locator)
            raise TracingStopped
        location = self._locator.here()
        known = self._state_reads.value(tensor, location)
        if known is not None:
            return known.item()
        self._diagnostics.add(*self._read_diagnostic(tensor, location))
        self._reads += 1
        if self._reads > _MOST_READS:
            raise TracingStopped
        if tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _require(self, is_wrong: torch.Tensor, message: str) -> None:
        flag = is_wrong.reshape(1).to(torch.int64)
        self._checks.append(torch.ops.amp_ir.checked_lengths(flag, flag, 0, 1, message))

    def _check_arguments(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], location: Location
    ) -> None:
        """Refuse what PyTorch's kernels do: here, or where it is a matter of values in the step."""
        self._check_dtypes(func, args, kwargs, location)
        check_reduced(func, args, kwargs)
        if func in CHECKED_OPS:
            with self:
                for is_wrong, message in checks_of(func, args, location):
                    self._require(is_wrong, message)

    def _read_diagnostic(
        self, tensor: torch.Tensor, location: Location
    ) -> tuple[str, Location, str]:
        """Return what to say of a read, which PyTorch may have made for the user."""
        if torch.is_anomaly_check_nan_enabled() and location.phase == "backward":
            return _ANOMALY_TEXT, location, _ANOMALY_ADVICE
        if _is_in_torchmetrics(location):
            return _READ_TEXT, location, _METRIC_ADVICE
        text = f"{_READ_TEXT}{self._locator.called_at()}"
        is_place = not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool
        parts = [
            (_PACKED_ADVICE, self._takes_packed),
            (PLACE_ADVICE, is_place),
            (_SELECTION_ADVICE, _is_any(tensor)),
            (_READ_ADVICE, True),
        ]
        return text, location, ". ".join(part for part, is_said in parts if is_said)

    def _check_dtypes(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], location: Location
    ) -> None:
        """Refuse dtypes that PyTorch's kernels refuse, and its fakes do not; and some layouts."""
        refused = refused_dtypes(func, args, kwargs) or refused_layout(func, args, kwargs)
        if refused is not None:
            self._diagnostics.add(refused[0], location, refused[1])
            raise TracingStopped
        if func not in _OF_ONE_DTYPE:
            return
        dtypes = dict.fromkeys(one.dtype for one in args if isinstance(one, torch.Tensor))
        if len(dtypes) > 1:
            names = " and ".join(str(one).removeprefix("torch.") for one in dtypes)
            what = f"{func} reads tensors of {names}, which PyTorch refuses too"
            self._diagnostics.add(what, location, ONE_DTYPE)
            raise TracingStopped

    def _with_checked_writes(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check and save what an op writes to; return the arguments to go on with."""
        targets = self._targets(func, args, kwargs)
        self._check_targets(func, targets, self._transaction.before_write)
        if func in _BATCH_NORMS:
            # They update running statistics in training, which their schemas do not declare.
            statistics = [one for one in args[3:5] if one is not None and args[5]]
            self._check_targets(func, statistics, self._transaction.before_statistics)
        if self._written.found:
            args, kwargs = pytree.tree_map(self._written.as_traced, (args, kwargs))
        return args, kwargs

    def _check_targets(
        self, func: Any, targets: Iterable[torch.Tensor], save: Callable[[torch.Tensor], None]
    ) -> None:
        for target in targets:
            outside = self._written.source(target)
            if outside is not None and self._locator.here().phase != "optimizer":
                if self._written.take(outside):
                    continue
            if outside is not None:
                what = f"{func} writes to a tensor outside of the model and the optimizer"
                advice = (
                    "Pass its module in model=[...], register it as a buffer of the model, pass "
                    "its optimizer in optimizer=, or update it after the step. A tensor of a dict, "
                    "a list or a closure is followed where it needs no gradient, is contiguous and "
                    "no part of another one"
                )
            elif _storage(target) in self._batch_storages:
                what = f"{func} writes to a tensor of the batch"
                advice = "Write to a copy: call .clone() first"
            else:
                save(target)
                continue
            self._diagnostics.add(what, self._locator.here(), advice)
            raise TracingStopped

    def _targets(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        schema = func._schema
        if not schema.is_mutable:
            return []
        written = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        positions = {a.name: i for i, a in enumerate(schema.arguments)}
        found = []
        for argument in written:
            at = positions[argument.name]
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            found += list(value) if isinstance(value, (list, tuple)) else [value]
        return [value for value in found if isinstance(value, torch.Tensor)]


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_known(tensor: torch.Tensor) -> bool:
    """Return whether the value is a constant of the step (of torch.tensor, or not traced)."""
    return not isinstance(tensor, FakeTensor) or tensor.constant is not None


def _is_any(tensor: torch.Tensor) -> bool:
    """Return whether a value tells whether a mask selects anything."""
    node = traced_node(tensor)
    return node is not None and node.target is aten.any.default


def _checked_by_op(info: torch.Tensor) -> bool:
    """Let the factorization that made `info` check its errors itself, in the step that runs.

    PyTorch checks in an op of its own, which has no result that a graph could need.
    """
    made = traced_node(info)
    node: Any = None if made is None else made.args[0]
    schema = getattr(getattr(node, "target", None), "_schema", None)
    if schema is None or all(one.name != "check_errors" for one in schema.arguments):
        return False
    node.kwargs = {**node.kwargs, "check_errors": True}
    return True


def _cudnn_batch_norm(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """Run `native_batch_norm` for cuDNN's op, which PyTorch chooses whatever it was told (2.11).

    What cuDNN keeps for its backward op is empty: that op is decomposed into PyTorch's own.
    """
    return (*_batch_norm(x, *args), x.new_empty(0, dtype=torch.uint8))


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,  # noqa: FBT001 - ATen's own signature
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Run `native_batch_norm` with its undeclared update of the running statistics made visible."""
    if not training or running_mean is None or running_var is None:
        return aten.native_batch_norm.default(
            x, weight, bias, running_mean, running_var, training, momentum, eps
        )
    functional = aten._native_batch_norm_legit_functional.default
    y, mean, rstd, new_mean, new_var = functional(
        x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    aten.copy_.default(running_mean, new_mean)
    aten.copy_.default(running_var, new_var)
    return y, mean, rstd


_BATCH_NORMS: Mapping[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
}
_SPECIAL: Mapping[Any, Callable[..., Any]] = {
    **_BATCH_NORMS,
    **FUSED_CELLS,
    **CLASS_LOSSES,
    **LOSS_NUMBERS,
    **CTC,
    **GROUPED_MATMUL,
    **RANDOM_INTEGERS,
}


def _data_dependence(func: Any, location: Location) -> tuple[str, Location, str]:
    """Return what to say of an op whose results' shapes depend on the data."""
    packet = getattr(func, "overloadpacket", None)
    what, advice = _OF_OPS.get(packet, (_VALUES, _SHAPE_ADVICE))
    return f"{func} {what}", location, caller_advice(location) or advice


def caller_advice(location: Location) -> str | None:
    """Return what to do where the code of a library makes a call that is refused; else None."""
    if _is_in_torchmetrics(location):
        return _METRIC_ADVICE
    return _CLUSTER_ADVICE if _is_in_adaptive_softmax(sys._getframe(1)) else None


def _is_in_adaptive_softmax(frame: FrameType | None) -> bool:
    code = torch.nn.AdaptiveLogSoftmaxWithLoss.forward.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _is_in_torchmetrics(location: Location) -> bool:
    return "/torchmetrics/" in location.file.replace("\\", "/")
