# SPDX-License-Identifier: Apache-2.0
"""Loops of Python over time steps, which a captured graph has unrolled, become loops again."""
