// SPDX-License-Identifier: Apache-2.0
// Rows of a depthwise convolution: kDepthwiseLanes channels of each position, in float32.
#ifndef AMP_IR_KERNELS_DEPTHWISE_ROWS_H_
#define AMP_IR_KERNELS_DEPTHWISE_ROWS_H_

#include <cstdint>
#include <vector>

#include "tensors/strided_tensor.h"

namespace amp_ir {

// Channels that are computed side by side: a cache line of float32, two registers of AVX2.
constexpr int64_t kDepthwiseLanes = 16;

// Part of a row of an image in memory: some channels of `count` positions.
struct ImageRow {
  void* data;  // of the first channel of the first position
  DLDataType dtype;
  int64_t position_stride;  // elements; channels are side by side
  int64_t channels, count;
};

// Places of a padded row that one output reads: `taps` of them, `dilation` apart, and `stride`
// places later for the next output.
struct Window {
  int64_t taps, dilation, stride;
};

// places[i * spread][lane] = row[i][lane]; other places, and lanes without a channel, stay. The
// next lanes of channels are `block_floats` further.
void LoadRow(const ImageRow& row, float* places, int64_t spread, int64_t block_floats);

// row[i][lane] = places[i][lane], likewise.
void StoreRow(const float* places, int64_t block_floats, const ImageRow& row);

// out[i][lane] = sum over rows k and taps t of rows[k][i * stride + t * dilation][lane] *
// weight[k][t][lane], in this order. A row that is null counts as zeros.
void MultiplyRow(const std::vector<const float*>& rows, const Window& window, const float* weight,
                 float* out, int64_t count);

// sums[k][t][lane] += the sum over i of rows[k][i * stride + t * dilation][lane] * grad[i][lane]. A
// row that is null adds nothing.
void AddProducts(const std::vector<const float*>& rows, const Window& window, const float* grad,
                 int64_t count, float* sums);

// sums[lane] = the sum over `number` parts, `part_floats` apart, of parts[part][lane], in order.
void AddParts(const float* parts, int64_t number, int64_t part_floats, float* sums);

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_DEPTHWISE_ROWS_H_
