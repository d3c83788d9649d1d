# SPDX-License-Identifier: Apache-2.0
"""A step run again on copies of its state, by the interpreter and by its kernels."""
