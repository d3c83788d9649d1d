// SPDX-License-Identifier: Apache-2.0
// The gradient of a convolution's weight from images with channels last, without oneDNN.
#ifndef AMP_IR_KERNELS_WEIGHT_GRADIENT_H_
#define AMP_IR_KERNELS_WEIGHT_GRADIENT_H_

#include <array>

#include "onednn/ops.h"
#include "onednn/outer_products.h"

namespace amp_ir::onednn {

// Whether `WeightGradient` computes it: a window of several positions over one or two spatial dims,
// no groups, not too few channels, and both images with their channels last.
bool IsSumOfOuterProducts(const StridedTensor& x, const StridedTensor& w, const StridedTensor& y,
                          const Convolution& convolution);

// w from x and y, all in float32, for tensors for which `IsSumOfOuterProducts` is true.
//
// Each position of the window is a sum over places of the outer product of y's channels with x's,
// and is computed in tiles whose sums stay in registers while they run over a block of places. The
// channels of a block that a tile needs are first copied side by side, so that they stay in the
// cache of the first level. Places that a window reads from padding are left out.
//
// Tasks, and the order in which their sums are added, depend on the shapes alone: so results do not
// depend on the number of threads.
class WeightGradient {
 public:
  WeightGradient(const StridedTensor& x, const StridedTensor& w, const StridedTensor& y,
                 const Convolution& convolution, int threads);
  // Whether the rows of a window stay in a thread's cache: rows of thousands of places do not.
  bool fits_cache() const;
  int64_t workspace_nbytes() const;
  // `workspace` is aligned to 64 bytes.
  void Run(const float* x, float* w, const float* y, float* workspace) const;

 private:
  struct Image {
    int64_t channels, rows, columns;
    int64_t sample_stride, row_stride, column_stride;  // elements
  };
  // One spatial dim of the window.
  struct Axis {
    int64_t x, y, taps, stride, padding, dilation;
    // Of y's elements from `first` to `last`, the first one for which a tap is in x, and one past
    // the last.
    int64_t begin(int64_t tap, int64_t first) const;
    int64_t end(int64_t tap, int64_t last) const;
    int64_t at(int64_t place, int64_t tap) const {
      return place * stride + tap * dilation - padding;
    }
  };
  // Whole samples, or some of y's rows of one.
  struct Block {
    int64_t sample, samples, begin, end;
  };
  // Channels that a tile has side by side: `count` from `first` on.
  struct Channels {
    int64_t first, count;
  };
  struct Rows {
    int64_t first, count;
  };
  struct Buffers {
    float *left, *right, *tiles;
  };

  static Image ImageOf(const StridedTensor& t);
  void Divide();
  int64_t Groups() const;
  Block BlockOf(int64_t block) const;
  Channels LeftPanel(int64_t panel) const;
  Channels RightPanel(int64_t panel) const;
  int64_t taps() const { return vertical_.taps * horizontal_.taps; }
  int64_t part_floats() const { return left_panels_ * right_panels_ * taps() * kTileFloats; }
  int64_t tiles_at(int64_t right, int64_t left) const {
    return (right * left_panels_ + left) * taps() * kTileFloats;
  }
  int64_t places(const Image& image, int64_t rows) const;
  int64_t left_floats() const;
  int64_t right_floats() const;
  int64_t shared_floats() const { return blocks_ == 1 ? 0 : parts_ * part_floats(); }
  int64_t own_floats() const {
    return left_floats() + right_floats() + (blocks_ == 1 ? tiles_at(1, 0) : 0);
  }

  void Accumulate(const Block& block, const float* right, int64_t panel, const Buffers& buffers,
                  bool is_first, float* tiles) const;
  void Sum(int64_t part, int64_t first, int64_t last, const float* left, const float* right,
           const Buffers& buffers, float* sums, float* w) const;
  Rows RowsOf(const Image& image, const Block& block) const;
  ChannelPanel Packed(const Image& image, const Block& block, int64_t width,
                      const float* packed) const;
  void Pack(const Image& image, const Block& block, const float* data, Channels channels,
            int64_t width, float* to) const;
  void PackLeft(const Block& block, const float* data, float* to) const;
  void AddTap(const Block& block, int64_t tap, ChannelPanel left, ChannelPanel right, int64_t count,
              bool is_first, float* tile) const;
  void Store(float* tiles, int64_t right, int64_t left, float* w) const;

  Image left_, right_;  // those of the tiles' rows and of their lanes
  bool x_is_right_;
  Axis vertical_, horizontal_;
  std::array<int64_t, 4> weight_strides_;
  int64_t samples_, left_panels_, right_panels_;
  int64_t samples_a_block_, rows_a_block_, blocks_, parts_, groups_;
  int threads_;
};

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_WEIGHT_GRADIENT_H_
