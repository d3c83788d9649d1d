// SPDX-License-Identifier: Apache-2.0
// CUDA's bfloat16 for g++, of what generated sources use: conversions, rounding to nearest even.
#pragma once

#include "cuda_emulator.h"

struct __nv_bfloat16 {
  unsigned short bits;
};
using nv_bfloat16 = __nv_bfloat16;

inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  unsigned bits = __float_as_uint(x);
  if (std::isnan(x)) return {0x7fff};
  return {static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }
