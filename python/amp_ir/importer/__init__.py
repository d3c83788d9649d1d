# SPDX-License-Identifier: Apache-2.0
"""Import: convert a captured FX graph of ATen ops to a StepModule in Relax."""
