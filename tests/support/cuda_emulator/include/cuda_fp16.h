// SPDX-License-Identifier: Apache-2.0
// CUDA's float16 for g++, of what generated sources use. Every operation rounds to float16.
#pragma once

#include "cuda_emulator.h"

struct __half {
  _Float16 value;
  __half() = default;
  __half(float x) : value(static_cast<_Float16>(x)) {}
  __half(double x) : value(static_cast<_Float16>(x)) {}
  __half(int x) : value(static_cast<_Float16>(x)) {}
  __half(unsigned x) : value(static_cast<_Float16>(x)) {}
  __half(long x) : value(static_cast<_Float16>(x)) {}
  __half(long long x) : value(static_cast<_Float16>(x)) {}
  operator float() const { return static_cast<float>(value); }
};
using half = __half;
struct alignas(4) __half2 {
  __half x, y;
};
using half2 = __half2;

#define EMULATED_HALF(op)                                                                 \
  inline half operator op(half a, half b) {                                               \
    half result;                                                                          \
    result.value = static_cast<_Float16>(static_cast<float>(a) op static_cast<float>(b)); \
    return result;                                                                        \
  }
EMULATED_HALF(+)
EMULATED_HALF(-)
EMULATED_HALF(*)
EMULATED_HALF(/)
#undef EMULATED_HALF

inline float __half2float(half x) { return x; }
inline half __float2half(float x) { return half(x); }
inline half __float2half_rn(float x) { return half(x); }
inline bool __hgt(half a, half b) { return float(a) > float(b); }
inline bool __hlt(half a, half b) { return float(a) < float(b); }
inline bool __hisnan(half x) { return std::isnan(float(x)); }
inline half __hmax(half a, half b) { return half(fmaxf(a, b)); }
inline half __hmin(half a, half b) { return half(fminf(a, b)); }
inline unsigned short __half_as_ushort(half x) { return emulated_bits<unsigned short>(x); }
inline half __ushort_as_half(unsigned short x) {
  half result;
  std::memcpy(&result, &x, sizeof(x));
  return result;
}
