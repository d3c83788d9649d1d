# SPDX-License-Identifier: Apache-2.0
"""The version of amp_ir, which files name."""

VERSION = "0.1.0"
