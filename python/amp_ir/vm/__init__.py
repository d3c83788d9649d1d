# SPDX-License-Identifier: Apache-2.0
"""Planned IR becomes an executable of TVM's virtual machine, or a file that runs alone."""
