// SPDX-License-Identifier: Apache-2.0
#include "torch/ops.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

namespace amp_ir::torch {
namespace {

constexpr DLDataType kFloat32{kDLFloat, 32, 1};

bool CpuHasBfloat16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

std::atomic<bool> has_fast_bfloat16{CpuHasBfloat16()};

// Whether PyTorch multiplies this dtype at the speed of the hardware, with float32 accumulation.
// Its float16 kernels run at about 1 GFLOP/s on a CPU without float16 arithmetic (measured), and
// bfloat16 without avx512_bf16 is no better than float32; both are then computed in float32.
bool IsFast(const Place& place, DLDataType dtype) {
  if (place.api.is_cuda || IsFloat(dtype, 32)) return true;
  return IsBfloat16(dtype) && has_fast_bfloat16.load(std::memory_order_relaxed);
}

// Whether PyTorch computes with two operands as they are. On CUDA a float32 result of low operands
// is computed low and widened: cuDNN sums in float32 and PyTorch has no such output, so the result
// is rounded once, as under PyTorch's autocast; in float32 it would be 8 to 16 times as slow. On a
// CPU it is computed in float32.
bool IsNative(const Place& place, const StridedTensor& a, const StridedTensor& b,
              const StridedTensor& out) {
  if (!SameDtype(a.dtype, b.dtype) || !IsFast(place, a.dtype)) return false;
  return SameDtype(a.dtype, out.dtype) || (place.api.is_cuda && IsFloat(out.dtype, 32));
}

float Apply(Epilogue epilogue, float x) {
  constexpr float kSqrtHalf = 0.70710678118654752F;
  constexpr float kSqrtTwoOverPi = 0.79788456080286536F;
  switch (epilogue) {
    case Epilogue::kRelu:
      return x < 0 ? 0 : x;  // written so that NaN stays NaN
    case Epilogue::kGelu:
      return 0.5F * x * (1 + std::erf(x * kSqrtHalf));
    case Epilogue::kGeluTanh:
      return 0.5F * x * (1 + std::tanh(kSqrtTwoOverPi * (x + 0.044715F * x * x * x)));
    default:
      return x;
  }
}

// One bmm for each combination of the batch dims before the last three: PyTorch's has three dims.
void MultiplyBatches(const Place& place, const StridedTensor& a, const StridedTensor& b,
                     const StridedTensor& out) {
  if (out.rank > 3) {
    auto slice = [](const StridedTensor& t, int64_t index) {
      StridedTensor part = t;
      part.rank = t.rank - 1;
      part.data = static_cast<char*>(t.data) + index * t.strides[0] * (t.dtype.bits / 8);
      for (int i = 0; i < part.rank; ++i) {
        part.dims[i] = t.dims[i + 1];
        part.strides[i] = t.strides[i + 1];
      }
      return part;
    };
    for (int64_t i = 0; i < out.dims[0]; ++i) {
      MultiplyBatches(place, slice(a, i), slice(b, i), slice(out, i));
    }
    return;
  }
  Tensor left(place, a), right(place, b), result(place, out);
  auto multiply = out.rank == 3 ? place.api.bmm : place.api.mm;
  Check(place.api, multiply(result.get(), left.get(), right.get()), out.rank == 3 ? "bmm" : "mm");
}

// Repeats `t` over the batch dims of `out` by strides of 0.
StridedTensor Broadcast(const StridedTensor& t, const StridedTensor& out) {
  StridedTensor wide = t;
  wide.rank = out.rank;
  const int missing = out.rank - t.rank;
  for (int i = 0; i < out.rank; ++i) {
    const bool repeated = i < missing || (i < out.rank - 2 && t.dims[i - missing] != out.dims[i]);
    wide.dims[i] = i < out.rank - 2 ? out.dims[i] : t.dims[i - missing];
    wide.strides[i] = repeated ? 0 : t.strides[i - missing];
  }
  return wide;
}

// What PyTorch's matmul packs of its operands: at most this. It has no function that says so.
//
// MKL keeps float32's for the process, in each thread at most 2.3 MB of its own (the resident set
// of PyTorch 2.13 on one and two threads grew by 0.5 MB a thread for 512 x 512 x 512, 1.5 MB for
// 4096 x 1536 x 1536 and 2.3 MB for 8192 x 256 x 4096).
//
// PyTorch's oneDNN takes a buffer a thread for low operands while it runs, with AMX at most 1.13
// MiB of 384 x 1536 and other sizes, and beside it float32 sums where they have 2048 or more terms:
// of 512 to 768 columns for each of the thread's rows, or for all rows (PyTorch's profiler shows
// these allocations; 75 shapes with one and two threads).
size_t PackedNbytes(const StridedTensor& a, const StridedTensor& b, Form form) {
  constexpr int64_t kMostOfMkl = 2300000, kMostOfOneDnn = 1190000;
  constexpr int64_t kLongSum = 2048, kSummedColumns = 768;
#ifdef _OPENMP
  const int64_t threads = omp_get_max_threads();
#else
  const int64_t threads = 1;
#endif
  const int64_t rows = a.dims[a.rank - 2], terms = a.dims[a.rank - 1];
  const int64_t columns = b.dims[b.rank - 1];
  constexpr int64_t kBytes = sizeof(float);
  if (form == Form::kAsIs && !IsFloat(a.dtype, 32)) {
    const int64_t summed = terms < kLongSum ? 0 : rows * std::min(columns, kSummedColumns) * kBytes;
    const int64_t packed = (rows + columns) * terms * kBytes;
    return static_cast<size_t>(threads * (std::min(packed, kMostOfOneDnn) + summed));
  }
  return static_cast<size_t>(threads * std::min((rows + columns) * terms * kBytes, kMostOfMkl));
}

// Adds bias [n] to each row of dense float32 rows [..., n] and applies the epilogue, in place.
void FinishRows(const StridedTensor& rows, const StridedTensor* bias, Epilogue epilogue) {
  const int64_t columns = rows.dims[rows.rank - 1];
  const int64_t count = rows.numel();
  float* data = static_cast<float*>(rows.data);
  const float* shift = bias != nullptr ? static_cast<const float*>(bias->data) : nullptr;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i) {
    data[i] = Apply(epilogue, shift != nullptr ? data[i] + shift[i % columns] : data[i]);
  }
}

// Multiplies each number of a float32 matrix on a CPU.
void Scale(float factor, const StridedTensor& to) {
  float* target = static_cast<float*>(to.data);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < to.dims[0]; ++i) {
    for (int64_t k = 0; k < to.dims[1]; ++k) {
      target[i * to.strides[0] + k * to.strides[1]] *= factor;
    }
  }
}

// Adds each number of a float32 matrix, times a factor, to that of another on a CPU.
void AddTimes(float factor, const StridedTensor& from, const StridedTensor& to) {
  const float* source = static_cast<const float*>(from.data);
  float* target = static_cast<float*>(to.data);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < to.dims[0]; ++i) {
    for (int64_t k = 0; k < to.dims[1]; ++k) {
      target[i * to.strides[0] + k * to.strides[1]] +=
          factor * source[i * from.strides[0] + k * from.strides[1]];
    }
  }
}

// The options of PyTorch's convolutions, as arrays that live as long as this.
struct Options {
  explicit Options(const Convolution& c)
      : convolution(c),
        spatial(static_cast<int64_t>(c.strides.size())),
        zeros(c.strides.size(), 0) {}
  const Convolution& convolution;
  int64_t spatial;
  std::vector<int64_t> zeros;
};

// Whether PyTorch's gradient of w is unsafe where x has its channels last.
//
// On a CPU whose oneDNN uses AVX2 and no more, PyTorch 2.13 takes jit_1x1:avx2 for it. With 2 to 7
// input channels and a stride, that kernel writes past its workspace: wrong numbers, a corrupted
// heap, or threads that wait for each other forever. No other kind was wrong in 11,792 random
// convolutions and their gradients (1D to 3D, groups, dtypes, layouts), nor any of 3,555 of this
// kind with channels in planes. PyTorch chooses by the layout of x.
bool CorruptsMemoryChannelsLast(const Place& place, const StridedTensor& x, const StridedTensor& w,
                                const Convolution& c) {
  if (place.api.is_cuda || !IsFloat(x.dtype, 32) || x.rank != 4 || c.groups != 1) return false;
  const bool is_pointwise = w.dims[2] == 1 && w.dims[3] == 1;
  const bool is_strided = c.strides[0] > 1 || c.strides[1] > 1;
  return is_pointwise && is_strided && x.dims[1] < 8;
}

}  // namespace

void SetFastBfloat16(bool is_fast) { has_fast_bfloat16.store(is_fast, std::memory_order_relaxed); }

void Matmul(const Place& place, const StridedTensor& a, const StridedTensor& b,
            const StridedTensor* bias, const StridedTensor& out, Epilogue epilogue) {
  if (out.numel() == 0) return;
  const bool plain = bias == nullptr && epilogue == Epilogue::kNone;
  if (!plain && place.api.is_cuda) {
    TVM_FFI_THROW(ValueError) << "amp_ir.torch_cuda.matmul: it adds no bias and has no epilogue; "
                                 "expected none of either (amp_ir.cublaslt.matmul has both)";
  }
  const bool native = plain && SameDtype(a.dtype, b.dtype) && IsFast(place, a.dtype) &&
                      SameDtype(a.dtype, out.dtype);
  const bool is_direct = native || (plain && IsFloat(out.dtype, 32));
  const Form form = native ? Form::kAsIs : Form::kFloat32;
  const size_t nbytes = Operand::Nbytes(a, form) + Operand::Nbytes(b, form) +
                        (is_direct ? 0 : CopyNbytes(out)) +
                        (bias != nullptr ? Operand::Nbytes(*bias, Form::kFloat32) : 0);
  if (auto* query = WorkspaceQuery::Current()) return query->Note(nbytes, PackedNbytes(a, b, form));
  CopyMemory memory(nbytes);
  Operand wide_a(place, a, form, &memory), wide_b(place, b, form, &memory);
  StridedTensor x = Broadcast(wide_a.view, out), y = Broadcast(wide_b.view, out);
  if (is_direct) {
    MultiplyBatches(place, x, y, out);
    return;
  }
  StridedTensor rows;
  Tensor full = Tensor::DenseFloat32(place, out, &rows, &memory);
  MultiplyBatches(place, x, y, rows);
  if (bias != nullptr) {
    Operand shift(place, *bias, Form::kFloat32, &memory);
    FinishRows(rows, &shift.view, epilogue);
  } else if (!plain) {
    FinishRows(rows, nullptr, epilogue);
  }
  Tensor(place, out).CopyFrom(full);
}

void MatmulAccumulate(const Place& place, const StridedTensor& a, const StridedTensor& b,
                      const StridedTensor& c, const float* alpha, const float* beta,
                      const StridedTensor& out) {
  if (auto* query = WorkspaceQuery::Current()) {
    return query->Note(0, PackedNbytes(a, b, Form::kAsIs));
  }
  if (out.numel() == 0) return;
  Tensor left(place, a), right(place, b), total(place, out);
  if (c.data != out.data) total.CopyFrom(Tensor(place, c));
  const float product = alpha == nullptr ? 1.F : *alpha;
  float kept = beta == nullptr ? 1.F : *beta;
  // BLAS leaves out what a factor of 0 multiplies, such as the learning rate of a warm-up's first
  // step, and MKL what NaN multiplies; 0 times NaN or infinity is NaN.
  if (kept == 0.F || std::isnan(kept)) {
    Scale(kept, out);
    kept = 1.F;
  }
  if (product == 0.F || std::isnan(product)) {
    StridedTensor rows;
    CopyMemory memory(std::numeric_limits<size_t>::max());
    Tensor full = Tensor::DenseFloat32(place, out, &rows, &memory);
    Check(place.api, place.api.mm(full.get(), left.get(), right.get()), "mm");
    if (kept != 1.F) Scale(kept, out);
    AddTimes(product, rows, out);
    return;
  }
  // One handle for both: of two PyTorch copies the sum into itself.
  Check(place.api,
        place.api.addmm(total.get(), total.get(), left.get(), right.get(), kept, product), "addmm");
}

// The result is copied once: PyTorch's C interface has no convolution that writes to a given
// output. Its dispatcher has one, cudnn_convolution.out, for the forward pass alone; it would leave
// to us what aten::convolution decides, the backend and cuDNN's benchmark, deterministic and TF32
// flags.
void Convolve(const Place& place, const StridedTensor& x, const StridedTensor& w,
              const StridedTensor& y, const Convolution& convolution) {
  const bool native = IsNative(place, x, w, y);
  const Form form = native ? Form::kAsIs : Form::kFloat32;
  const size_t nbytes = Operand::Nbytes(x, form) + Operand::Nbytes(w, form);
  if (auto* query = WorkspaceQuery::Current()) return query->Note(nbytes);
  CopyMemory memory(nbytes);
  Operand data(place, x, form, &memory), weight(place, w, form, &memory);
  const Options o(convolution);
  const Convolution& c = convolution;
  Tensor full(place);
  Check(place.api,
        place.api.conv(data.get(), weight.get(), nullptr, c.strides.data(), o.spatial,
                       c.padding.data(), o.spatial, c.dilation.data(), o.spatial, 0, o.zeros.data(),
                       o.spatial, c.groups, full.out()),
        "convolution");
  Tensor(place, y).CopyFrom(full);
}

void ConvolveBackward(const Place& place, Gradient which, const StridedTensor& grad,
                      const StridedTensor& other, const StridedTensor& out,
                      const Convolution& convolution) {
  const bool of_input = which == Gradient::kInput;
  const bool native = IsNative(place, grad, other, out);
  // PyTorch asks for the tensor whose gradient it computes, and reads only its shape and dtype;
  // the result's own memory serves where it is large enough for that dtype.
  StridedTensor shape_only = out;
  shape_only.dtype = native ? grad.dtype : kFloat32;
  const bool is_large_enough = out.dtype.bits >= shape_only.dtype.bits;
  const bool is_unsafe = !of_input && CorruptsMemoryChannelsLast(place, other, out, convolution);
  const Form form = native ? Form::kAsIs : Form::kFloat32;
  const Form other_form = is_unsafe ? Form::kDenseFloat32 : form;
  const size_t nbytes = (is_large_enough ? 0 : CopyNbytes(out)) + Operand::Nbytes(grad, form) +
                        Operand::Nbytes(other, other_form);
  if (auto* query = WorkspaceQuery::Current()) return query->Note(nbytes);
  CopyMemory memory(nbytes);
  StridedTensor unused;
  Tensor stand_in = is_large_enough ? Tensor(place, shape_only)
                                    : Tensor::DenseFloat32(place, shape_only, &unused, &memory);
  Operand wide_grad(place, grad, form, &memory), wide_other(place, other, other_form, &memory);
  const Options o(convolution);
  const Convolution& c = convolution;
  const int32_t mask[3] = {of_input ? 1 : 0, of_input ? 0 : 1, 0};
  Tensor results[3] = {Tensor(place), Tensor(place), Tensor(place)};
  Check(place.api,
        place.api.conv_backward(
            wide_grad.get(), of_input ? stand_in.get() : wide_other.get(),
            of_input ? wide_other.get() : stand_in.get(), nullptr, 0, c.strides.data(), o.spatial,
            c.padding.data(), o.spatial, c.dilation.data(), o.spatial, 0, o.zeros.data(), o.spatial,
            c.groups, mask, 3, results[0].out(), results[1].out(), results[2].out()),
        "convolution_backward");
  Tensor(place, out).CopyFrom(results[of_input ? 0 : 1]);
}

void Attend(const Place& place, const StridedTensor& q, const StridedTensor& k,
            const StridedTensor& v, const AttentionOptions& options, const StridedTensor& out,
            const StridedTensor& lse) {
  if (WorkspaceQuery::Current() != nullptr) return;  // what PyTorch allocates cannot be asked for
  Tensor query(place, q), key(place, k), value(place, v);
  double scale = options.scale;
  if (!place.api.is_cuda) {
    Tensor attended(place), sums(place);
    Check(
        place.api,
        place.api.cpu_attention(query.get(), key.get(), value.get(), 0.0, options.is_causal ? 1 : 0,
                                nullptr, &scale, attended.out(), sums.out()),
        "_scaled_dot_product_flash_attention_for_cpu");
    Tensor(place, out).CopyFrom(attended);
    Tensor(place, lse).CopyFrom(sums);
    return;
  }
  int64_t max_q = 0, max_k = 0;
  std::vector<Tensor> results;
  for (int i = 0; i < 7; ++i) results.emplace_back(place);
  Check(place.api,
        place.api.attention(query.get(), key.get(), value.get(), 0.0, options.is_causal ? 1 : 0, 0,
                            &scale, results[0].out(), results[1].out(), results[2].out(),
                            results[3].out(), &max_q, &max_k, results[4].out(), results[5].out(),
                            results[6].out()),
        "_scaled_dot_product_flash_attention");
  Tensor(place, out).CopyFrom(results[0]);
  Tensor(place, lse).CopyFrom(results[1]);
}

void AttendBackward(const Place& place, const StridedTensor& grad, const StridedTensor& q,
                    const StridedTensor& k, const StridedTensor& v, const StridedTensor& out,
                    const StridedTensor& lse, const AttentionOptions& options,
                    const AttentionGradients& results) {
  if (WorkspaceQuery::Current() != nullptr) return;
  Tensor grad_out(place, grad), query(place, q), key(place, k), value(place, v), output(place, out),
      sums(place, lse);
  double scale = options.scale;
  Tensor found[3] = {Tensor(place), Tensor(place), Tensor(place)};
  if (!place.api.is_cuda) {
    Check(place.api,
          place.api.cpu_attention_backward(grad_out.get(), query.get(), key.get(), value.get(),
                                           output.get(), sums.get(), 0.0, options.is_causal ? 1 : 0,
                                           nullptr, &scale, found[0].out(), found[1].out(),
                                           found[2].out()),
          "_scaled_dot_product_flash_attention_for_cpu_backward");
  } else {
    // One length for all samples, and no dropout: PyTorch then reads no lengths and no random
    // state.
    Tensor none[4] = {Tensor::Undefined(place), Tensor::Undefined(place), Tensor::Undefined(place),
                      Tensor::Undefined(place)};
    Check(place.api,
          place.api.attention_backward(
              grad_out.get(), query.get(), key.get(), value.get(), output.get(), sums.get(),
              none[0].get(), none[1].get(), q.dims[2], k.dims[2], 0.0, options.is_causal ? 1 : 0,
              none[2].get(), none[3].get(), &scale, found[0].out(), found[1].out(), found[2].out()),
          "_scaled_dot_product_flash_attention_backward");
  }
  Tensor(place, results.q).CopyFrom(found[0]);
  Tensor(place, results.k).CopyFrom(found[1]);
  Tensor(place, results.v).CopyFrom(found[2]);
}

}  // namespace amp_ir::torch
