# SPDX-License-Identifier: Apache-2.0
"""What every CUDA source begins with: functions that generated kernels call.

From sm_80 on each of them is one instruction.
"""

# Rounds a float32 to the bits of a bfloat16, to nearest even.
BFLOAT16_BITS = "amp_ir_bfloat16_bits"
# The larger and the smaller of two float32; NaN if either is NaN.
MAXIMUM, MINIMUM = "amp_ir_maximum", "amp_ir_minimum"

PRELUDE = f"""
static __device__ __forceinline__ unsigned short {BFLOAT16_BITS}(float x) {{
#if __CUDA_ARCH__ >= 800
  unsigned short rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
  return rounded;
#else
  unsigned int bits = __float_as_uint(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (bits + (((bits >> 16) & 1) + 0x7fff)) >> 16;
#endif
}}
static __device__ __forceinline__ float {MAXIMUM}(float x, float y) {{
#if __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
#else
  return x > y || x != x ? x : y;
#endif
}}
static __device__ __forceinline__ float {MINIMUM}(float x, float y) {{
#if __CUDA_ARCH__ >= 800
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(x), "f"(y));
  return smaller;
#else
  return x < y || x != x ? x : y;
#endif
}}
#line 1 "kernels.cu"
"""
