# SPDX-License-Identifier: Apache-2.0
"""Code that the CPU emitter and the CUDA emitter share to write a kernel."""
