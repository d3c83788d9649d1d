# SPDX-License-Identifier: Apache-2.0
"""Ops as loops: `ir` and `math`, then lowerings/, fusion/, codegen/, cpu/ and cuda/."""
