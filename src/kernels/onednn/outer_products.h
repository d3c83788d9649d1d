// SPDX-License-Identifier: Apache-2.0
// Sums of outer products of the channels of two images, in float32: tiles of a weight's gradient.
#ifndef AMP_IR_KERNELS_OUTER_PRODUCTS_H_
#define AMP_IR_KERNELS_OUTER_PRODUCTS_H_

#include <cstdint>

namespace amp_ir {

// A tile's extents: with two registers of AVX2 a row, and what they are multiplied by, it fills 16.
constexpr int64_t kTileRows = 6, kTileLanes = 16;
constexpr int64_t kTileFloats = kTileRows * kTileLanes;

// Some channels at positions of an image, all side by side.
struct ChannelPanel {
  const float* data;                                 // of the first channel at the first position
  int64_t sample_stride, row_stride, column_stride;  // elements
};

// tile[i][j] += the sum over samples, rows and columns of left[i] * right[j], for the first `count`
// (1 to kTileRows) channels of left and kTileLanes of right; = it where there is nothing in the
// tile yet.
void AddOuterProducts(const ChannelPanel& left, const ChannelPanel& right, int64_t samples,
                      int64_t rows, int64_t columns, int64_t count, bool is_first, float* tile);

// to[i][k] = from[i * position_stride + k] for k < channels, and 0 for the others of `width`.
void PackChannels(const float* from, int64_t position_stride, int64_t channels, int64_t width,
                  int64_t count, float* to);

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_OUTER_PRODUCTS_H_
