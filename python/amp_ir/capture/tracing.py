# SPDX-License-Identifier: Apache-2.0
"""The user's step, run once on fake tensors: its ops become a graph of ATen ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from amp_ir.capture.argument_changes import WatchedArguments
from amp_ir.capture.batch import Arguments, unusable_result
from amp_ir.capture.call_arguments import call
from amp_ir.capture.chosen_rows import ChosenRow
from amp_ir.capture.collectives import TracedRanks
from amp_ir.capture.constant_values import noting_reads
from amp_ir.capture.containers import flatten
from amp_ir.capture.decompositions.packed_sequences import PackedPart
from amp_ir.capture.diagnostics import Diagnostics, TracingStopped
from amp_ir.capture.failure_advice import OUR_FAULT, advice_on, is_our_fault
from amp_ir.capture.functional import uncompiled_graphs
from amp_ir.capture.gradient_watch import GradientWatch
from amp_ir.capture.guards.followed_hypers import OtherHypers
from amp_ir.capture.guards.followed_numbers import Numbers
from amp_ir.capture.guards.gradient_flags import GradientFlags
from amp_ir.capture.guards.identities import Identities
from amp_ir.capture.guards.kept_outputs import KEEP_COPY, KeptOutputs, results_of
from amp_ir.capture.guards.left_values import StoredValue
from amp_ir.capture.guards.observer import Observer
from amp_ir.capture.guards.places import is_same
from amp_ir.capture.guards.side_effects import SideEffects
from amp_ir.capture.guards.state_reads import StateReads
from amp_ir.capture.hyper_parameters import HyperParameter, put_values, symbolic_arithmetic
from amp_ir.capture.later_number import LaterNumber
from amp_ir.capture.locations import Locator
from amp_ir.capture.loss_scaling import CapturedScaler
from amp_ir.capture.patches.install import patched
from amp_ir.capture.patches.last_rates import LastRates
from amp_ir.capture.patches.module_methods import module_methods_kept
from amp_ir.capture.patches.seeding import Seeding
from amp_ir.capture.recording import Recorder
from amp_ir.capture.shared_memory import shared_gradients
from amp_ir.capture.state import (
    LookedEarlyError,
    State,
    StateTensor,
    WritesOutsideError,
    fake_of,
    fake_of_state,
    kept,
    put_fakes,
)
from amp_ir.capture.substitution import Substitution
from amp_ir.capture.symbolic_float import FloatTape, SymbolicFloat
from amp_ir.capture.traced import Created, Traced
from amp_ir.capture.transaction import BufferPlace, Transaction
from amp_ir.capture.written_outside import WrittenOutside
from amp_ir.distributed.replicas import Ranks
from amp_ir.errors import AmpIrError, CaptureError
from amp_ir.ir.capturing import captured_scalers
from amp_ir.ir.location import Location
from amp_ir.ir.step_module import Role

_NUMBERS = (SymbolicFloat, LaterNumber)
_KEEP_KIND = "Write to it in place (copy_) and keep its shape and dtype"
_OF_LONGEST = "; make a table that grows with the batch before the first call, for the longest one"


class StepTracer:
    """A tracer of one step; use once."""

    def __init__(
        self,
        step: Callable[..., Any],
        arguments: Arguments,
        state: State,
        hypers: list[HyperParameter],
        mode: FakeTensorMode,
        numbers: frozenset[str] = frozenset(),
        *,
        symbolic: bool = True,
        others: int = 0,
        other_hypers: OtherHypers | None = None,
        finds_tables_of_state: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._other_hypers = other_hypers
        self._step = step
        self._arguments = arguments
        self._state = state
        self._hypers = hypers
        self.mode = mode
        self._diagnostics = Diagnostics()
        self._locator = Locator(state.models)
        values = [hyper.value() for hyper in hypers]
        values = values if other_hypers is None else list(other_hypers.values)
        self.tape = FloatTape(values, self._refuse_float)
        self.numbers = Numbers(numbers, self.tape if symbolic else None, others=others)
        self._identities = Identities()
        opaque = [*state.optimizers, *(scaler_state.scaler for scaler_state in state.scalers)]
        self.observer = Observer(
            self._locator, self._diagnostics, opaque, self.numbers.replace, self._identities
        )
        self._state_reads = StateReads(
            state.tensors, self.tape, self.observer.note_read, self._diagnostics,
            is_alone=ranks is None,
        )  # fmt: skip
        self._last_rates = LastRates(state.optimizers)
        self._written = WrittenOutside(self.observer.objects.tensors, state.tensors)
        known = state.tensors if finds_tables_of_state else ()
        self.effects = SideEffects(self.observer, self.numbers.put, known)
        self._read: list[torch.Tensor] = []
        self._left: dict[str, Any] = {}
        self._replaced: dict[int, torch.Tensor] = {}
        self._checks: list[torch.Tensor] = []
        self._stepped: list[torch.optim.Optimizer] = []
        self._early: LookedEarlyError | None = None
        self._transaction: Transaction | None = None

    def trace(self) -> Traced:
        """Run the step on fakes.

        Raises:
            CaptureError: the step does what a compiled step cannot do, or fails itself.
        """
        for entry in self._state.tensors:
            entry.fake = fake_of_state(entry, self.mode)
        batch = [fake_of(tensor, self.mode) for tensor in self._arguments.tensors]
        inputs = [*(entry.fake for entry in self._state.tensors), *batch]
        pairs = [(entry.tensor, entry.fake) for entry in self._state.tensors]
        with (
            self.mode, self._identities.taken_over(pairs), kept(self._state), uncompiled_graphs(),
            module_methods_kept(), self._effects_undone(),
        ):  # fmt: skip
            graph = make_fx(
                lambda *_flat: self._run(batch),
                tracing_mode="real",
                _allow_non_fake_inputs=True,
                _disable_torch_fn_metadata_mode=True,
            )(*inputs)
        return Traced(graph=graph, inputs=inputs, read_count=len(self._read), **self._left)

    @contextlib.contextmanager
    def _effects_undone(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.effects.restore()
            if self._early is not None:  # whatever the user's code made of it
                raise self._early from None
            if self._written.found:
                raise WritesOutsideError(self._written.found) from None

    def _run(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        state = self._state
        fakes = put_fakes(state)
        for optimizer in state.optimizers:
            self._watch_early_looks(optimizer)
        attributes = [dict(vars(entry.fake)) for entry in state.tensors]
        overwritten = put_values(self._hypers, self._hyper_values())
        watch = GradientWatch([fakes[id(entry.tensor)] for entry in state.parameters])
        transaction = self._transaction = Transaction(state, self._buffer_places)
        scalers = self._put_scalers(transaction)
        ranks = self._traced_ranks(fakes)
        given = captured_scalers.set(tuple(scaler_state.scaler for scaler_state in state.scalers))
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(captured_scalers.reset, given)
                stepped = self._stepped = stack.enter_context(
                    patched(
                        state,
                        self._locator,
                        watch,
                        self._diagnostics,
                        transaction,
                        ranks,
                    )
                )
                stack.enter_context(self._last_rates.followed(self.observer.readings))
                stack.enter_context(symbolic_arithmetic(self.tape, self._read_value))
                stack.enter_context(noting_reads(self._state_reads.note_outside))
                stack.enter_context(
                    Recorder(
                        self._locator,
                        self._diagnostics,
                        batch,
                        transaction,
                        self.mode,
                        self.observer,
                        self._checks,
                        stack.enter_context(Seeding.watched()),
                        self._state_reads,
                        self._written,
                        takes_packed=self._arguments.takes_packed,
                    )
                )
                calls = Substitution(
                    fakes, watch, transaction, self._locator, self._diagnostics,
                    self._state_reads,
                )  # fmt: skip
                stack.enter_context(calls)
                self.observer.objects.stand_ins.begin(state.optimizers)
                self.observer.add_models(state.models)
                self.effects.begin(state.models, state.optimizers)
                self.observer.add_step(self._step)
                arguments = self._arguments.with_tensors(
                    batch, self.numbers.arguments(self._arguments)
                )
                given_arguments = WatchedArguments(arguments)
                with self.observer.watching():
                    value = call(self._step, arguments)
                for scaler in scalers:
                    scaler.finish()
                calls.data.finish({one.name: one.fake for one in state.tensors})
                with self._locator.optimizing():
                    self._replaced = transaction.finish()
        except TracingStopped:
            raise self._diagnostics.error() from None
        except AmpIrError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise self._failure(error) from error
        self.effects.report(self._diagnostics)
        pairs = [(one.tensor, one.fake) for one in state.parameters]
        self._left["flags"] = flags = GradientFlags.of_changed(pairs)
        if flags is not None:
            self.effects.stored.append(StoredValue(flags, flags.after()))
        self._left["state_reads"] = self._state_reads
        self._left["stored"] = tuple(self.effects.stored)
        self._left["changes"] = changes = given_arguments.changes()
        for change in changes.refused:
            self._refuse(f"the step {change}", "Change a copy of it, or return what is new")
        self._refuse_attributes_of_batch()
        self._refuse_new_attributes(attributes)
        for key in overwritten():
            self._diagnostics.add(
                f"the step sets param_groups[...][{key!r}]",
                self.observer.stores_entry_at(key),
                "Set it between two steps: it is read at each call, and nothing is compiled again",
            )
        self._refuse_unsaved_state(transaction)
        self._refuse_gradients_of(batch)
        self._refuse_shared_gradients(watch)
        observed = {id(s.tensor) for s in state.parameters if id(s.fake) in watch.observed}
        touched = watch.touched()
        touched = {id(s.tensor) for s in state.parameters if id(s.fake) in touched}
        self._left.update(observed=observed, touched=touched, stepped=stepped)
        self._left.update(has_differentiated=watch.has_differentiated)
        self._left.update(shown_at=tuple(calls.shown_at), assigns_parts=calls.data.assigns_parts)
        self._left.update(sends_buffers=() if ranks is None else ranks.sends_buffers)
        outputs = self._outputs(value, batch)
        if self._diagnostics:
            raise self._diagnostics.error()
        return outputs

    def _watch_early_looks(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse looks at the state of an optimizer of PyTorch's that has taken no step yet.

        Those of a user's subclass of one are followed by another capture.
        """
        kind = type(optimizer)
        is_torchs = kind.__module__.partition(".")[0] == "torch"

        def looked() -> None:
            if not is_torchs:
                self._early = LookedEarlyError(optimizer)
                raise self._early
            if optimizer not in self._stepped:
                self._diagnostics.add(
                    f"looks at the state of {kind.__name__} before its first step, which makes it "
                    "in PyTorch; a compiled step has it before",
                    self._locator.here(),
                    "Look after optimizer.step(), or take the first step in PyTorch, uncompiled",
                )

        optimizer.state.looked_early = looked  # type: ignore[attr-defined]

    def _hyper_values(self) -> list[float]:
        if self._other_hypers is not None and not self._other_hypers.symbolic:
            return self._other_hypers.values
        return [self.tape.input(index) for index in range(len(self._hypers))]

    def _traced_ranks(self, fakes: dict[int, torch.Tensor]) -> TracedRanks | None:
        if self._ranks is None:
            return None
        return TracedRanks(self._ranks, fakes, self._locator, self._diagnostics)

    def _refuse_attributes_of_batch(self) -> None:
        """Refuse Python values beside tensors of the batch, which differ from call to call."""
        for tensor in self._arguments.tensors:
            for key in vars(tensor):
                if not key.startswith("_") and self.observer.users_code_names(frozenset({key})):
                    self._refuse(
                        f"the step reads the attribute {key!r} of a tensor of the batch",
                        "Pass its value to the step as an argument",
                    )

    def _refuse_new_attributes(self, before: list[dict[str, Any]]) -> None:
        """Refuse attributes of state tensors that the step sets or deletes, and may read later."""
        for entry, held in zip(self._state.tensors, before, strict=True):
            now = vars(entry.fake)
            changed = [key for key in {**held, **now} if not is_same(now.get(key), held.get(key))]
            for key in changed:
                if self.observer.users_code_names(frozenset({key})):
                    self._refuse(
                        f"the step sets the attribute {key!r} of {entry.name}",
                        "Register a tensor as a buffer of the model, or keep it in the "
                        "optimizer's state; set a number after the step. What only this step reads "
                        "it may delete before it ends",
                    )

    def _outputs(self, value: Any, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the flat outputs of the graph; `_left` records their roles."""
        leaves, spec = flatten(value)
        leaves = [leaf.read() if isinstance(leaf, ChosenRow) else leaf for leaf in leaves]
        for reason in filter(None, map(unusable_result, leaves)):
            advice = "Return tensors and plain values in tuples, lists, dicts or dataclasses"
            self._refuse(reason, advice)
        values = self._new_values()
        kept = KeptOutputs(self.effects.kept.all, self._state, values, batch)
        for what, where in kept.refused():
            self._diagnostics.add(what, where, KEEP_COPY)
        every = [*leaves, *kept.leaves()]
        symbols = [leaf for leaf in every if isinstance(leaf, SymbolicFloat)]
        every = [leaf.tensor if isinstance(leaf, LaterNumber) else leaf for leaf in every]
        tensors = [*{id(leaf): leaf for leaf in every if isinstance(leaf, FakeTensor)}.values()]
        position = {id(x): i for i, x in enumerate((*tensors, *self._checks, *symbols))}
        self._state_reads.refuse_counters(values)
        gradients = [entry for entry in self._state.parameters if entry.fake.grad is not None]
        created = list(self._created())
        self._left.update(
            results=results_of(leaves, spec, position, {}),
            kept=kept.results(position),
            symbols=symbols,
            result_count=len(tensors) + len(self._checks),
            gradients=gradients,
            created=created,
            gives_gradients=any(one.grad_fn is not None for one in tensors),
        )
        left = [entry.fake.grad for entry in gradients if entry.fake.grad is not None]
        return [*tensors, *self._checks, *values, *left, *(c.value for c in created), *self._read]

    def _new_values(self) -> list[torch.Tensor]:
        """Return the current value of each state tensor: its fake, or what replaced it."""
        now: dict[int, torch.Tensor] = {}
        for entry, value in self._places():
            fits = isinstance(value, FakeTensor) and value.shape == entry.fake.shape
            if entry.role is Role.PARAMETER:
                fits = value is entry.fake
            elif fits:
                fits = value.dtype == entry.tensor.dtype
            if not fits:
                self._refuse(
                    f"the step replaces {entry.name} by something of another kind",
                    _KEEP_KIND + (_OF_LONGEST if entry.role is Role.BUFFER else ""),
                )
            now.setdefault(id(entry), value)
        now.update(self._replaced)
        return [now.get(id(entry), entry.fake) for entry in self._state.tensors]

    def _buffer_places(self) -> Iterator[BufferPlace]:
        """Return where each buffer of the state is held."""
        named = {entry.name: entry for entry in self._state.buffers}
        for index, model in enumerate(self._state.models):
            prefix = f"model{index}" if index else ""
            for path, module in model.named_modules(prefix=prefix):
                for key in module._buffers:
                    entry = named.get(f"{path}.{key}" if path else key)
                    if entry is not None:
                        yield BufferPlace(entry, module._buffers, key)

    def _places(self) -> Iterator[tuple[StateTensor, Any]]:
        """Return each state tensor with its current value."""
        state = self._state
        named = {entry.name: entry for entry in (*state.parameters, *state.buffers)}
        for index, model in enumerate(state.models):
            prefix = f"model{index}" if index else ""
            for path, module in model.named_modules(prefix=prefix):
                for key, value in (*module._parameters.items(), *module._buffers.items()):
                    entry = named.get(f"{path}.{key}" if path else key)
                    if entry is not None:
                        yield entry, value
        fakes = {id(entry.tensor): entry.fake for entry in state.parameters}
        for (index, parameter), by_key in state.optimizer_state.items():
            values = state.optimizers[index].state.get(fakes[parameter], {})
            for key, entry in by_key.items():
                yield entry, values.get(key)

    def _created(self) -> Iterator[Created]:
        """Return optimizer state tensors that the step made; plain values must not change."""
        for index, optimizer in enumerate(self._state.optimizers):
            for entry in self._state.parameters:
                known = self._state.optimizer_state.get((index, id(entry.tensor)), {})
                before = self._state.plain_values.get((index, id(entry.tensor)), {})
                for key, value in optimizer.state.get(entry.fake, {}).items():
                    if isinstance(value, FakeTensor) and key not in known:
                        yield Created(index, entry.tensor, key, value)
                    elif isinstance(value, PackedPart) or (
                        not isinstance(value, torch.Tensor) and before.get(key) != value
                    ):
                        self._refuse(
                            f"{type(optimizer).__name__} keeps {key!r} as a Python value and "
                            "changes it",
                            "Let the optimizer keep it as a tensor and update it in place: "
                            f"state[{key!r}] = torch.zeros(()), then state[{key!r}] += 1",
                        )

    def _put_scalers(self, transaction: Transaction) -> list[CapturedScaler]:
        """Put fakes into the scalers, and make them trace as ops."""
        scalers = [
            CapturedScaler(
                scaler_state,
                transaction,
                self._locator,
                self._diagnostics,
                lambda tensor: self.tape.tensor(self._read_value(tensor)),
            )
            for scaler_state in self._state.scalers
        ]
        for scaler in scalers:
            scaler.install()
        return scalers

    def _refuse_unsaved_state(self, transaction: Transaction) -> None:
        """Reject state that an optimizer makes in its first step: no old value can be selected."""
        for index, optimizer in enumerate(self._state.optimizers):
            if id(optimizer) in transaction.guarded:
                made = [one for one in self._created() if one.optimizer == index]
                if made:
                    self._refuse(
                        f"{type(optimizer).__name__} makes {made[0].key!r} in its first step, "
                        "which an overflow may skip",
                        "Run one step in plain PyTorch first, so that the state exists",
                    )

    def _refuse_gradients_of(self, batch: list[torch.Tensor]) -> None:
        """Reject a backward pass that writes to a batch tensor that requires a gradient."""
        for path, fake in zip(self._arguments.tensor_paths, batch, strict=True):
            if fake.grad is not None:
                self._refuse(
                    f"the backward pass leaves a gradient in {path} (its .grad)",
                    "Pass it detached. Where the step needs its gradient, let it begin with "
                    "x = x.detach().requires_grad_(), and return x.grad or use it",
                )

    def _refuse_shared_gradients(self, watch: GradientWatch) -> None:
        """Reject one gradient of two parameters, to which a later step would add in both."""
        shared = shared_gradients(self._state, watch.shared)
        if shared is not None:
            first, second = shared
            self._refuse(
                f"the step leaves one tensor in {first}.grad and {second}.grad",
                "Assign a copy, one.grad = other.grad.clone(), or clear the gradients at its end",
            )

    def _read_value(self, tensor: torch.Tensor) -> int:
        self._read.append(tensor.detach().to(torch.float64, copy=True))
        return len(self._read) - 1

    def _refuse(self, what: str, advice: str) -> None:
        self._diagnostics.add(what, Location(), advice)

    def _refuse_float(self, reason: str) -> None:
        advice = "Compute with the value as it is, or with tensors"
        self._diagnostics.add(reason, self._locator.here(), advice)

    def _failure(self, error: Exception) -> CaptureError:
        """Return the error to raise for an error of the user's step; prefer earlier diagnostics."""
        if self._diagnostics:
            return self._diagnostics.error()
        where = self._locator.of_error(error)
        # What PyTorch advises authors of its own kernels is of no use here.
        text = str(error).partition("\nIf you're using torch.compile")[0].rstrip(". \n")
        failure = f"the step failed while it was traced, at {where}: {type(error).__name__}: {text}"
        model = [entry.tensor for entry in self._state.parameters]
        advice = advice_on(text, model, self._arguments.tensors)
        if "modified by an inplace operation" in text and self._transaction is not None:
            advice = self._transaction.advice_on_writes() or advice
        if is_our_fault(error):
            advice = OUR_FAULT
        return CaptureError(f"{failure}. {advice}", failure=failure)
