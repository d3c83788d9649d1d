// SPDX-License-Identifier: Apache-2.0
#include "onednn/pointwise.h"

#include <algorithm>
#include <utility>

#include "onednn/vectors.h"

namespace amp_ir::onednn {
namespace {

StridedTensor Transposed(StridedTensor matrix) {
  std::swap(matrix.dims[0], matrix.dims[1]);
  std::swap(matrix.strides[0], matrix.strides[1]);
  return matrix;
}

// An image with channels last as a matrix, a row a position; false where rows are not all as far
// from the next.
bool AsMatrix(const StridedTensor& image, StridedTensor* matrix) {
  if (!HasChannelsLast(image)) return false;
  int64_t rows = 1, stride = image.dims[1];
  for (int i = image.rank; i-- > 0;) {
    if (i == 1 || image.dims[i] == 1) continue;
    if (rows == 1) stride = image.strides[i];
    if (image.strides[i] != rows * stride) return false;
    rows *= image.dims[i];
  }
  *matrix = {image.data, image.dtype, 2, {rows, image.dims[1]}, {stride, 1}};
  return true;
}

// Whether oneDNN's matmul is slower than its convolution for the weight of a single position: tiles
// of few columns take 1.1 to 1.4 times as long.
bool IsSlowMatmul(const StridedTensor& w) {
  constexpr int64_t kFewChannels = 16;
  return std::min(w.dims[0], w.dims[1]) <= kFewChannels;
}

}  // namespace

bool ConvolvePointwise(ConvKind kind, const StridedTensor& x, const StridedTensor& w,
                       const StridedTensor& y, const Convolution& convolution) {
  if (ChooseVectors() != Vectors::kAvx2 || convolution.groups != 1) return false;
  for (int i = 2; i < w.rank; ++i) {
    const bool is_plain = convolution.strides[i - 2] == 1 && convolution.padding[i - 2] == 0;
    if (w.dims[i] != 1 || !is_plain) return false;
  }
  StridedTensor x_rows, y_rows;
  if (!AsMatrix(x, &x_rows) || !AsMatrix(y, &y_rows)) return false;
  StridedTensor weight{w.data, w.dtype, 2, {w.dims[0], w.dims[1]}, {w.strides[0], w.strides[1]}};
  if (kind == ConvKind::kForward) {
    Matmul(x_rows, Transposed(weight), nullptr, y_rows, Epilogue::kNone);
  } else if (kind == ConvKind::kBackwardInput) {
    Matmul(y_rows, weight, nullptr, x_rows, Epilogue::kNone);
  } else if (!IsSlowMatmul(weight)) {
    Matmul(Transposed(y_rows), x_rows, nullptr, weight, Epilogue::kNone);
  } else {
    return false;
  }
  return true;
}

}  // namespace amp_ir::onednn
