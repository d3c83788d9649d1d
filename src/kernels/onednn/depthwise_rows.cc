// SPDX-License-Identifier: Apache-2.0
#include "onednn/depthwise_rows.h"

#include <algorithm>

#include "onednn/vectors.h"
#include "tensors/stored_float.h"

namespace amp_ir {
namespace {

constexpr int64_t kLanes = kDepthwiseLanes;
// Outputs and taps whose sums are in registers at a time: with two registers each, and what they
// are multiplied by, they fill the 16 of AVX2.
constexpr int kOutputs = 6, kTaps = 7;

// Half of the lanes, in whatever registers the target has.
typedef float Half __attribute__((vector_size(kLanes / 2 * sizeof(float)), aligned(4), may_alias));

[[gnu::always_inline]] inline Half& HalfAt(float* lanes, int half) {
  return *reinterpret_cast<Half*>(lanes + half * kLanes / 2);
}
[[gnu::always_inline]] inline const Half& HalfAt(const float* lanes, int half) {
  return *reinterpret_cast<const Half*>(lanes + half * kLanes / 2);
}

template <class Dtype>
struct Load {
  const ImageRow& row;
  float* places;
  int64_t spread, block_floats;

  [[gnu::always_inline]] void operator()() const {
    const auto* from = static_cast<const typename Dtype::Stored*>(row.data);
    const int64_t whole = row.channels / kLanes * kLanes;
    for (int64_t i = 0; i < row.count; ++i, from += row.position_stride) {
      float* to = places + i * spread * kLanes;
      for (int64_t c = 0; c < whole; c += kLanes, to += block_floats) {
#pragma omp simd
        for (int64_t j = 0; j < kLanes; ++j) to[j] = Dtype::Widen(from[c + j]);
      }
      for (int64_t c = whole; c < row.channels; ++c) to[c - whole] = Dtype::Widen(from[c]);
    }
  }
};

template <class Dtype>
struct Store {
  const float* places;
  int64_t block_floats;
  const ImageRow& row;

  [[gnu::always_inline]] void operator()() const {
    auto* to = static_cast<typename Dtype::Stored*>(row.data);
    const int64_t whole = row.channels / kLanes * kLanes;
    for (int64_t i = 0; i < row.count; ++i, to += row.position_stride) {
      const float* from = places + i * kLanes;
      for (int64_t c = 0; c < whole; c += kLanes, from += block_floats) {
#pragma omp simd
        for (int64_t j = 0; j < kLanes; ++j) to[c + j] = Dtype::Narrow(from[j]);
      }
      for (int64_t c = whole; c < row.channels; ++c) to[c] = Dtype::Narrow(from[c - whole]);
    }
  }
};

struct Multiply {
  const std::vector<const float*>& rows;
  const Window& window;
  const float* weight;
  float* out;
  int64_t count;

  [[gnu::always_inline]] void operator()() const {
    int64_t i = 0;
    for (; i + kOutputs <= count; i += kOutputs) Outputs<kOutputs>(i);
    for (; i + 2 <= count; i += 2) Outputs<2>(i);
    for (; i < count; ++i) Outputs<1>(i);
  }

 private:
  template <int kCount>
  [[gnu::always_inline]] void Outputs(int64_t first) const {
    Half low[kCount] = {}, high[kCount] = {};
    const int64_t step = window.stride * kLanes, apart = window.dilation * kLanes;
    const float* tap = weight;
    for (const float* row : rows) {
      if (row == nullptr) {
        tap += window.taps * kLanes;
        continue;
      }
      const float* place = row + first * step;
      for (int64_t t = 0; t < window.taps; ++t, place += apart, tap += kLanes) {
        const Half w_low = HalfAt(tap, 0), w_high = HalfAt(tap, 1);
#pragma GCC unroll 8
        for (int k = 0; k < kCount; ++k) {
          low[k] += HalfAt(place + k * step, 0) * w_low;
          high[k] += HalfAt(place + k * step, 1) * w_high;
        }
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < kCount; ++k) {
      HalfAt(out + (first + k) * kLanes, 0) = low[k];
      HalfAt(out + (first + k) * kLanes, 1) = high[k];
    }
  }
};

struct Products {
  const float* row;
  const Window& window;
  const float* grad;
  int64_t count;
  float* sums;

  [[gnu::always_inline]] void operator()() const {
    int64_t done = 0;
    for (; done + kTaps <= window.taps; done += kTaps) Taps<kTaps>(done);
    switch (window.taps - done) {
      case 1:
        return Taps<1>(done);
      case 2:
        return Taps<2>(done);
      case 3:
        return Taps<3>(done);
      case 4:
        return Taps<4>(done);
      case 5:
        return Taps<5>(done);
      case 6:
        return Taps<6>(done);
    }
  }

 private:
  template <int kCount>
  [[gnu::always_inline]] void Taps(int64_t first) const {
    if (window.dilation == 1) return Taps<kCount>(first, kLanes);  // apart by a constant
    Taps<kCount>(first, window.dilation * kLanes);
  }

  template <int kCount>
  [[gnu::always_inline]] void Taps(int64_t first, const int64_t apart) const {
    Half low[kCount] = {}, high[kCount] = {};
    const int64_t step = window.stride * kLanes;
    const float* place = row + first * apart;
    for (int64_t i = 0; i < count; ++i, place += step) {
      const Half g_low = HalfAt(grad + i * kLanes, 0), g_high = HalfAt(grad + i * kLanes, 1);
#pragma GCC unroll 8
      for (int t = 0; t < kCount; ++t) {
        low[t] += HalfAt(place + t * apart, 0) * g_low;
        high[t] += HalfAt(place + t * apart, 1) * g_high;
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kCount; ++t) {
      HalfAt(sums + (first + t) * kLanes, 0) += low[t];
      HalfAt(sums + (first + t) * kLanes, 1) += high[t];
    }
  }
};

}  // namespace

void LoadRow(const ImageRow& row, float* places, int64_t spread, int64_t block_floats) {
  WithDtype(row.dtype, [&](auto type) {
    onednn::RunWithVectors(Load<decltype(type)>{row, places, spread, block_floats});
  });
}

void StoreRow(const float* places, int64_t block_floats, const ImageRow& row) {
  WithDtype(row.dtype, [&](auto type) {
    onednn::RunWithVectors(Store<decltype(type)>{places, block_floats, row});
  });
}

void MultiplyRow(const std::vector<const float*>& rows, const Window& window, const float* weight,
                 float* out, int64_t count) {
  onednn::RunWithVectors(Multiply{rows, window, weight, out, count});
}

void AddProducts(const float* row, const Window& window, const float* grad, int64_t count,
                 float* sums) {
  onednn::RunWithVectors(Products{row, window, grad, count, sums});
}

}  // namespace amp_ir
