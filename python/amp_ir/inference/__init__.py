# SPDX-License-Identifier: Apache-2.0
"""Inference: `convert_model`, and files of what was converted or compiled."""
