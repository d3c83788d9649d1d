# SPDX-License-Identifier: Apache-2.0
"""Running compiled steps on the user's tensors, and timing them."""
