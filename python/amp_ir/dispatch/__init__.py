# SPDX-License-Identifier: Apache-2.0
"""Turn ops that a library computes into calls of it, and decompose the others."""
