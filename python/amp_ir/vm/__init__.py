# SPDX-License-Identifier: Apache-2.0
"""Planned IR to an executable of TVM's virtual machine, or to a file that runs alone."""
