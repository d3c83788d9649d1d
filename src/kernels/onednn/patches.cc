// SPDX-License-Identifier: Apache-2.0
#include "onednn/patches.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "tensors/low_float.h"

namespace amp_ir {

Patches::Patches(const StridedTensor& image, const StridedTensor& window, const StridedTensor& y,
                 const Convolution& convolution)
    : dtype_(image.dtype),
      samples_(image.dims[0]),
      sample_stride_(image.strides[0]),
      channels_(image.dims[1]),
      channel_stride_(image.strides[1]) {
  const int spatial = image.rank - 2;
  Axis* const axes[] = {&vertical_, &horizontal_};
  for (int i = 0; i < spatial; ++i) {
    *axes[2 - spatial + i] = {image.dims[2 + i],      y.dims[2 + i],
                              window.dims[2 + i],     convolution.strides[i],
                              convolution.padding[i], convolution.dilation[i],
                              image.strides[2 + i]};
  }
  const bool has_channels_last = channels_ > 1 && window.strides[1] == 1;
  channel_column_ = has_channels_last ? 1 : taps();
  tap_column_ = has_channels_last ? channels_ : 1;
}

int64_t Patches::Axis::source(int64_t position, int64_t tap) const {
  const int64_t place = position * stride + tap * dilation - padding;
  return place < in ? std::max<int64_t>(place, -1) : -1;
}

int64_t Patches::Axis::reader(int64_t place, int64_t tap) const {
  const int64_t offset = place + padding - tap * dilation;
  return offset >= 0 && offset % stride == 0 && offset / stride < out ? offset / stride : -1;
}

void Patches::Gather(const uint16_t* image, uint16_t* matrix) const {
  const int64_t rows = samples_ * positions(), count = taps(), columns = channels_ * count;
#pragma omp parallel
  {
    static constexpr uint16_t kZero = 0;
    std::vector<const uint16_t*> from(count);
    std::vector<int64_t> steps(count);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t sample = row / positions(), position = row % positions();
      for (int64_t t = 0; t < count; ++t) {
        const int64_t down = vertical_.source(position / horizontal_.out, t / horizontal_.taps);
        const int64_t right = horizontal_.source(position % horizontal_.out, t % horizontal_.taps);
        const bool is_inside = down >= 0 && right >= 0;
        from[t] = is_inside ? image + sample * sample_stride_ + down * vertical_.step +
                                  right * horizontal_.step
                            : &kZero;
        steps[t] = is_inside ? channel_stride_ : 0;
      }
      uint16_t* to = matrix + row * columns;
      if (channel_column_ == 1) {
        for (int64_t t = 0; t < count; ++t, to += channels_) {
          if (steps[t] == 1) {
            std::copy_n(from[t], channels_, to);
          } else {
            for (int64_t c = 0; c < channels_; ++c) to[c] = from[t][c * steps[t]];
          }
        }
        continue;
      }
      for (int64_t c = 0; c < channels_; ++c) {
        for (int64_t t = 0; t < count; ++t) *to++ = from[t][c * steps[t]];
      }
    }
  }
}

void Patches::Scatter(const float* matrix, void* image) const {
  const int64_t places = vertical_.in * horizontal_.in;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < samples_ * places; ++i) {
    const int64_t place = i % places;
    ScatterTo(matrix, i / places, place / horizontal_.in, place % horizontal_.in, image);
  }
}

void Patches::ScatterTo(const float* matrix, int64_t sample, int64_t row, int64_t column,
                        void* image) const {
  constexpr int64_t kChunk = 64;  // channels whose sums stay in the cache of the first level
  const int64_t count = taps();
  const int64_t at = sample * sample_stride_ + row * vertical_.step + column * horizontal_.step;
  for (int64_t first = 0; first < channels_; first += kChunk) {
    const int64_t channels = std::min(kChunk, channels_ - first);
    float sums[kChunk] = {};
    for (int64_t t = 0; t < count; ++t) {
      const int64_t down = vertical_.reader(row, t / horizontal_.taps);
      const int64_t right = horizontal_.reader(column, t % horizontal_.taps);
      if (down < 0 || right < 0) continue;
      const int64_t reader = sample * positions() + down * horizontal_.out + right;
      const float* from =
          matrix + reader * channels_ * count + first * channel_column_ + t * tap_column_;
      for (int64_t c = 0; c < channels; ++c) sums[c] += from[c * channel_column_];
    }
    const int64_t begin = at + first * channel_stride_;
    if (IsFloat(dtype_, 32)) {
      float* to = static_cast<float*>(image) + begin;
      for (int64_t c = 0; c < channels; ++c) to[c * channel_stride_] = sums[c];
    } else {
      uint16_t* to = static_cast<uint16_t*>(image) + begin;
      for (int64_t c = 0; c < channels; ++c) to[c * channel_stride_] = NarrowBfloat16(sums[c]);
    }
  }
}

}  // namespace amp_ir
