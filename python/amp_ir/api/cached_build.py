# SPDX-License-Identifier: Apache-2.0
"""Builds that are kept on disk, in the user's compile cache."""

from __future__ import annotations

import logging
from typing import Any

import attrs

from amp_ir.compile_cache.cache import CompileCache, compile_cache
from amp_ir.compile_cache.entry import CacheEntry
from amp_ir.compile_cache.environment import UnknownEnvironmentError
from amp_ir.compile_cache.key import digest_of, key_of
from amp_ir.compile_cache.stored_kernels import StoredKernels
from amp_ir.errors import BuildError
from amp_ir.files.cache_directory import say_once
from amp_ir.ir.built_step import BuiltStep
from amp_ir.ir.executable import Executable
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.step_module import StepModule
from amp_ir.ir.target import CompileTarget
from amp_ir.vm.build import count_kernels
from amp_ir.vm.build_library import build_library, missing_linker
from amp_ir.vm.load import load_library


@attrs.frozen
class CachedBuild:
    """The place of one step, compiled with given options, in the compile cache."""

    cache: CompileCache
    key: str
    parts: dict[str, Any] = attrs.field(repr=False)

    def load(self, target: CompileTarget, device: str) -> tuple[BuiltStep, Executable] | None:
        """Return the step as it was built earlier; None where the cache does not have it."""
        entry = self.cache.get(self.key)
        if entry is None:
            return None
        built = entry.built
        try:
            return built, load_library(built.library, target, device, built.kernel_count)
        except OSError as error:  # of the folder for temporary files
            say_once("load", logging.INFO, f"no compiled step can be loaded: {error}")
        except RuntimeError as error:
            self.cache.files.drop(self.key, f"its machine code cannot be loaded: {error}")
        return None

    def build(
        self, planned: PlannedStep, target: CompileTarget, device: str, opt_level: int
    ) -> tuple[BuiltStep, Executable] | None:
        """Build the step so that it can be kept; None where it can only be built in memory.

        What runs now is what a later start loads.
        """
        why = missing_linker()
        try:
            if why:
                raise BuildError(why)
            library = build_library(planned, target, opt_level=opt_level, store=self._kernels())
            built = BuiltStep(library, planned.plan, count_kernels(planned), planned.dispatched)
            return built, load_library(library, target, device, built.kernel_count)
        except (BuildError, OSError, RuntimeError) as error:
            say_once(
                "linker", logging.INFO, f"compiled steps are not kept for a later start: {error}"
            )
            return None

    def _kernels(self) -> StoredKernels:
        return StoredKernels(self.cache.kernels, digest_of(self.parts["environment"]))

    def put(self, built: BuiltStep) -> None:
        """Keep the step for later starts."""
        self.cache.put(CacheEntry(self.parts, built))


def cached_build(
    mod: StepModule, options: dict[str, Any], target: CompileTarget
) -> CachedBuild | None:
    """Return the step's place in the compile cache; None where steps are not kept.

    Those for a GPU are not: their cubins are, which take most of the time.

    Raises:
        OptionError: as `compile_cache`.
    """
    cache = None if target.is_cuda else compile_cache()
    if cache is None:
        return None
    try:
        return CachedBuild(cache, *key_of(mod, options, target))
    except UnknownEnvironmentError as error:
        say_once(
            "environment",
            logging.INFO,
            f"compiled steps are not kept, since what they depend on cannot be told: {error}",
        )
        return None
