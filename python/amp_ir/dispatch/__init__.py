# SPDX-License-Identifier: Apache-2.0
"""Ops that a library computes become calls of it; others are decomposed."""
