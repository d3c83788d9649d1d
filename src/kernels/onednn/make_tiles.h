// SPDX-License-Identifier: Apache-2.0
// Tiles of bfloat16 made of rows or columns of a matrix, in slices of some 50 instructions.
//
// Slices are run between the instructions that multiply tiles, whose next ones the CPU sees only
// where it has not to queue too many others before them.
#ifndef AMP_IR_KERNELS_MAKE_TILES_H_
#define AMP_IR_KERNELS_MAKE_TILES_H_

#include <cstdint>

#include "onednn/tiles.h"

namespace amp_ir::onednn {

// How a panel of 32 rows of a, or columns of b, becomes tiles: those of a have rows of terms, those
// of b rows of pairs of terms. Memory has one term after the other, or one row or column.
enum class Making { kCopy, kPair, kCopyTransposed, kPairTransposed };

inline Making MakingOfA(bool has_rows) {
  return has_rows ? Making::kCopy : Making::kPairTransposed;
}
inline Making MakingOfB(bool has_rows) {
  return has_rows ? Making::kPair : Making::kCopyTransposed;
}

// The slices of a panel's tiles, in the order in which they are made: both tiles of `steps` steps,
// each in some parts. Where one row's or column's terms lie in a row, those of four or eight are
// read to their end before the next, as the CPU foresees it.
class Slices {
 public:
  Slices(Making making, int64_t steps) : making_(making), steps_(steps) {}

  // How many there are.
  static int64_t Count(Making making, int64_t steps) { return Parts(making) * steps; }

  int64_t step() const { return step_; }
  int64_t part() const { return part_; }
  void Next() {
    if (part_ < PartsAlong(making_)) {
      if (++step_ == steps_) {
        step_ = 0;
        ++part_;
      }
    } else if (++part_ == Parts(making_)) {
      part_ = PartsAlong(making_);
      ++step_;
    }
  }

 private:
  static int64_t Parts(Making making) {
    if (making == Making::kCopyTransposed) return 16;
    return making == Making::kPairTransposed ? 12 : 4;
  }
  // Parts that are made for all steps before the next part is.
  static int64_t PartsAlong(Making making) {
    if (making == Making::kCopyTransposed) return 8;
    return making == Making::kCopy ? 4 : 0;
  }

  Making making_;
  int64_t steps_, step_ = 0, part_ = 0;
};

#if AMP_IR_HAS_TILES

// Lines of memory, `stride` elements from one to the next, of which `lines` and of each `elements`,
// at most 32, are there; what is beyond them counts as 0. The memory is asked for the line `ahead`
// elements from each.
struct Lines {
  const uint16_t* from;
  int64_t stride, lines, elements, ahead;

  AMP_IR_TILES_INLINE __m512i Load(int64_t line) const {
    const uint16_t* at = from + line * stride;
    const __mmask32 mask = elements >= 32 ? 0xffffffffU : (1U << elements) - 1;
    if (ahead > 0) Prefetch(at + ahead);
    return line < lines ? _mm512_maskz_loadu_epi16(mask, at) : _mm512_setzero_si512();
  }
};

// A pair of lines as pairs of elements: those of the first 16 and those of the last.
struct Pairs {
  __m512i low, high;

  AMP_IR_TILES_INLINE Pairs(const Lines& lines, int64_t pair) {
    alignas(64) static constexpr uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                      37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                      11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i first = lines.Load(2 * pair), second = lines.Load(2 * pair + 1);
    const __m512i of_low = _mm512_load_si512(kLow);
    low = _mm512_permutex2var_epi16(first, of_low, second);
    high =
        _mm512_permutex2var_epi16(first, _mm512_add_epi16(of_low, _mm512_set1_epi16(16)), second);
  }
};

constexpr int64_t kRow = kTileTerms;

// A tile of 16 by 16 pairs is transposed four rows at a time, and then four columns at a time: from
// rows 4 i to 4 i + 3, row c has the columns c, c + 4, c + 8 and c + 12.
AMP_IR_TILES_INLINE inline void TransposeRows(__m512i a, __m512i b, __m512i c, __m512i d,
                                              uint16_t* to) {
  const __m512i low = _mm512_unpacklo_epi32(a, b), high = _mm512_unpackhi_epi32(a, b);
  const __m512i low2 = _mm512_unpacklo_epi32(c, d), high2 = _mm512_unpackhi_epi32(c, d);
  _mm512_store_si512(to, _mm512_unpacklo_epi64(low, low2));
  _mm512_store_si512(to + kRow, _mm512_unpackhi_epi64(low, low2));
  _mm512_store_si512(to + 2 * kRow, _mm512_unpacklo_epi64(high, high2));
  _mm512_store_si512(to + 3 * kRow, _mm512_unpackhi_epi64(high, high2));
}

AMP_IR_TILES_INLINE inline void TransposeColumns(int64_t c, uint16_t* tile) {
  constexpr int kEven = 0x88, kOdd = 0xdd;
  const __m512i first = _mm512_load_si512(tile + c * kRow);
  const __m512i second = _mm512_load_si512(tile + (4 + c) * kRow);
  const __m512i third = _mm512_load_si512(tile + (8 + c) * kRow);
  const __m512i fourth = _mm512_load_si512(tile + (12 + c) * kRow);
  const __m512i top_even = _mm512_shuffle_i32x4(first, second, kEven);
  const __m512i top_odd = _mm512_shuffle_i32x4(first, second, kOdd);
  const __m512i low_even = _mm512_shuffle_i32x4(third, fourth, kEven);
  const __m512i low_odd = _mm512_shuffle_i32x4(third, fourth, kOdd);
  _mm512_store_si512(tile + c * kRow, _mm512_shuffle_i32x4(top_even, low_even, kEven));
  _mm512_store_si512(tile + (c + 4) * kRow, _mm512_shuffle_i32x4(top_odd, low_odd, kEven));
  _mm512_store_si512(tile + (c + 8) * kRow, _mm512_shuffle_i32x4(top_even, low_even, kOdd));
  _mm512_store_si512(tile + (c + 12) * kRow, _mm512_shuffle_i32x4(top_odd, low_odd, kOdd));
}

// Makes a part of both tiles of a step, of which those before are made.
AMP_IR_TILES_INLINE inline void MakePart(Making making, const Lines& lines, int64_t part,
                                         uint16_t* tiles) {
  switch (making) {
    case Making::kCopy:
      for (int64_t line = 8 * part; line < 8 * part + 8; ++line) {
        _mm512_store_si512(tiles + line * kRow, lines.Load(line));
      }
      break;
    case Making::kPair:
      for (int64_t pair = 4 * part; pair < 4 * part + 4; ++pair) {
        const Pairs pairs(lines, pair);
        _mm512_store_si512(tiles + pair * kRow, pairs.low);
        _mm512_store_si512(tiles + kTileElements + pair * kRow, pairs.high);
      }
      break;
    case Making::kCopyTransposed: {
      if (part < 8) {
        const int64_t line = 4 * part;
        TransposeRows(lines.Load(line), lines.Load(line + 1), lines.Load(line + 2),
                      lines.Load(line + 3), tiles + line * kRow);
      } else {
        TransposeColumns(part % 4, tiles + (part - 8) / 4 * kTileElements);
      }
      break;
    }
    case Making::kPairTransposed: {
      if (part < 4) {
        const int64_t pair = 4 * part;
        const Pairs a(lines, pair), b(lines, pair + 1), c(lines, pair + 2), d(lines, pair + 3);
        TransposeRows(a.low, b.low, c.low, d.low, tiles + pair * kRow);
        TransposeRows(a.high, b.high, c.high, d.high, tiles + kTileElements + pair * kRow);
      } else {
        TransposeColumns(part % 4, tiles + (part - 4) / 4 * kTileElements);
      }
      break;
    }
  }
}

#endif

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_MAKE_TILES_H_
