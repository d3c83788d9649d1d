// SPDX-License-Identifier: Apache-2.0
#include "onednn/depthwise_rows.h"

#include <algorithm>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "onednn/vectors.h"
#include "tensors/stored_float.h"

namespace amp_ir {
namespace {

constexpr int64_t kLanes = kDepthwiseLanes;

// The lanes of a place in registers of the target.
template <int kBits>
struct Registers {
  static constexpr int kCount = kLanes * 32 / kBits;
  typedef float Type __attribute__((vector_size(kBits / 8), aligned(4), may_alias));

  [[gnu::always_inline]] static Type& At(float* lanes, int i) {
    return *reinterpret_cast<Type*>(lanes + i * (kBits / 32));
  }
  [[gnu::always_inline]] static const Type& At(const float* lanes, int i) {
    return *reinterpret_cast<const Type*>(lanes + i * (kBits / 32));
  }
};

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

// With what they are multiplied by, the sums of kOutputs outputs fill the registers: 16 of AVX2,
// and half of the 32 of AVX-512.
template <int kBits>
struct Multiply {
  using Lanes = Registers<kBits>;
  static constexpr int kOutputs = kBits == 512 ? 14 : 6;

  const std::vector<const float*>& rows;
  const Window& window;
  const float* weight;
  float* out;
  int64_t count;

  [[gnu::always_inline]] void operator()() const {
    int64_t i = 0;
    for (; i + kOutputs <= count; i += kOutputs) Outputs<kOutputs>(i);
    if (kOutputs > 8) {
      for (; i + 8 <= count; i += 8) Outputs<8>(i);
    }
    if (kOutputs > 4) {
      for (; i + 4 <= count; i += 4) Outputs<4>(i);
    }
    for (; i + 2 <= count; i += 2) Outputs<2>(i);
    for (; i < count; ++i) Outputs<1>(i);
  }

 private:
  template <int kCount>
  [[gnu::always_inline]] void Outputs(int64_t first) const {
    typename Lanes::Type sums[kCount][Lanes::kCount] = {};
    const int64_t step = window.stride * kLanes, apart = window.dilation * kLanes;
    const float* tap = weight;
    for (const float* row : rows) {
      if (row == nullptr) {
        tap += window.taps * kLanes;
        continue;
      }
      const float* place = row + first * step;
      for (int64_t t = 0; t < window.taps; ++t, place += apart, tap += kLanes) {
#pragma GCC unroll 16
        for (int k = 0; k < kCount; ++k) {
#pragma GCC unroll 16
          for (int i = 0; i < Lanes::kCount; ++i) {
            sums[k][i] += Lanes::At(place + k * step, i) * Lanes::At(tap, i);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int k = 0; k < kCount; ++k) {
#pragma GCC unroll 16
      for (int i = 0; i < Lanes::kCount; ++i) {
        Lanes::At(out + (first + k) * kLanes, i) = sums[k][i];
      }
    }
  }
};

template <int kBits>
struct AddPart {
  using Lanes = Registers<kBits>;

  const float* parts;
  int64_t number, part_floats;
  float* sums;

  [[gnu::always_inline]] void operator()() const {
    typename Lanes::Type total[Lanes::kCount] = {};
    for (int64_t part = 0; part < number; ++part) {
#pragma GCC unroll 16
      for (int j = 0; j < Lanes::kCount; ++j) total[j] += Lanes::At(parts + part * part_floats, j);
    }
#pragma GCC unroll 16
    for (int j = 0; j < Lanes::kCount; ++j) Lanes::At(sums, j) = total[j];
  }
};

// Sums of kTaps taps of several rows are in registers at a time: where there are few taps, a chain
// of sums of each would wait for the one before, and calls would take longer than the products.
template <int kBits>
struct Products {
  using Lanes = Registers<kBits>;
  static constexpr int kTaps = 7, kSums = kBits == 512 ? 14 : 7;

  const std::vector<const float*>& rows;
  const Window& window;
  const float* grad;
  int64_t count;
  float* sums;

  [[gnu::always_inline]] void operator()() const {
    int64_t done = 0;
    for (; done + kTaps <= window.taps; done += kTaps) Rows<kTaps>(done);
    switch (window.taps - done) {
      case 1:
        return Rows<1>(done);
      case 2:
        return Rows<2>(done);
      case 3:
        return Rows<3>(done);
      case 4:
        return Rows<4>(done);
      case 5:
        return Rows<5>(done);
      case 6:
        return Rows<6>(done);
    }
  }

 private:
  template <int kCount>
  [[gnu::always_inline]] void Rows(int64_t first) const {
    constexpr int kTogether = kSums / kCount < 3 ? kSums / kCount : 3;
    const int64_t number = static_cast<int64_t>(rows.size());
    for (int64_t k = 0; k < number;) {
      int64_t together = 0;
      while (together < kTogether && k + together < number && rows[k + together] != nullptr) {
        ++together;
      }
      if constexpr (kTogether >= 3) {
        if (together == 3) Taps<3, kCount>(k, first);
      }
      if constexpr (kTogether >= 2) {
        if (together == 2) Taps<2, kCount>(k, first);
      }
      if (together == 1) Taps<1, kCount>(k, first);
      k += together > 0 ? together : 1;
    }
  }

  template <int kRows, int kCount>
  [[gnu::always_inline]] void Taps(int64_t row, int64_t first) const {
    if (window.dilation == 1) return Taps<kRows, kCount>(row, first, kLanes);  // a constant
    Taps<kRows, kCount>(row, first, window.dilation * kLanes);
  }

  template <int kRows, int kCount>
  [[gnu::always_inline]] void Taps(int64_t row, int64_t first, const int64_t apart) const {
    typename Lanes::Type local[kRows][kCount][Lanes::kCount] = {};
    const int64_t step = window.stride * kLanes;
    const float* places[kRows];
    for (int r = 0; r < kRows; ++r) places[r] = rows[row + r] + first * apart;
    for (int64_t i = 0; i < count; ++i) {
      typename Lanes::Type g[Lanes::kCount];
#pragma GCC unroll 16
      for (int j = 0; j < Lanes::kCount; ++j) g[j] = Lanes::At(grad + i * kLanes, j);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < kCount; ++t) {
#pragma GCC unroll 16
          for (int j = 0; j < Lanes::kCount; ++j) {
            local[r][t][j] += Lanes::At(places[r] + i * step + t * apart, j) * g[j];
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* to = sums + ((row + r) * window.taps + first) * kLanes;
#pragma GCC unroll 16
      for (int t = 0; t < kCount; ++t) {
#pragma GCC unroll 16
        for (int j = 0; j < Lanes::kCount; ++j) Lanes::At(to + t * kLanes, j) += local[r][t][j];
      }
    }
  }
};

#if defined(__x86_64__)
// Load and Store of float16 by the instructions for it, which no CPU with AVX2 is without.
struct LoadFloat16 {
  const ImageRow& row;
  float* places;
  int64_t spread, block_floats;
  __attribute__((target("avx,f16c"))) void operator()() const {
    const auto* from = static_cast<const uint16_t*>(row.data);
    const int64_t whole = row.channels / kLanes * kLanes;
    for (int64_t i = 0; i < row.count; ++i, from += row.position_stride) {
      float* to = places + i * spread * kLanes;
      for (int64_t c = 0; c < whole; c += kLanes, to += block_floats) {
        for (int64_t j = 0; j < kLanes; j += 8) {
          const auto* halves = reinterpret_cast<const __m128i*>(from + c + j);
          _mm256_storeu_ps(to + j, _mm256_cvtph_ps(_mm_loadu_si128(halves)));
        }
      }
      for (int64_t c = whole; c < row.channels; ++c) to[c - whole] = WidenFloat16(from[c]);
    }
  }
};

struct StoreFloat16 {
  const float* places;
  int64_t block_floats;
  const ImageRow& row;
  __attribute__((target("avx,f16c"))) void operator()() const {
    auto* to = static_cast<uint16_t*>(row.data);
    const int64_t whole = row.channels / kLanes * kLanes;
    for (int64_t i = 0; i < row.count; ++i, to += row.position_stride) {
      const float* from = places + i * kLanes;
      for (int64_t c = 0; c < whole; c += kLanes, from += block_floats) {
        for (int64_t j = 0; j < kLanes; j += 8) {
          const __m128i halves =
              _mm256_cvtps_ph(_mm256_loadu_ps(from + j), _MM_FROUND_TO_NEAREST_INT);
          _mm_storeu_si128(reinterpret_cast<__m128i*>(to + c + j), halves);
        }
      }
      for (int64_t c = whole; c < row.channels; ++c) to[c] = NarrowFloat16(from[c - whole]);
    }
  }
};

bool HasFloat16Vectors() {
  static const bool has =
      onednn::ChooseVectors() != onednn::Vectors::kBaseline && __builtin_cpu_supports("f16c");
  return has;
}
#endif

}  // namespace

void LoadRow(const ImageRow& row, float* places, int64_t spread, int64_t block_floats) {
#if defined(__x86_64__)
  if (IsFloat(row.dtype, 16) && HasFloat16Vectors()) {
    return LoadFloat16{row, places, spread, block_floats}();
  }
#endif
  WithDtype(row.dtype, [&](auto type) {
    const Load<decltype(type)> body{row, places, spread, block_floats};
    onednn::RunWithVectors(body, body);
  });
}

void StoreRow(const float* places, int64_t block_floats, const ImageRow& row) {
#if defined(__x86_64__)
  if (IsFloat(row.dtype, 16) && HasFloat16Vectors()) {
    return StoreFloat16{places, block_floats, row}();
  }
#endif
  WithDtype(row.dtype, [&](auto type) {
    const Store<decltype(type)> body{places, block_floats, row};
    onednn::RunWithVectors(body, body);
  });
}

void MultiplyRow(const std::vector<const float*>& rows, const Window& window, const float* weight,
                 float* out, int64_t count) {
  onednn::RunWithVectors(Multiply<256>{rows, window, weight, out, count},
                         Multiply<512>{rows, window, weight, out, count});
}

void AddProducts(const std::vector<const float*>& rows, const Window& window, const float* grad,
                 int64_t count, float* sums) {
  onednn::RunWithVectors(Products<256>{rows, window, grad, count, sums},
                         Products<512>{rows, window, grad, count, sums});
}

void AddParts(const float* parts, int64_t number, int64_t part_floats, float* sums) {
  const AddPart<256> narrow{parts, number, part_floats, sums};
  onednn::RunWithVectors(narrow, AddPart<512>{parts, number, part_floats, sums});
}

}  // namespace amp_ir
