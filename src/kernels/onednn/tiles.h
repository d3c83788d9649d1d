// SPDX-License-Identifier: Apache-2.0
// Panels of 32 rows by 32 columns as four AMX tiles, and the tiles of bfloat16 that they are sums
// of products of.
//
// One step of a panel's sum reads two tiles of 16 rows by 32 terms and two of 16 pairs of terms by
// 16 columns (Intel's Architecture Instruction Set Extensions reference, TDPBF16PS). A tile is 16
// rows of 64 bytes, one after the other.
#ifndef AMP_IR_KERNELS_TILES_H_
#define AMP_IR_KERNELS_TILES_H_

#include <cstdint>

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define AMP_IR_HAS_TILES 1
#include <immintrin.h>
#else
#define AMP_IR_HAS_TILES 0
#endif

namespace amp_ir::onednn {

constexpr int64_t kPanel = 32, kPanelFloats = kPanel * kPanel;
constexpr int64_t kTileRows = 16, kTileTerms = 32, kTileElements = kTileRows * kTileTerms;
constexpr int64_t kTileFloats = kTileRows * 16;
// Elements of both tiles of one operand in a step.
constexpr int64_t kStepElements = 2 * kTileElements;

#if AMP_IR_HAS_TILES

#define AMP_IR_TILES \
  __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")))
#define AMP_IR_TILES_INLINE AMP_IR_TILES __attribute__((always_inline))

// What a sum is multiplied by, and what is added to it.
struct Scale {
  float sum, before;
};

// While one exists, the thread's eight tiles have 16 rows of 64 bytes.
class TilesInUse {
 public:
  AMP_IR_TILES TilesInUse() {
    static const Layout layout;
    _tile_loadconfig(&layout);
  }
  AMP_IR_TILES ~TilesInUse() { _tile_release(); }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;

 private:
  struct alignas(64) Layout {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_nbytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
};

AMP_IR_TILES_INLINE inline void Prefetch(const void* line) {
  _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T1);
}
AMP_IR_TILES_INLINE inline void PrefetchToWrite(const void* line) { __builtin_prefetch(line, 1); }

// Adds `steps` products to a panel's four tiles of sums, or writes them there, and calls
// `between(step)` after each: what that does takes no time while the tile unit is the slower.
template <class Between>
AMP_IR_TILES_INLINE inline void MultiplyTiles(const uint16_t* left, const uint16_t* right,
                                              float* sums, int64_t steps, bool is_first,
                                              const Between& between) {
  constexpr int64_t kRowBytes = 64;
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kRowBytes);
    _tile_loadd(1, sums + kTileFloats, kRowBytes);
    _tile_loadd(2, sums + 2 * kTileFloats, kRowBytes);
    _tile_loadd(3, sums + 3 * kTileFloats, kRowBytes);
  }
  for (int64_t step = 0; step < steps; ++step, left += kStepElements, right += kStepElements) {
    _tile_loadd(4, left, kRowBytes);
    _tile_loadd(6, right, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + kTileElements, kRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, left + kTileElements, kRowBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    between(step);
  }
  _tile_stored(0, sums, kRowBytes);
  _tile_stored(1, sums + kTileFloats, kRowBytes);
  _tile_stored(2, sums + 2 * kTileFloats, kRowBytes);
  _tile_stored(3, sums + 3 * kTileFloats, kRowBytes);
}

// Writes `columns` of a panel's row, at most 32, with 32 numbers of a bias unless it is null,
// rounded to bfloat16.
AMP_IR_TILES_INLINE inline void WriteRow(const float* panel, int64_t row, const float* bias,
                                         uint16_t* out, int64_t columns) {
  const float* sums = panel + row / kTileRows * 2 * kTileFloats + row % kTileRows * 16;
  const __mmask32 mask = columns >= 32 ? 0xffffffffU : (1U << columns) - 1;
  __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + kTileFloats);
  if (bias != nullptr) {
    low = _mm512_add_ps(low, _mm512_loadu_ps(bias));
    high = _mm512_add_ps(high, _mm512_loadu_ps(bias + 16));
  }
  _mm512_mask_storeu_epi16(out, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// Writes `columns` of a panel's row, at most 32; where nothing is added, `out` is not read.
AMP_IR_TILES_INLINE inline void WriteRow(const float* panel, int64_t row, Scale scale,
                                         const float* bias, float* out, int64_t columns) {
  const float* sums = panel + row / kTileRows * 2 * kTileFloats + row % kTileRows * 16;
  const __m512 factor = _mm512_set1_ps(scale.sum), kept = _mm512_set1_ps(scale.before);
  for (int64_t i = 0; i < columns; i += 16, sums += kTileFloats) {
    const __mmask16 mask = columns - i >= 16 ? 0xffff : (1U << (columns - i)) - 1;
    __m512 value = _mm512_mul_ps(factor, _mm512_load_ps(sums));
    if (scale.before != 0) {
      value = _mm512_fmadd_ps(kept, _mm512_maskz_loadu_ps(mask, out + i), value);
    }
    if (bias != nullptr) value = _mm512_add_ps(value, _mm512_loadu_ps(bias + i));
    _mm512_mask_storeu_ps(out + i, mask, value);
  }
}

// to[i] = the sum of `count` numbers, the first at from[i], each `stride` floats after the other.
AMP_IR_TILES_INLINE inline void AddFloats(const float* from, int64_t count, int64_t stride,
                                          int64_t floats, float* to) {
  for (int64_t i = 0; i < floats; i += 16) {
    __m512 sum = _mm512_load_ps(from + i);
    for (int64_t k = 1; k < count; ++k) {
      sum = _mm512_add_ps(sum, _mm512_load_ps(from + k * stride + i));
    }
    _mm512_store_ps(to + i, sum);
  }
}

#endif

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_TILES_H_
