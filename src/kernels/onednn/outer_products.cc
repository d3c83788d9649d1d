// SPDX-License-Identifier: Apache-2.0
#include "onednn/outer_products.h"

#include <cstring>

#include "onednn/vectors.h"

namespace amp_ir {
namespace {

// Half of the lanes, in whatever registers the target has.
typedef float Half
    __attribute__((vector_size(kTileLanes / 2 * sizeof(float)), aligned(4), may_alias));

[[gnu::always_inline]] inline Half& HalfAt(float* lanes, int half) {
  return *reinterpret_cast<Half*>(lanes + half * kTileLanes / 2);
}
[[gnu::always_inline]] inline const Half& HalfAt(const float* lanes, int half) {
  return *reinterpret_cast<const Half*>(lanes + half * kTileLanes / 2);
}

struct Products {
  const ChannelPanel& left;
  const ChannelPanel& right;
  int64_t samples, rows, columns, count;
  bool is_first;
  float* tile;

  [[gnu::always_inline]] void operator()() const {
    switch (count) {
      case 1:
        return Rows<1>();
      case 2:
        return Rows<2>();
      case 3:
        return Rows<3>();
      case 4:
        return Rows<4>();
      case 5:
        return Rows<5>();
      case 6:
        return Rows<6>();
    }
  }

 private:
  template <int kCount>
  [[gnu::always_inline]] void Rows() const {
    Half low[kCount] = {}, high[kCount] = {};
    for (int64_t sample = 0; sample < samples; ++sample) {
      for (int64_t row = 0; row < rows; ++row) {
        const float* a = left.data + sample * left.sample_stride + row * left.row_stride;
        const float* b = right.data + sample * right.sample_stride + row * right.row_stride;
        for (int64_t i = 0; i < columns; ++i) {
          const Half b_low = HalfAt(b, 0), b_high = HalfAt(b, 1);
#pragma GCC unroll 8
          for (int k = 0; k < kCount; ++k) {
            low[k] += b_low * a[k];
            high[k] += b_high * a[k];
          }
          a += left.column_stride;
          b += right.column_stride;
        }
      }
    }
    // Sums of a block are added as a whole: the rounding errors of one chain over all places of
    // many images grow with their number.
#pragma GCC unroll 8
    for (int k = 0; k < kCount; ++k) {
      Half &to_low = HalfAt(tile + k * kTileLanes, 0), &to_high = HalfAt(tile + k * kTileLanes, 1);
      to_low = is_first ? low[k] : to_low + low[k];
      to_high = is_first ? high[k] : to_high + high[k];
    }
  }
};

struct Pack {
  const float* from;
  int64_t position_stride, channels, width, count;
  float* to;

  [[gnu::always_inline]] void operator()() const {
    if (channels == width) {
      switch (width) {
        case 1:
          return Whole<1>();
        case 2:
          return Whole<2>();
        case 3:
          return Whole<3>();
        case 4:
          return Whole<4>();
        case 5:
          return Whole<5>();
        case 6:
          return Whole<6>();
        case kTileLanes:
          return Whole<kTileLanes>();
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t k = 0; k < width; ++k) {
        to[i * width + k] = k < channels ? from[i * position_stride + k] : 0;
      }
    }
  }

 private:
  template <int64_t kWidth>
  [[gnu::always_inline]] void Whole() const {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(to + i * kWidth, from + i * position_stride, kWidth * sizeof(float));
    }
  }
};

}  // namespace

void AddOuterProducts(const ChannelPanel& left, const ChannelPanel& right, int64_t samples,
                      int64_t rows, int64_t columns, int64_t count, bool is_first, float* tile) {
  onednn::RunWithVectors(Products{left, right, samples, rows, columns, count, is_first, tile});
}

void PackChannels(const float* from, int64_t position_stride, int64_t channels, int64_t width,
                  int64_t count, float* to) {
  onednn::RunWithVectors(Pack{from, position_stride, channels, width, count, to});
}

}  // namespace amp_ir
