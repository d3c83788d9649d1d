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

// Writes two tiles of 16 pairs of rows by 16 columns: of `rows` rows, at most 32, and `columns`,
// at most 32, what is beyond them 0. `kAhead`: how many columns further it asks the memory for.
template <int64_t kAhead>
AMP_IR_TILES_INLINE inline void PairRows(const uint16_t* from, int64_t stride, int64_t rows,
                                         int64_t columns, uint16_t* to) {
  alignas(64) static constexpr uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                    37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                    11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __mmask32 mask = columns >= 32 ? 0xffffffffU : (1U << columns) - 1;
  const __m512i zero = _mm512_setzero_si512();
  for (int64_t pair = 0; pair < 16; ++pair, from += 2 * stride, to += 32) {
    const bool has_first = 2 * pair < rows, has_second = 2 * pair + 1 < rows;
    const __m512i first = has_first ? _mm512_maskz_loadu_epi16(mask, from) : zero;
    const __m512i second = has_second ? _mm512_maskz_loadu_epi16(mask, from + stride) : zero;
    if (kAhead > 0) {
      Prefetch(from + kAhead);
      Prefetch(from + stride + kAhead);
    }
    _mm512_store_si512(to, _mm512_permutex2var_epi16(first, low, second));
    _mm512_store_si512(to + kTileElements, _mm512_permutex2var_epi16(first, high, second));
  }
}

// Writes two tiles of 16 rows by 32 terms: of `rows` rows, at most 32, and `terms`, at most 32,
// what is beyond them 0. `kAhead`: how many rows further it asks the memory for.
template <int64_t kAhead>
AMP_IR_TILES_INLINE inline void CopyRows(const uint16_t* from, int64_t stride, int64_t rows,
                                         int64_t terms, uint16_t* to) {
  const __mmask32 mask = terms >= 32 ? 0xffffffffU : (1U << terms) - 1;
  for (int64_t row = 0; row < 2 * kTileRows; ++row, from += stride, to += kTileTerms) {
    if (kAhead > 0) Prefetch(from + kAhead * stride);
    const bool is_there = row < rows;
    _mm512_store_si512(to,
                       is_there ? _mm512_maskz_loadu_epi16(mask, from) : _mm512_setzero_si512());
  }
}

// Transposes a tile of 16 by 16 pairs.
AMP_IR_TILES_INLINE inline void TransposePairs(const uint16_t* from, uint16_t* to) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(from + 32 * i);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  // Of rows 4 i to 4 i + 3, columns c, c + 4, c + 8 and c + 12.
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  constexpr int kEven = 0x88, kOdd = 0xdd;
  for (int c = 0; c < 4; ++c) {
    const __m512i top_even = _mm512_shuffle_i32x4(r[c], r[4 + c], kEven);
    const __m512i top_odd = _mm512_shuffle_i32x4(r[c], r[4 + c], kOdd);
    const __m512i low_even = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], kEven);
    const __m512i low_odd = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], kOdd);
    t[c] = _mm512_shuffle_i32x4(top_even, low_even, kEven);
    t[c + 4] = _mm512_shuffle_i32x4(top_odd, low_odd, kEven);
    t[c + 8] = _mm512_shuffle_i32x4(top_even, low_even, kOdd);
    t[c + 12] = _mm512_shuffle_i32x4(top_odd, low_odd, kOdd);
  }
  for (int i = 0; i < 16; ++i) _mm512_store_si512(to + 32 * i, t[i]);
}

// Transposes both tiles of a step.
AMP_IR_TILES_INLINE inline void TransposeStep(const uint16_t* from, uint16_t* to) {
  TransposePairs(from, to);
  TransposePairs(from + kTileElements, to + kTileElements);
}

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

// Writes `columns` of a panel's row, at most 32, rounded to bfloat16.
AMP_IR_TILES_INLINE inline void WriteRow(const float* panel, int64_t row, uint16_t* out,
                                         int64_t columns) {
  const float* sums = panel + row / kTileRows * 2 * kTileFloats + row % kTileRows * 16;
  const __mmask32 mask = columns >= 32 ? 0xffffffffU : (1U << columns) - 1;
  const __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + kTileFloats);
  _mm512_mask_storeu_epi16(out, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// Writes `columns` of a panel's row, at most 32; where nothing is added, `out` is not read.
AMP_IR_TILES_INLINE inline void WriteRow(const float* panel, int64_t row, Scale scale, float* out,
                                         int64_t columns) {
  const float* sums = panel + row / kTileRows * 2 * kTileFloats + row % kTileRows * 16;
  const __m512 factor = _mm512_set1_ps(scale.sum), kept = _mm512_set1_ps(scale.before);
  for (int64_t i = 0; i < columns; i += 16, sums += kTileFloats) {
    const __mmask16 mask = columns - i >= 16 ? 0xffff : (1U << (columns - i)) - 1;
    __m512 value = _mm512_mul_ps(factor, _mm512_load_ps(sums));
    if (scale.before != 0) {
      value = _mm512_fmadd_ps(kept, _mm512_maskz_loadu_ps(mask, out + i), value);
    }
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
