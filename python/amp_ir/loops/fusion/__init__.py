# SPDX-License-Identifier: Apache-2.0
"""Which values share a kernel, and which kernels share a launch."""
