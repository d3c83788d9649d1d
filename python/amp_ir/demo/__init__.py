# SPDX-License-Identifier: Apache-2.0
"""The demonstrations: six workloads in plain PyTorch, and their comparison with PyTorch.

Nothing else of the package imports this one; it uses the package as a reader would.
"""
