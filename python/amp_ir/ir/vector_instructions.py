# SPDX-License-Identifier: Apache-2.0
"""Instructions for whole vectors that CPU kernels name: what emitters write for one element.

`vm/whole_vectors.py` gives them their vectors.
"""

from __future__ import annotations

# Elements that a CPU kernel computes side by side: one AVX-512 register of float32. Narrower
# machines split it.
LANES = 16
# LLVM's name for: the bits of the nearest bfloat16 (avx512bf16).
ROUND = "llvm.x86.avx512bf16.cvtneps2bf16.512"
# And for: a number times two to the power of another (avx512f). Kernels give a third argument: the
# result is 0 where that is true.
SCALE = "llvm.x86.avx512.mask.scalef.ps.512"
