# SPDX-License-Identifier: Apache-2.0
"""PyTorch functions that are captured as other ops: attention, recurrent layers, foreach."""
