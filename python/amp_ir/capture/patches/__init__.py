# SPDX-License-Identifier: Apache-2.0
"""Changes to PyTorch for one thread during a capture."""
