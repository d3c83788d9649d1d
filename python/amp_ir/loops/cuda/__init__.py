# SPDX-License-Identifier: Apache-2.0
"""The CUDA emitter: launches, and the elements that their threads compute."""
