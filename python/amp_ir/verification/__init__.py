# SPDX-License-Identifier: Apache-2.0
"""Tools that check a step's numbers: against float64, PyTorch, and its own plan."""
