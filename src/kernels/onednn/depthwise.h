// SPDX-License-Identifier: Apache-2.0
// Depthwise convolutions of images with channels last, and their gradients, without oneDNN.
#ifndef AMP_IR_KERNELS_DEPTHWISE_H_
#define AMP_IR_KERNELS_DEPTHWISE_H_

#include <array>

#include "onednn/depthwise_rows.h"
#include "onednn/ops.h"

namespace amp_ir::onednn {

// Whether `Depthwise` computes it: a window for each channel, over one or two spatial dims, and
// both images with their channels last.
bool IsDepthwise(const StridedTensor& x, const StridedTensor& w, const StridedTensor& y,
                 const Convolution& convolution);

// One of x, w and y from the other two, for tensors for which `IsDepthwise` is true; w has the dims
// [channels, 1, kernel...]. Operands and result have any of the dtypes, each its own: sums are in
// float32, and are rounded once.
//
// A task takes some rows of a sample, and as many channels as its cache has room for. Rows of its
// source are copied in their order to a buffer that holds those of one window, in blocks of
// kDepthwiseLanes channels, widened to float32 and padded, so that each row of the result is
// computed without a condition. Tasks, and the order in which their sums are added,
// depend on the shapes alone: so results do not depend on the number of threads.
//
// Where padding is multiplied, it is a zero: with infinity it gives NaN, as in PyTorch's own.
class Depthwise {
 public:
  Depthwise(ConvKind kind, const StridedTensor& x, const StridedTensor& w, const StridedTensor& y,
            const Convolution& convolution, int threads);
  // Whether the rows of a window stay in a thread's cache: rows of thousands of positions do not.
  bool fits_cache() const;
  int64_t workspace_nbytes() const;
  // `workspace` is aligned to 64 bytes.
  void Run(void* x, void* w, void* y, float* workspace) const;

 private:
  // One spatial dim of the rows that are swept. Places are those of the padded source.
  struct Axis {
    int64_t source, out, taps, stride, dilation;
    int64_t spread;   // places from one element of the source to the next
    int64_t padding;  // place of its first element; negative where the first ones are not read
    int64_t places() const { return (out - 1) * stride + span(); }
    int64_t span() const { return (taps - 1) * dilation + 1; }
    // Of the source's elements, the first in a place, and one past the last.
    int64_t begin() const { return padding >= 0 ? 0 : (-padding + spread - 1) / spread; }
    int64_t end() const;
    // The element in a place, or -1.
    int64_t at(int64_t place) const;
  };
  // An image as [samples, rows, columns, channels], without its memory.
  struct Image {
    DLDataType dtype;
    int64_t sample_stride, row_stride, column_stride;  // elements
    char* at(void* data, int64_t sample, int64_t row, int64_t column, int64_t channel) const;
  };
  struct Task {
    int64_t sample, begin, end;  // rows of the result, or of y where that is a weight
    int64_t first_block, blocks, channels;
    int64_t first_channel() const { return first_block * kDepthwiseLanes; }
  };
  class PaddedRows;

  static Image ImageOf(const StridedTensor& t);
  static Axis AxisOf(ConvKind kind, int64_t x, int64_t taps, int64_t y, int64_t stride,
                     int64_t padding, int64_t dilation);
  void Divide();
  Task TaskOf(int64_t unit, int64_t group) const;
  int64_t taps() const { return vertical_.taps * horizontal_.taps; }
  // Of one block of channels: a row of the result, and the padded rows of its source.
  int64_t row_floats() const { return horizontal_.out * kDepthwiseLanes; }
  int64_t padded_floats() const;
  int64_t shared_floats() const;
  int64_t block_nbytes() const;
  int64_t own_floats() const { return group_ * (padded_floats() + row_floats()); }
  int64_t weight_at(int64_t channel, int64_t tap) const;  // elements

  void PackWeight(const void* w, int64_t block, float* packed) const;
  void Convolve(const Task& task, void* source, void* out, const float* packed, PaddedRows& rows,
                float* row) const;
  void Accumulate(const Task& task, void* x, void* y, float* sums, PaddedRows& rows,
                  float* row) const;
  void StoreWeight(const float* sums, int64_t block, void* w) const;

  ConvKind kind_;
  Axis vertical_, horizontal_;
  Image source_, out_;
  DLDataType weight_dtype_;
  std::array<int64_t, 3> weight_strides_;  // of channels, rows and columns; elements
  int64_t samples_, channels_, blocks_;
  int64_t group_, groups_;  // blocks of channels of a task, and how many such groups there are
  // Rows of a sample are divided into `chunks_`; samples and chunks make `units_`. The sums of
  // `parts_` of them are separate until the end.
  int64_t chunks_, units_, parts_;
  int threads_;
};

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_DEPTHWISE_H_
