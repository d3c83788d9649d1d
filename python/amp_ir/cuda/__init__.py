# SPDX-License-Identifier: Apache-2.0
"""CUDA's toolchain: source to machine code, TVM's CUDA runtime, and what machine code tells.

Nothing here needs a GPU or a driver, and nothing is loaded before a CUDA step is asked for.
"""
