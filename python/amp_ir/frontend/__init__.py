# SPDX-License-Identifier: Apache-2.0
"""From a PyTorch step to IR: capture (`trace`) and import (`importer`, `converters`)."""
