# SPDX-License-Identifier: Apache-2.0
"""Other systems' names for what amp_ir does, so that a loop of theirs needs new names only.

    from amp_ir.compat import apex as amp      # NVIDIA apex
    from amp_ir.compat import mxnet as amp     # Apache MXNet
    from amp_ir.compat import r_torch          # R torch
    from amp_ir.compat import raf              # AWS RAF

Each function is a few lines over the public ones. What compiles the body of the loop is a call of
its own (`amp_handle.jit`, `amp.hybridize`): nothing changes eager PyTorch.
"""
