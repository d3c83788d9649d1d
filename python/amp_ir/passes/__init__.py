# SPDX-License-Identifier: Apache-2.0
"""Rewrites of a step's IR, one a file, in the order of pipeline.py."""
