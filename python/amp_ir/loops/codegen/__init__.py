# SPDX-License-Identifier: Apache-2.0
"""What the CPU and the CUDA emitter share of writing a kernel."""
