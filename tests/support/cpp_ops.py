# SPDX-License-Identifier: Apache-2.0
"""Builds and loads the custom ops of `cpp_ops.cc`, once a process; `cube` has an autograd then."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension


@functools.cache
def cube(folder: Path) -> Any:
    """Return the op in C++ that takes x to x cubed, built in `folder`."""
    library = folder / "libcpp_ops.so"
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu", "-lc10"]
    subprocess.run(
        ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", abi, *includes,
         str(Path(__file__).with_suffix(".cc")), "-o", str(library), *libraries],
        check=True,
    )  # fmt: skip
    torch.ops.load_library(library)
    ops = torch.ops.amp_ir_test_cpp

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ops.cube_backward(grad, *ctx.saved_tensors)

    torch.library.register_autograd("amp_ir_test_cpp::cube", backward, setup_context=setup_context)
    return ops.cube
