# SPDX-License-Identifier: Apache-2.0
"""CUDA's toolchain: source to machine code, TVM's CUDA runtime, and facts from machine code.

Nothing here needs a GPU or a driver, and nothing is loaded before a CUDA step is compiled.
"""
