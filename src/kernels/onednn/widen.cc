// SPDX-License-Identifier: Apache-2.0
#include "onednn/widen.h"

#include <algorithm>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "tensors/low_float.h"

namespace amp_ir {
namespace {

enum class Conversion { kFloat16Up, kFloat16Down, kBfloat16Up, kBfloat16Down, kCopy16, kCopy32 };

#if defined(__x86_64__)
// The vector part of a dense run of float16; returns how many elements it did.
__attribute__((target("avx,f16c"))) int64_t WidenFloat16Vector(const uint16_t* from, float* to,
                                                               int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  return i;
}

__attribute__((target("avx,f16c"))) int64_t NarrowFloat16Vector(const float* from, uint16_t* to,
                                                                int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  return i;
}

bool HasFloat16Vector() {
  static const bool has = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return has;
}
#else
int64_t WidenFloat16Vector(const uint16_t*, float*, int64_t) { return 0; }
int64_t NarrowFloat16Vector(const float*, uint16_t*, int64_t) { return 0; }
bool HasFloat16Vector() { return false; }
#endif

template <class T>
T Same(T value) {
  return value;
}

template <class From, class To, To (*Convert)(From)>
void ConvertRow(const void* from_void, int64_t from_stride, void* to_void, int64_t to_stride,
                int64_t count, int64_t done) {
  const From* from = static_cast<const From*>(from_void);
  To* to = static_cast<To*>(to_void);
  if (from_stride == 1 && to_stride == 1) {  // apart, so that the compiler vectorises it
    for (int64_t i = done; i < count; ++i) to[i] = Convert(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i * to_stride] = Convert(from[i * from_stride]);
  }
}

void ConvertRow(Conversion kind, const void* from, int64_t from_stride, void* to, int64_t to_stride,
                int64_t count) {
  const bool vector = from_stride == 1 && to_stride == 1 && HasFloat16Vector();
  int64_t done = 0;
  switch (kind) {
    case Conversion::kFloat16Up:
      if (vector) {
        done =
            WidenFloat16Vector(static_cast<const uint16_t*>(from), static_cast<float*>(to), count);
      }
      return ConvertRow<uint16_t, float, WidenFloat16>(from, from_stride, to, to_stride, count,
                                                       done);
    case Conversion::kFloat16Down:
      if (vector) {
        done =
            NarrowFloat16Vector(static_cast<const float*>(from), static_cast<uint16_t*>(to), count);
      }
      return ConvertRow<float, uint16_t, NarrowFloat16>(from, from_stride, to, to_stride, count,
                                                        done);
    case Conversion::kBfloat16Up:
      return ConvertRow<uint16_t, float, WidenBfloat16>(from, from_stride, to, to_stride, count, 0);
    case Conversion::kBfloat16Down:
      return ConvertRow<float, uint16_t, NarrowBfloat16>(from, from_stride, to, to_stride, count,
                                                         0);
    case Conversion::kCopy16:
      return ConvertRow<uint16_t, uint16_t, Same>(from, from_stride, to, to_stride, count, 0);
    case Conversion::kCopy32:
      return ConvertRow<float, float, Same>(from, from_stride, to, to_stride, count, 0);
  }
}

Conversion KindOf(DLDataType from, DLDataType to) {
  if (SameDtype(from, to)) return from.bits == 16 ? Conversion::kCopy16 : Conversion::kCopy32;
  const bool up = IsFloat(to, 32);
  if (IsBfloat16(up ? from : to)) return up ? Conversion::kBfloat16Up : Conversion::kBfloat16Down;
  return up ? Conversion::kFloat16Up : Conversion::kFloat16Down;
}

// Elements a task: some microseconds, and divides one long row.
constexpr int64_t kBlock = 16384;

// One loop of the copy, outermost first.
struct Loop {
  int64_t extent, from_stride, to_stride;
};

// Dims sorted by stride, outermost first, and joined where both sides are dense across the border.
// Never empty.
std::vector<Loop> JoinedLoops(const StridedTensor& from, const StridedTensor& to) {
  std::vector<Loop> loops;
  for (int i = 0; i < from.rank; ++i) {
    if (from.dims[i] != 1) loops.push_back({from.dims[i], from.strides[i], to.strides[i]});
  }
  std::stable_sort(loops.begin(), loops.end(), [](const Loop& a, const Loop& b) {
    return a.to_stride != b.to_stride ? a.to_stride > b.to_stride : a.from_stride > b.from_stride;
  });
  std::vector<Loop> joined;
  for (const Loop& loop : loops) {
    if (!joined.empty() && joined.back().from_stride == loop.from_stride * loop.extent &&
        joined.back().to_stride == loop.to_stride * loop.extent) {
      joined.back() = {joined.back().extent * loop.extent, loop.from_stride, loop.to_stride};
    } else {
      joined.push_back(loop);
    }
  }
  if (joined.empty()) joined.push_back({1, 1, 1});
  return joined;
}

}  // namespace

void ConvertStrided(const StridedTensor& from, const StridedTensor& to) {
  if (from.numel() == 0) return;
  const Conversion kind = KindOf(from.dtype, to.dtype);
  std::vector<Loop> loops = JoinedLoops(from, to);
  const Loop row = loops.back();
  loops.pop_back();
  int64_t rows = 1;
  for (const Loop& loop : loops) rows *= loop.extent;
  const int64_t blocks = (row.extent + kBlock - 1) / kBlock;
  const char* from_data = static_cast<const char*>(from.data);
  char* to_data = static_cast<char*>(to.data);
#pragma omp parallel for schedule(static)
  for (int64_t task = 0; task < rows * blocks; ++task) {
    const int64_t begin = task % blocks * kBlock;
    int64_t from_element = begin * row.from_stride, to_element = begin * row.to_stride;
    int64_t index = task / blocks;
    for (size_t i = loops.size(); i-- > 0; index /= loops[i].extent) {
      from_element += index % loops[i].extent * loops[i].from_stride;
      to_element += index % loops[i].extent * loops[i].to_stride;
    }
    ConvertRow(kind, from_data + from_element * (from.dtype.bits / 8), row.from_stride,
               to_data + to_element * (to.dtype.bits / 8), row.to_stride,
               std::min(kBlock, row.extent - begin));
  }
}

void AddStrided(const StridedTensor& from, float factor, float total, const StridedTensor& to) {
  if (from.numel() == 0) return;
  std::vector<Loop> loops = JoinedLoops(from, to);
  const Loop row = loops.back();
  loops.pop_back();
  int64_t rows = 1;
  for (const Loop& loop : loops) rows *= loop.extent;
  const float* from_data = static_cast<const float*>(from.data);
  float* to_data = static_cast<float*>(to.data);
#pragma omp parallel for schedule(static) collapse(2)
  for (int64_t line = 0; line < rows; ++line) {
    for (int64_t begin = 0; begin < row.extent; begin += kBlock) {
      const float* x = from_data + begin * row.from_stride;
      float* y = to_data + begin * row.to_stride;
      int64_t index = line;
      for (size_t i = loops.size(); i-- > 0; index /= loops[i].extent) {
        x += index % loops[i].extent * loops[i].from_stride;
        y += index % loops[i].extent * loops[i].to_stride;
      }
      const int64_t count = std::min(kBlock, row.extent - begin);
      if (row.from_stride == 1 && row.to_stride == 1) {
        for (int64_t i = 0; i < count; ++i) y[i] = total * (y[i] + factor * x[i]);
      } else {
        for (int64_t i = 0; i < count; ++i) {
          float& sum = y[i * row.to_stride];
          sum = total * (sum + factor * x[i * row.from_stride]);
        }
      }
    }
  }
}

StridedTensor DenseLike(const StridedTensor& t, DLDataType dtype) {
  std::array<int, kMaxRank> order{};
  for (int i = 0; i < t.rank; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.begin() + t.rank,
                   [&](int a, int b) { return t.strides[a] > t.strides[b]; });
  StridedTensor dense = t;
  dense.dtype = dtype;
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    dense.strides[order[i]] = stride;
    stride *= t.dims[order[i]];
  }
  return WithoutIdleStrides(dense);
}

}  // namespace amp_ir
