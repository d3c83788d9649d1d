# SPDX-License-Identifier: Apache-2.0
"""Loops over recurrent cells in a captured graph, which become recurrent layers."""
