# SPDX-License-Identifier: Apache-2.0
"""Proof that the padding of a batch changes neither the state nor the results of a step."""
