# SPDX-License-Identifier: Apache-2.0
"""A built step with the tensors it works on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from amp_ir.errors import AmpIrError, DeviceError
from amp_ir.host.huge_pages import empty_in_huge_pages
from amp_ir.host.memory_limit import is_out_of_memory, out_of_memory
from amp_ir.ir.executable import Executable
from amp_ir.ir.external_call import unrecordable_ops
from amp_ir.ir.memory_order import extents_in_memory, from_memory, in_memory
from amp_ir.ir.memory_plan import MemoryPlan
from amp_ir.ir.planned_checks import PlannedChecks
from amp_ir.ir.step_module import Role, Signature
from amp_ir.ir.tensor_layout import ALIGNMENT_BYTES
from amp_ir.runtime import torn_state
from amp_ir.runtime.arena import Arena
from amp_ir.runtime.found_indices import FoundIndices
from amp_ir.runtime.graph_run import GraphRun
from amp_ir.runtime.program_input import ComparedInputs, ProgramInput, State, StateViews, flat_view
from amp_ir.runtime.step_run import StepRun
from amp_ir.runtime.written_memory import WrittenMemory

if TYPE_CHECKING:
    from amp_ir.distributed.exchange import Exchange

T = TypeVar("T")


def _as_it_is(results: list[torch.Tensor]) -> list[torch.Tensor]:
    return results


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the batch, dense and aligned for kernels; copied if it is not."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT_BYTES else tensor


class Program:
    """A planned step on given state tensors, which it updates in place.

    On a GPU a run is asynchronous, as PyTorch's ops are: nothing is read back. Batch and results
    have memory of their own there, which the recorded graph works on; batches are copied into it
    and results out of it.

    Programs that share an `arena` run one after the other.

    Raises:
        StateError: see `check_state`. DeviceError: the arena does not fit into the GPU's memory.
    """

    def __init__(
        self,
        executable: Executable,
        plan: MemoryPlan,
        signature: Signature,
        state: State,
        device: Any = "cpu",
        *,
        checks: PlannedChecks | None = None,
        arena: Arena | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.exchange = exchange
        self.checks = PlannedChecks() if checks is None else checks
        self.executable = executable
        self.plan = plan
        self.signature = signature
        self.device = _with_index(torch.device(device))
        self._main = executable.vm["main"]
        self._inputs = [ProgramInput.bind(spec, state, self.device) for spec in signature.inputs]
        self._state_views = StateViews(self._inputs)
        self._compared_inputs = ComparedInputs(self._inputs)
        self._written_memory = WrittenMemory(self._inputs, signature.outputs)
        self._batch_positions = [k for k, one in enumerate(self._inputs) if one.source is None]
        outputs = [spec for spec in signature.outputs if spec.updates is None]
        self._results = outputs
        self._result_places, self._gradient_places = (
            [k for k, spec in enumerate(outputs) if spec.role is role]
            for role in (Role.RESULT, Role.GRADIENT)
        )
        self._arena = Arena() if arena is None else arena
        self.check_state()
        # A program in the same arena may be running in another thread.
        with self._arena.lock, _room_for(plan, self.device):
            self.arena_view()
            self._step_run = StepRun(self._main, plan, self._written)
            self._graph_run = self._runs_on_gpu()

    def _runs_on_gpu(self) -> _OnGpu | None:
        return _OnGpu(self) if self.device.type == "cuda" else None

    def arena_view(self) -> Any:
        """Return the program's part of the arena, as `main` takes it."""
        return self._arena.view(max(self.plan.arena_bytes, 1), self.device, flat_view)

    def check_state(self) -> None:
        """Require state that a run can take as it is now.

        Raises:
            StateError: a tensor has another shape or dtype than the program, or is not dense; or
                a hyper-parameter is no longer a number.
        """
        self._state_views.current()

    def check_inputs(self, batch: Sequence[torch.Tensor]) -> None:
        """Check the indices in the batch and the state.

        Raises:
            IndexOutOfRangeError: one is out of range; nothing has changed.
        """
        if self.checks.on_host:
            tensors = iter(batch)
            self.checks.check_inputs(
                [next(tensors) if one.source is None else one.source for one in self._inputs]
            )

    def run(
        self,
        batch: Sequence[torch.Tensor],
        *,
        in_graph: bool = True,
        finish: Callable[[list[torch.Tensor]], T] = _as_it_is,  # type: ignore[assignment]
    ) -> T:
        """Run one step; return `finish` of the outputs that update no input, in order.

        On a GPU it is one graph once that is recorded; without `in_graph` it is launched call by
        call, for measurements. `finish` is part of the step: after an interruption it may be
        called again, so that it is always done.

        Raises:
            StepFailedError: the state is torn by an earlier failure, or a call failed.
            ArgumentError: the batch shares memory with state that the step writes.
            OutOfMemoryError: there is none for the batch or the results; nothing has changed.
            IndexOutOfRangeError: the step computed an index out of range; it has changed nothing.
                On a GPU it is raised by a later run, or by `synchronise`.
        """
        with self._arena.lock:
            torn_state.refuse_torn(self.state())
            if self._graph_run is not None:
                if self.exchange is not None:
                    return self._run_on_gpus(
                        self._graph_run, self.exchange, batch, in_graph, finish
                    )
                self._graph_run.found.check()
                return finish(self._graph_run.run(batch, in_graph=in_graph))
            try:
                results = self.empty_results()
                arguments = [self.arena_view(), *self._state_views.current()]
                self.refuse_shared(batch, self._state_views.version)
                for position, tensor in zip(self._batch_positions, batch, strict=True):
                    arguments[position + 1] = flat_view(_placed(tensor))
                arguments += self.result_views(results)
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, AmpIrError) or not is_out_of_memory(error):
                    raise
                raise out_of_memory("the batch and the results of a step need", error) from error
            if self.exchange is None:
                return self._step_run(arguments, lambda: self._finished(results, finish))
            return self._run_with_others(self.exchange, batch, arguments, results, finish)

    def _run_on_gpus(
        self,
        runs: _OnGpu,
        exchange: Exchange,
        batch: Sequence[torch.Tensor],
        in_graph: bool,  # noqa: FBT001 (as `run` has it)
        finish: Callable[[list[torch.Tensor]], T],
    ) -> T:
        """Launch one step of several ranks.

        What a step found out of range, all ranks know, and raise at the second call after it.
        """
        with exchange.running(self._compared_inputs.reader(batch)):
            try:
                runs.found.check_all_but_last()
            except AmpIrError as error:
                refused = error
            else:
                return finish(runs.run(batch, in_graph=in_graph))
        raise refused

    def refuse_shared(self, batch: Sequence[torch.Tensor], version: object) -> None:
        """Require a batch with memory of its own; `version` changes where state has moved.

        Raises:
            ArgumentError: it shares memory with state that the step writes.
        """
        self._written_memory.refuse_shared(batch, version)

    def _run_with_others(
        self,
        exchange: Exchange,
        batch: Sequence[torch.Tensor],
        arguments: Sequence[Any],
        results: list[torch.Tensor],
        finish: Callable[[list[torch.Tensor]], T],
    ) -> T:
        """Run one step of several ranks."""
        refused: list[Exception] = []

        def finished() -> T | None:
            try:
                self._check(results)
            except AmpIrError as error:
                refused.append(error)
                return None
            return finish(results)

        try:
            with exchange.running(self._compared_inputs.reader(batch)):
                value = self._step_run(arguments, finished)
        except BaseException:
            # The process group may still write to the buckets.
            self._arena.forget()
            raise
        if refused:
            # Every rank knows of it, and has rolled back: the exchange itself has not failed.
            raise refused[0]
        return value  # type: ignore[return-value]

    def _finished(
        self, results: list[torch.Tensor], finish: Callable[[list[torch.Tensor]], T]
    ) -> T:
        self._check(results)
        return finish(results)

    def _check(self, results: list[torch.Tensor]) -> None:
        if self.checks.in_step:
            self.checks.check_extremes(results[-1])

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors that the step works on, by name, without hyper-parameters."""
        for one in self._inputs:
            if isinstance(one.source, torch.Tensor):
                yield one.spec.name, one.source

    def _written(self) -> dict[int, torch.Tensor]:
        """Return the state that the step updates, by the position of the input."""
        updated = {spec.updates for spec in self.signature.outputs if spec.updates is not None}
        sources = {k: self._inputs[k].source for k in sorted(updated)}
        return {k: one for k, one in sources.items() if isinstance(one, torch.Tensor)}

    @property
    def is_graph(self) -> bool:
        """Return whether the next run with the same memory is the launch of a graph."""
        return self._graph_run is not None and self._graph_run.is_recorded

    def empty_results(self) -> list[torch.Tensor]:
        """Return new tensors for the outputs that update no input, in order."""
        return [
            from_memory(
                empty_in_huge_pages(
                    extents_in_memory(one.shape, one.order), getattr(torch, one.dtype), self.device
                ),
                one.order,
            )
            for one in self._results
        ]

    def result_views(self, results: Sequence[torch.Tensor]) -> Iterator[Any]:
        """Return the views of tensors that `empty_results` made."""
        pairs = zip(results, self._results, strict=True)
        return (flat_view(in_memory(one, spec.order)) for one, spec in pairs)

    def synchronise(self) -> None:
        """Wait until the runs so far are done.

        Raises:
            IndexOutOfRangeError: one of them computed an index out of range.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._graph_run is None:
            return
        if self.exchange is None:
            self._graph_run.found.check(all_steps=True)
        else:
            # All ranks raise it at one call, also those that do not wait here.
            self._graph_run.found.look_at_all()

    def results_of(
        self, outputs: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Split the outputs of `run` into results and gradients."""
        results = [outputs[place] for place in self._result_places]
        gradients = [outputs[place] for place in self._gradient_places]
        return results, gradients


class _OnGpu:
    """Runs of a program on a GPU: its own batch and results, and the graph that works on them."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._run = GraphRun(
            program._main,
            program.device,
            program._step_run,
            is_recordable=not unrecordable_ops(program.plan),
            exchanges=program.exchange is not None,
        )
        specs = [one.spec for one in program._inputs if one.source is None]
        self._batch = [
            torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=program.device)
            for spec in specs
        ]
        self._results = program.empty_results()
        self._batch_views = [flat_view(one) for one in self._batch]
        self._result_views = list(program.result_views(self._results))
        self.found = FoundIndices(program.checks)

    @property
    def is_recorded(self) -> bool:
        return self._run.is_recorded

    def run(self, batch: Sequence[torch.Tensor], *, in_graph: bool) -> list[torch.Tensor]:
        """Run one step; copies from pinned host memory are asynchronous."""
        program, own = self._program, iter(self._batch_views)
        state = program._state_views
        inputs = [next(own) if view is None else view for view in state.current()]
        program.refuse_shared(batch, state.version)
        for target, source in zip(self._batch, batch, strict=True):
            target.copy_(source, non_blocking=True)
        arguments = [program.arena_view(), *inputs, *self._result_views]
        if in_graph:
            places = (one.address for one in program._inputs if one.source is not None)
            self._run(arguments, (program._arena.address, *places))
        else:
            self._run.launch(arguments)
        if program.checks.in_step:
            self.found.add(self._results[-1])
        return [result.clone() for result in self._results]


def _with_index(device: torch.device) -> torch.device:
    """Return the device with an index, as tensors name theirs."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def _room_for(plan: MemoryPlan, device: torch.device) -> Iterator[None]:
    """Explain what a device without room for the arena, the batch and the results would need."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # Of a GPU's allocator; a host's raises a RuntimeError.
        if not isinstance(error, torch.OutOfMemoryError):
            raise out_of_memory(
                "the step, beside its state, needs", error, plan.arena_bytes
            ) from error
        free, _ = torch.cuda.mem_get_info(device)
        needed = plan.peak_bytes - plan.state_bytes
        raise DeviceError(
            f"the step needs {needed / 2**20:.0f} MiB of {device} beside its state, and "
            f"{free / 2**20:.0f} MiB are free; pass memory_budget= to compute values again instead "
            "of holding them, or make the batch smaller. Model and optimizer are unchanged"
        ) from error
