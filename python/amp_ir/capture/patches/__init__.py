# SPDX-License-Identifier: Apache-2.0
"""What a capture changes in PyTorch, for one thread and for its time only."""
