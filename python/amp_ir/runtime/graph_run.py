# SPDX-License-Identifier: Apache-2.0
"""A step on a GPU as one CUDA graph: recorded at the second run, then launched as a whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm_ffi

from amp_ir.distributed.process_group import forget_before_destroy
from amp_ir.runtime.step_run import StepRun


def _nothing() -> None:
    pass


class GraphRun:
    """`main` on a GPU: from the second call with the same memory on, as a CUDA graph.

    The first call runs it launch by launch, on PyTorch's current stream: libraries choose their
    algorithms and modules are loaded, which a recording must not contain. When an argument has
    another address than in the recording, the next two calls do the same again. A step that is not
    recordable always runs launch by launch: an op in it reads what a recording would freeze. One
    that `exchanges` has NCCL's collectives in its graph.
    """

    def __init__(
        self,
        main: Callable[..., Any],
        device: torch.device,
        step_run: StepRun,
        *,
        is_recordable: bool = True,
        exchanges: bool = False,
    ) -> None:
        self._main = main
        self._step_run = step_run
        self._device = device
        self._addresses: tuple[int, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._refused = not is_recordable
        self._exchanges = exchanges

    def __call__(self, arguments: Sequence[Any], addresses: tuple[int, ...]) -> None:
        """Run on `arguments`, stored at `addresses`; return before the GPU is done."""
        with torch.cuda.device(self._device):
            if addresses != self._addresses:
                self._addresses, self._graph = addresses, None
                self.launch(arguments)
                return
            if self._graph is None and not self._refused:
                self._record(arguments)
            if self._graph is None:
                self.launch(arguments)
            else:
                self._replay(self._graph)

    @property
    def is_recorded(self) -> bool:
        """Return whether the next run with the same memory is a single launch."""
        return self._graph is not None

    def forget(self) -> None:
        """Let the recorded graph go; the next two runs make another one."""
        self._addresses, self._graph = (), None

    def launch(self, arguments: Sequence[Any]) -> None:
        """Run launch by launch; the recorded graph stays."""
        with torch.cuda.device(self._device), tvm_ffi.use_torch_stream():
            self._step_run(arguments, _nothing)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Launch the graph; a launch that fails does not say which call failed."""
        try:
            graph.replay()
        except RuntimeError as error:
            self._step_run.fail_as_a_whole(error)

    def _record(self, arguments: Sequence[Any]) -> None:
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        # Of this device: PyTorch's default for recordings is one stream of the first that recorded.
        # NCCL's watchdog asks for events from its own thread, which must not end the recording.
        mode = "thread_local" if self._exchanges else "global"
        recorded = torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode=mode)
        try:
            with tvm_ffi.use_torch_stream(recorded):
                self._main(*arguments)
        except RuntimeError as error:
            # A library that cannot be recorded costs launches, never the step. PyTorch leaves its
            # own stream as the current one when the end of a recording fails.
            self._refused = True
            torch.cuda.set_stream(before)
            warnings.warn(
                "the step runs launch by launch: its CUDA graph could not be recorded "
                f"({str(error).splitlines()[0]})",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._graph = graph
        if self._exchanges:
            forget_before_destroy(self)
