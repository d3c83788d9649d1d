// SPDX-License-Identifier: Apache-2.0
// What the library calls share: a tensor seen through dims and strides of the caller's choice.
#ifndef AMP_IR_KERNELS_STRIDED_TENSOR_H_
#define AMP_IR_KERNELS_STRIDED_TENSOR_H_

#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

namespace amp_ir {

constexpr int kMaxRank = 6;

struct StridedTensor {
  void* data = nullptr;
  DLDataType dtype{};
  int rank = 0;
  std::array<int64_t, kMaxRank> dims{};     // elements
  std::array<int64_t, kMaxRank> strides{};  // elements; 0 repeats, negative is refused

  int64_t numel() const {
    int64_t product = 1;
    for (int i = 0; i < rank; ++i) {
      if (dims[i] == 0) return 0;
      product *= dims[i];
    }
    return product;
  }
};

// The dims and dtype of `t` with the strides of a dense tensor whose last axis is innermost.
inline StridedTensor RowMajor(StridedTensor t) {
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.strides[i] = stride;
    stride *= t.dims[i];
  }
  return t;
}

inline std::string ToString(tvm::ffi::ShapeView shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i != 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

inline std::string DimsToString(const StridedTensor& t) {
  return ToString(tvm::ffi::ShapeView(t.dims.data(), t.rank));
}

inline bool IsFloat(DLDataType dtype, int bits) {
  return dtype.code == kDLFloat && dtype.bits == bits && dtype.lanes == 1;
}
inline bool IsBfloat16(DLDataType dtype) {
  return dtype.code == kDLBfloat && dtype.bits == 16 && dtype.lanes == 1;
}
inline bool SameDtype(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

inline void CheckDtype(const char* function, const char* name, DLDataType dtype) {
  if (IsFloat(dtype, 32) || IsFloat(dtype, 16) || IsBfloat16(dtype)) return;
  TVM_FFI_THROW(TypeError) << function << ": " << name << " is "
                           << std::string(tvm::ffi::DLDataTypeToString(dtype))
                           << "; expected float32, bfloat16 or float16";
}

// Adds `count` times `stride` to `sum`; false where int64 does not hold what comes out.
inline bool AddSpan(int64_t count, int64_t stride, int64_t* sum) {
  int64_t span = 0;
  return !__builtin_mul_overflow(count, stride, &span) && !__builtin_add_overflow(*sum, span, sum);
}

// The same elements, described in one way. An axis of one element may be said to have any stride,
// and libraries take that for the length of a row: with 1 for [1, 8], oneDNN's gemm fails when it
// runs. Here it gets that of memory without a gap.
inline StridedTensor WithoutIdleStrides(StridedTensor t) {
  for (int i = t.rank - 1; i >= 0; --i) {
    if (t.dims[i] != 1) continue;
    int64_t inner = 0;
    const bool has_inner = i + 1 < t.rank && AddSpan(t.dims[i + 1], t.strides[i + 1], &inner);
    t.strides[i] = has_inner ? std::max<int64_t>(1, inner) : 1;
  }
  return t;
}

// Whether the channels of an image [n, channels, spatial...] are innermost.
inline bool HasChannelsLast(const StridedTensor& t) {
  for (int i = 2; i < t.rank; ++i) {
    if (t.dims[i] != 1 && t.strides[i] < t.dims[1]) return false;
  }
  return t.rank > 2 && t.dims[1] > 1 && t.strides[1] == 1;
}

// The image with its channels innermost and no gaps.
inline StridedTensor DenseChannelsLast(StridedTensor image) {
  image.strides[1] = 1;
  int64_t stride = image.dims[1];
  for (int i = image.rank; i-- > 0;) {
    if (i == 1) continue;
    image.strides[i] = stride;
    stride *= image.dims[i];
  }
  return image;
}

// An image with channels last, with the strides that its axes of one element have in dense memory
// of that order; another image as it is. Libraries recognize the order by all strides: a single
// sample with another one gets oneDNN's reference convolution, and copies from PyTorch. An image of
// a single position is in every order and stays: in the weights of a 1 x 1 convolution, PyTorch
// must not see channels last (`ConvolveBackward`).
inline StridedTensor WithIdleStridesOfImage(StridedTensor t) {
  bool is_one_position = true;
  for (int i = 2; i < t.rank; ++i) is_one_position = is_one_position && t.dims[i] == 1;
  if (is_one_position || !HasChannelsLast(t)) return t;
  int64_t dense = t.dims[1];
  for (int i = t.rank; i-- > 0;) {
    if (i == 1) continue;
    if (t.dims[i] == 1) t.strides[i] = dense;
    dense = t.dims[i] * t.strides[i];
  }
  return t;
}

// Sees `tensor`'s memory through `dims` and `strides`.
//
// Raises: TypeError for another dtype; ValueError for ranks that differ or exceed kMaxRank, and for
// a
//         view that leaves the tensor's memory: a wrong stride must not become a wild read.
// Ensures: strides are those of WithoutIdleStrides.
inline StridedTensor MakeStrided(const char* function, const char* name,
                                 const tvm::ffi::TensorView& tensor, tvm::ffi::ShapeView dims,
                                 tvm::ffi::ShapeView strides) {
  CheckDtype(function, name, tensor.dtype());
  if (dims.size() != strides.size() || dims.size() > kMaxRank) {
    TVM_FFI_THROW(ValueError) << function << ": " << name << " has " << dims.size() << " dims and "
                              << strides.size() << " strides; expected as many of each, at most "
                              << kMaxRank;
  }
  StridedTensor view;
  view.data = static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
  view.dtype = tensor.dtype();
  view.rank = static_cast<int>(dims.size());
  int64_t last = 0, count = 1;
  bool empty = false, fits = true;
  for (int i = 0; i < view.rank; ++i) {
    view.dims[i] = dims[i];
    view.strides[i] = strides[i];
    if (dims[i] < 0 || strides[i] < 0) {
      TVM_FFI_THROW(ValueError) << function << ": " << name
                                << " has a negative dim or stride: " << ToString(dims) << " by "
                                << ToString(strides);
    }
    empty = empty || dims[i] == 0;
    fits = fits && (empty || AddSpan(dims[i] - 1, strides[i], &last)) &&
           !__builtin_mul_overflow(count, dims[i], &count);
  }
  if (!empty && !fits) {
    TVM_FFI_THROW(ValueError) << function << ": " << name << " of " << ToString(dims)
                              << " by strides " << ToString(strides)
                              << " has more elements than a 64-bit number counts";
  }
  if (!empty && last >= tensor.numel()) {
    TVM_FFI_THROW(ValueError) << function << ": " << name << " of " << ToString(dims)
                              << " by strides " << ToString(strides) << " reaches element " << last
                              << " of a tensor that holds " << tensor.numel();
  }
  return WithoutIdleStrides(view);
}

// The same for an image [n, channels, spatial...]; its idle strides are those of its order.
inline StridedTensor MakeImage(const char* function, const char* name,
                               const tvm::ffi::TensorView& tensor, tvm::ffi::ShapeView dims,
                               tvm::ffi::ShapeView strides) {
  return WithIdleStridesOfImage(MakeStrided(function, name, tensor, dims, strides));
}

// The arguments of one convolution; spatial vectors have one entry a spatial dim.
struct Convolution {
  tvm::ffi::ShapeView strides, padding, dilation;
  int64_t groups;
};

// Raises: ValueError unless x [n, c, spatial...], w [o, c / groups, kernel...] and y [n, o, out...]
//         fit each other; x and y are those of the forward convolution, whichever is computed.
inline void CheckConvolution(const char* function, const StridedTensor& x, const StridedTensor& w,
                             const StridedTensor& y, const Convolution& c) {
  const int spatial = x.rank - 2;
  const size_t expected = static_cast<size_t>(spatial > 0 ? spatial : 0);
  if (spatial < 1 || spatial > 3 || w.rank != x.rank || y.rank != x.rank ||
      c.strides.size() != expected || c.padding.size() != expected ||
      c.dilation.size() != expected) {
    TVM_FFI_THROW(ValueError) << function << ": x " << DimsToString(x) << ", w " << DimsToString(w)
                              << ", y " << DimsToString(y) << ", strides " << ToString(c.strides)
                              << ", padding " << ToString(c.padding) << ", dilation "
                              << ToString(c.dilation)
                              << "; expected 1 to 3 spatial dims, the same in all of them";
  }
  bool fits = c.groups > 0 && x.dims[1] == w.dims[1] * c.groups && y.dims[1] == w.dims[0] &&
              w.dims[0] % (c.groups > 0 ? c.groups : 1) == 0 && x.dims[0] == y.dims[0];
  for (int i = 0; fits && i < spatial; ++i) {
    int64_t kernel = (w.dims[2 + i] - 1) * c.dilation[i] + 1;
    fits = c.strides[i] > 0 && c.dilation[i] > 0 && c.padding[i] >= 0 &&
           x.dims[2 + i] + 2 * c.padding[i] >= kernel &&
           (x.dims[2 + i] + 2 * c.padding[i] - kernel) / c.strides[i] + 1 == y.dims[2 + i];
  }
  if (!fits) {
    TVM_FFI_THROW(ValueError) << function << ": x " << DimsToString(x) << " and w "
                              << DimsToString(w) << " do not give y " << DimsToString(y)
                              << " with strides " << ToString(c.strides) << ", padding "
                              << ToString(c.padding) << ", dilation " << ToString(c.dilation)
                              << ", groups " << c.groups;
  }
}

enum class Epilogue { kNone, kRelu, kGelu, kGeluTanh };

inline Epilogue ParseEpilogue(const char* function, const std::string& name) {
  if (name == "none") return Epilogue::kNone;
  if (name == "relu") return Epilogue::kRelu;
  if (name == "gelu") return Epilogue::kGelu;
  if (name == "gelu_tanh") return Epilogue::kGeluTanh;
  TVM_FFI_THROW(ValueError) << function << ": epilogue \"" << name
                            << "\"; expected none, relu, gelu or gelu_tanh";
  TVM_FFI_UNREACHABLE();
}

// The extents of out [batch..., m, n] = a [batch..., m, k] @ b [batch..., k, n] + bias [n].
//
// Raises: ValueError unless they fit; batch dims broadcast, missing ones count as 1.
inline void CheckMatmul(const char* function, const StridedTensor& a, const StridedTensor& b,
                        const StridedTensor* bias, const StridedTensor& out) {
  auto dim = [](const StridedTensor& t, int from_end) {
    return t.rank >= from_end ? t.dims[t.rank - from_end] : 1;
  };
  bool fits = a.rank >= 2 && b.rank >= 2 && out.rank >= a.rank && out.rank >= b.rank &&
              dim(a, 2) == dim(out, 2) && dim(b, 1) == dim(out, 1) && dim(a, 1) == dim(b, 2);
  for (int i = 3; fits && i <= out.rank; ++i) {
    fits = (dim(a, i) == dim(out, i) || dim(a, i) == 1) &&
           (dim(b, i) == dim(out, i) || dim(b, i) == 1);
  }
  if (!fits) {
    TVM_FFI_THROW(ValueError) << function << ": a " << DimsToString(a) << " @ b " << DimsToString(b)
                              << " does not give out " << DimsToString(out)
                              << "; expected [batch..., m, k] @ [batch..., k, n] -> [batch..., m, "
                                 "n]";
  }
  if (bias != nullptr && (bias->rank != 1 || bias->dims[0] != dim(out, 1))) {
    TVM_FFI_THROW(ValueError) << function << ": bias " << DimsToString(*bias) << "; expected ["
                              << dim(out, 1) << "], the last extent of out";
  }
}

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_STRIDED_TENSOR_H_
