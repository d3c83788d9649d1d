# SPDX-License-Identifier: Apache-2.0
"""Import: a captured FX graph of ATen ops becomes a StepModule in Relax."""
