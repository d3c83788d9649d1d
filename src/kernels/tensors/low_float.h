// SPDX-License-Identifier: Apache-2.0
// Low floating-point numbers as float32 and back: round to nearest even, NaN stays NaN, made quiet.
//
// Without branches and without arithmetic that depends on one, so that a compiler makes vectors of
// a loop around them whatever the target.
#ifndef AMP_IR_KERNELS_LOW_FLOAT_H_
#define AMP_IR_KERNELS_LOW_FLOAT_H_

#include <cstdint>
#include <cstring>

namespace amp_ir {

inline float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float WidenFloat16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7FFF, mantissa = half & 0x3FF;
  // Zero or subnormal: mantissa * 2^-24, exact in float32.
  const uint32_t subnormal =
      ToBits(static_cast<float>(static_cast<int32_t>(mantissa)) * FromBits(0x33800000));
  const uint32_t normal = (magnitude << 13) + (112U << 23);
  // Infinity, or NaN made quiet as vcvtph2ps does.
  const uint32_t special = 0x7F800000 | (mantissa << 13) | (mantissa != 0 ? 0x400000 : 0);
  const uint32_t finite = magnitude < 0x400 ? subnormal : normal;
  return FromBits(sign | (magnitude >= 0x7C00 ? special : finite));
}

inline uint16_t NarrowFloat16(float value) {
  const uint32_t bits = ToBits(value);
  const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
  // NaN: keep the high payload bits, quiet.
  const uint32_t nan = 0x7E00 | ((magnitude >> 13) & 0x1FF);
  // Below 2^-14: adding 0.5 leaves mantissa * 2^-24, rounded to even.
  const uint32_t subnormal = ToBits(FromBits(magnitude) + 0.5F) - 0x3F000000;
  // Rebias the exponent by -112, round to even.
  const uint32_t normal = (magnitude + 0xC8000FFF + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
  const uint32_t rounded = magnitude >= 0x477FF000 ? 0x7C00 : finite;  // >= 65520
  return static_cast<uint16_t>(sign | (magnitude > 0x7F800000 ? nan : rounded));
}

inline float WidenBfloat16(uint16_t low) { return FromBits(static_cast<uint32_t>(low) << 16); }

inline uint16_t NarrowBfloat16(float value) {
  const uint32_t bits = ToBits(value);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded);
}

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_LOW_FLOAT_H_
