// SPDX-License-Identifier: Apache-2.0
// What a convolution reads at each position of its result, as the rows of a matrix.
#ifndef AMP_IR_KERNELS_PATCHES_H_
#define AMP_IR_KERNELS_PATCHES_H_

#include "tensors/strided_tensor.h"

namespace amp_ir {

// The matrix [samples * positions, channels * taps] of an image [n, c, spatial...] of one or two
// spatial dims: with it a convolution without groups is a matmul with the weight [o, c, window...]
// as it is stored, so its columns are in the order of the weight's channels and taps: channels
// outside of the taps, or inside where the weight has its channels last. Places in the padding are
// zeros, which are multiplied: with infinity they give NaN.
class Patches {
 public:
  // `image` and `y` are the tensors x and y of the convolution, `window` is its weight.
  Patches(const StridedTensor& image, const StridedTensor& window, const StridedTensor& y,
          const Convolution& convolution);
  // Whether each patch is one position of the image, and each position one patch, in order.
  bool is_copy() const { return vertical_.is_copy() && horizontal_.is_copy(); }
  // Whether patches overlap.
  bool repeats() const { return vertical_.repeats() || horizontal_.repeats(); }
  // Whether the image has positions between those of the patches.
  bool has_strides() const { return vertical_.stride > 1 || horizontal_.stride > 1; }
  // Copies an image of a dtype of 16 bits. Cost: one read of the image a tap, one write of the
  // matrix.
  void Gather(const uint16_t* image, uint16_t* matrix) const;
  // Adds up in float32 what the matrix has for each element of the image, and rounds it once where
  // the image is in bfloat16; an element that no patch has is 0.
  void Scatter(const float* matrix, void* image) const;

 private:
  struct Axis {
    int64_t in, out, taps, stride, padding, dilation;
    int64_t step;  // of the image; elements
    bool is_copy() const { return taps == 1 && padding == 0 && in == out; }
    bool repeats() const { return taps > 1 && (dilation > 1 || taps > stride); }
    // The place of the image that is read for `out`, or -1.
    int64_t source(int64_t position, int64_t tap) const;
    // The position of the result that reads `place` there, or -1.
    int64_t reader(int64_t place, int64_t tap) const;
  };
  int64_t taps() const { return vertical_.taps * horizontal_.taps; }
  int64_t positions() const { return vertical_.out * horizontal_.out; }
  void ScatterTo(const float* matrix, int64_t sample, int64_t row, int64_t column,
                 void* image) const;

  Axis vertical_{1, 1, 1, 1, 0, 1, 0}, horizontal_;
  DLDataType dtype_;
  int64_t samples_, sample_stride_, channels_, channel_stride_;
  int64_t channel_column_, tap_column_;  // columns from a channel, a tap to the next
};

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_PATCHES_H_
