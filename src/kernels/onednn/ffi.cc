// SPDX-License-Identifier: Apache-2.0
// oneDNN behind tvm-ffi: checks what compiled programs send, and registers the functions.
#include <omp.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>

#include <optional>
#include <string>

#include "onednn/ops.h"
#include "onednn/plan.h"
#include "onednn/recurrence.h"
#include "onednn/widen.h"
#include "step/call_count.h"
#include "tensors/factor.h"
#include "tensors/library_calls.h"
#include "tensors/workspace.h"

namespace {

namespace ffi = tvm::ffi;
using amp_ir::Convolution;
using amp_ir::Counted;
using amp_ir::MakeImage;
using amp_ir::MakeStrided;
using amp_ir::StridedTensor;
using amp_ir::onednn::ConvKind;
using amp_ir::onednn::Guard;

// "relu"; files that amp_ir 0.1 exported may say "relu+gemm", with an algorithm that `tune` chose.
amp_ir::Epilogue ReadEpilogue(const char* function, const std::string& text) {
  return amp_ir::ParseEpilogue(function, text.substr(0, text.find('+')));
}

struct Operands {
  StridedTensor a, b, out;
  std::optional<StridedTensor> bias;
  const StridedTensor* bias_or_null() const { return bias ? &*bias : nullptr; }
};

Operands ReadOperands(const char* function, const ffi::TensorView& a, const ffi::TensorView& b,
                      const ffi::Optional<ffi::TensorView>& bias, const ffi::Shape& a_dims,
                      const ffi::Shape& a_strides, const ffi::Shape& b_dims,
                      const ffi::Shape& b_strides, const ffi::Shape& out_dims,
                      const ffi::Shape& out_strides, const ffi::TensorView& out) {
  Operands operands{MakeStrided(function, "a", a, a_dims, a_strides),
                    MakeStrided(function, "b", b, b_dims, b_strides),
                    MakeStrided(function, "out", out, out_dims, out_strides), std::nullopt};
  if (bias.has_value()) {
    operands.bias = MakeStrided(function, "bias", *bias, (*bias).shape(), (*bias).strides());
  }
  amp_ir::CheckMatmul(function, operands.a, operands.b, operands.bias_or_null(), operands.out);
  return operands;
}

void Matmul(const ffi::TensorView& a, const ffi::TensorView& b,
            const ffi::Optional<ffi::TensorView>& bias, const ffi::Shape& a_dims,
            const ffi::Shape& a_strides, const ffi::Shape& b_dims, const ffi::Shape& b_strides,
            const ffi::Shape& out_dims, const ffi::Shape& out_strides, const ffi::String& epilogue,
            const ffi::TensorView& out) {
  constexpr const char* kName = "amp_ir.onednn.matmul";
  const amp_ir::Epilogue finish = ReadEpilogue(kName, epilogue);
  const Operands of = ReadOperands(kName, a, b, bias, a_dims, a_strides, b_dims, b_strides,
                                   out_dims, out_strides, out);
  Guard(kName, [&] { amp_ir::onednn::Matmul(of.a, of.b, of.bias_or_null(), of.out, finish); });
}

// out = beta * c + alpha * (a @ b + bias); `c` is laid out as `out` is, and may be it. The epilogue
// is "none": where it stands, the other matmuls have theirs.
void MatmulAccumulate(const ffi::TensorView& a, const ffi::TensorView& b, const ffi::TensorView& c,
                      const ffi::Optional<ffi::TensorView>& bias,
                      const ffi::Optional<ffi::TensorView>& alpha,
                      const ffi::Optional<ffi::TensorView>& beta, const ffi::Shape& a_dims,
                      const ffi::Shape& a_strides, const ffi::Shape& b_dims,
                      const ffi::Shape& b_strides, const ffi::Shape& out_dims,
                      const ffi::Shape& out_strides, const ffi::String& epilogue,
                      const ffi::TensorView& out) {
  constexpr const char* kName = "amp_ir.onednn.matmul_accumulate";
  if (ReadEpilogue(kName, epilogue) != amp_ir::Epilogue::kNone) {
    TVM_FFI_THROW(ValueError) << kName << ": epilogue \"" << std::string(epilogue)
                              << "\"; expected none, since nothing is done to a sum";
  }
  const Operands of = ReadOperands(kName, a, b, bias, a_dims, a_strides, b_dims, b_strides,
                                   out_dims, out_strides, out);
  const StridedTensor before = MakeStrided(kName, "c", c, out_dims, out_strides);
  if (!amp_ir::IsFloat(before.dtype, 32) || !amp_ir::IsFloat(of.out.dtype, 32)) {
    TVM_FFI_THROW(TypeError) << kName << ": c is "
                             << std::string(ffi::DLDataTypeToString(before.dtype)) << " and out is "
                             << std::string(ffi::DLDataTypeToString(of.out.dtype))
                             << "; expected float32, in which sums are accumulated";
  }
  const float* product = amp_ir::Factor(kName, "alpha", alpha);
  const float* total = amp_ir::Factor(kName, "beta", beta);
  const bool is_query = amp_ir::WorkspaceQuery::Current() != nullptr;
  if (before.data != of.out.data && !is_query) amp_ir::ConvertStrided(before, of.out);
  Guard(kName, [&] {
    amp_ir::onednn::MatmulAccumulate(of.a, of.b, of.bias_or_null(), product, total, of.out);
  });
}

// Raw bytes that hold a packed matrix.
void CheckPacked(const char* function, const ffi::TensorView& packed) {
  const DLDataType dtype = packed.dtype();
  if (dtype.code != kDLUInt || dtype.bits != 8) {
    TVM_FFI_THROW(TypeError) << function << ": packed has dtype " << ffi::DLDataTypeToString(dtype)
                             << "; expected uint8, the bytes that amp_ir.onednn.pack wrote";
  }
}

// Two dims, rows one after the other; without memory.
//
// Raises: ValueError for a negative extent, or more bytes than int64 counts.
StridedTensor RowMajorMatrix(const char* function, const ffi::Shape& dims, DLDataType dtype) {
  int64_t nbytes = 0;
  if (dims[0] < 0 || dims[1] < 0 || __builtin_mul_overflow(dims[0], dims[1], &nbytes) ||
      __builtin_mul_overflow(nbytes, int64_t{4}, &nbytes)) {
    TVM_FFI_THROW(ValueError) << function << ": b has dims " << amp_ir::ToString(dims)
                              << "; expected extents of a matrix that fits into memory";
  }
  StridedTensor matrix;
  matrix.dtype = dtype;
  matrix.rank = 2;
  for (int i = 0; i < 2; ++i) matrix.dims[i] = dims[i];
  matrix.strides = {dims[1], 1};
  return matrix;
}

int64_t PackedBytes(const ffi::Shape& b_dims, DLDataType dtype) {
  constexpr const char* kName = "amp_ir.onednn.packed_nbytes";
  amp_ir::CheckDtype(kName, "b", dtype);
  if (b_dims.size() != 2) return 0;
  const StridedTensor matrix = RowMajorMatrix(kName, b_dims, dtype);
  int64_t nbytes = 0;
  Guard(kName, [&] { nbytes = amp_ir::onednn::PackedBytes(matrix); });
  return nbytes;
}

void Pack(const ffi::TensorView& b, const ffi::Shape& b_dims, const ffi::Shape& b_strides,
          const ffi::TensorView& packed) {
  constexpr const char* kName = "amp_ir.onednn.pack";
  StridedTensor matrix = MakeStrided(kName, "b", b, b_dims, b_strides);
  CheckPacked(kName, packed);
  const int64_t least = matrix.numel() * (matrix.dtype.bits / 8);
  if (matrix.rank != 2 || packed.numel() < least) {
    TVM_FFI_THROW(ValueError) << kName << ": b has " << matrix.rank << " dims and packed has "
                              << packed.numel() << " bytes; expected 2 dims and at least " << least
                              << " bytes (amp_ir.onednn.packed_nbytes)";
  }
  Guard(kName, [&] { amp_ir::onednn::Pack(matrix, packed.data_ptr(), packed.numel()); });
}

void MatmulPacked(const ffi::TensorView& a, const ffi::TensorView& packed,
                  const ffi::Optional<ffi::TensorView>& bias, const ffi::Shape& a_dims,
                  const ffi::Shape& a_strides, const ffi::Shape& b_dims, const ffi::Shape& out_dims,
                  const ffi::Shape& out_strides, const ffi::String& epilogue,
                  const ffi::TensorView& out) {
  constexpr const char* kName = "amp_ir.onednn.matmul_packed";
  StridedTensor left = MakeStrided(kName, "a", a, a_dims, a_strides);
  StridedTensor result = MakeStrided(kName, "out", out, out_dims, out_strides);
  CheckPacked(kName, packed);
  StridedTensor shift;
  if (bias.has_value()) {
    shift = MakeStrided(kName, "bias", *bias, (*bias).shape(), (*bias).strides());
  }
  if (left.rank != 2 || b_dims.size() != 2 || result.rank != 2) {
    TVM_FFI_THROW(ValueError) << kName << ": a, b and out have " << left.rank << ", "
                              << b_dims.size() << " and " << result.rank
                              << " dims; expected 2 of each";
  }
  StridedTensor right = RowMajorMatrix(kName, b_dims, left.dtype);
  right.data = packed.data_ptr();
  const int64_t least = right.numel() * (right.dtype.bits / 8);
  if (packed.numel() < least) {
    TVM_FFI_THROW(ValueError) << kName << ": packed has " << packed.numel()
                              << " bytes; expected at least " << least
                              << ", what amp_ir.onednn.pack wrote for b";
  }
  const StridedTensor* shift_or_null = bias.has_value() ? &shift : nullptr;
  amp_ir::Epilogue finish = amp_ir::ParseEpilogue(kName, epilogue);
  amp_ir::CheckMatmul(kName, left, right, shift_or_null, result);
  Guard(kName, [&] {
    amp_ir::onednn::MatmulPacked(left, right, packed.numel(), shift_or_null, result, finish);
  });
}

void Conv(const ffi::TensorView& x, const ffi::TensorView& w, const ffi::Shape& x_dims,
          const ffi::Shape& x_strides, const ffi::Shape& w_dims, const ffi::Shape& w_strides,
          const ffi::Shape& out_dims, const ffi::Shape& out_strides, const ffi::Shape& strides,
          const ffi::Shape& padding, const ffi::Shape& dilation, int64_t groups,
          const ffi::TensorView& out) {
  constexpr const char* kName = "amp_ir.onednn.conv";
  StridedTensor data = MakeImage(kName, "x", x, x_dims, x_strides);
  StridedTensor weight = MakeStrided(kName, "w", w, w_dims, w_strides);
  StridedTensor result = MakeImage(kName, "out", out, out_dims, out_strides);
  Convolution convolution{strides, padding, dilation, groups};
  amp_ir::CheckConvolution(kName, data, weight, result, convolution);
  Guard(kName,
        [&] { amp_ir::onednn::Convolve(ConvKind::kForward, data, weight, result, convolution); });
}

void ConvBackwardInput(const ffi::TensorView& grad, const ffi::TensorView& w,
                       const ffi::Shape& grad_dims, const ffi::Shape& grad_strides,
                       const ffi::Shape& w_dims, const ffi::Shape& w_strides,
                       const ffi::Shape& out_dims, const ffi::Shape& out_strides,
                       const ffi::Shape& strides, const ffi::Shape& padding,
                       const ffi::Shape& dilation, int64_t groups, const ffi::TensorView& out) {
  constexpr const char* kName = "amp_ir.onednn.conv_backward_input";
  StridedTensor gradient = MakeImage(kName, "grad", grad, grad_dims, grad_strides);
  StridedTensor weight = MakeStrided(kName, "w", w, w_dims, w_strides);
  StridedTensor result = MakeImage(kName, "out", out, out_dims, out_strides);
  Convolution convolution{strides, padding, dilation, groups};
  amp_ir::CheckConvolution(kName, result, weight, gradient, convolution);
  Guard(kName, [&] {
    amp_ir::onednn::Convolve(ConvKind::kBackwardInput, result, weight, gradient, convolution);
  });
}

void ConvBackwardWeight(const ffi::TensorView& grad, const ffi::TensorView& x,
                        const ffi::Shape& grad_dims, const ffi::Shape& grad_strides,
                        const ffi::Shape& x_dims, const ffi::Shape& x_strides,
                        const ffi::Shape& out_dims, const ffi::Shape& out_strides,
                        const ffi::Shape& strides, const ffi::Shape& padding,
                        const ffi::Shape& dilation, int64_t groups, const ffi::TensorView& out) {
  constexpr const char* kName = "amp_ir.onednn.conv_backward_weight";
  StridedTensor gradient = MakeImage(kName, "grad", grad, grad_dims, grad_strides);
  StridedTensor data = MakeImage(kName, "x", x, x_dims, x_strides);
  StridedTensor result = MakeStrided(kName, "out", out, out_dims, out_strides);
  Convolution convolution{strides, padding, dilation, groups};
  amp_ir::CheckConvolution(kName, data, result, gradient, convolution);
  Guard(kName, [&] {
    amp_ir::onednn::Convolve(ConvKind::kBackwardWeight, data, result, gradient, convolution);
  });
}

// "avx512_core_bf16" and so on: what oneDNN uses here, after ONEDNN_MAX_CPU_ISA.
std::string IsaName() {
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::sse41:
      return "sse41";
    case dnnl::cpu_isa::avx:
      return "avx";
    case dnnl::cpu_isa::avx2:
      return "avx2";
    case dnnl::cpu_isa::avx2_vnni:
      return "avx2_vnni";
    case dnnl::cpu_isa::avx2_vnni_2:
      return "avx2_vnni_2";
    case dnnl::cpu_isa::avx512_core:
      return "avx512_core";
    case dnnl::cpu_isa::avx512_core_vnni:
      return "avx512_core_vnni";
    case dnnl::cpu_isa::avx512_core_bf16:
      return "avx512_core_bf16";
    case dnnl::cpu_isa::avx512_core_fp16:
      return "avx512_core_fp16";
    case dnnl::cpu_isa::avx512_core_amx:
      return "avx512_core_amx";
    case dnnl::cpu_isa::avx512_core_amx_fp16:
      return "avx512_core_amx_fp16";
    default:
      return "generic";
  }
}

ffi::Array<ffi::String> Implementations() {
  ffi::Array<ffi::String> names;
  for (const std::string& name : amp_ir::onednn::CachedImplementations()) names.push_back(name);
  for (const std::string& name : amp_ir::onednn::RecurrenceImplementations()) names.push_back(name);
  return names;
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("amp_ir.onednn.matmul", Counted<Matmul>::Call)
      .def("amp_ir.onednn.matmul_accumulate", Counted<MatmulAccumulate>::Call)
      .def("amp_ir.onednn.packed_nbytes", PackedBytes)
      .def("amp_ir.onednn.pack", Counted<Pack>::Call)
      .def("amp_ir.onednn.matmul_packed", Counted<MatmulPacked>::Call)
      .def("amp_ir.onednn.conv", Counted<Conv>::Call)
      .def("amp_ir.onednn.conv_backward_input", Counted<ConvBackwardInput>::Call)
      .def("amp_ir.onednn.conv_backward_weight", Counted<ConvBackwardWeight>::Call)
      .def_packed("amp_ir.onednn.scratch_nbytes", amp_ir::WorkspaceNbytes)
      .def_packed("amp_ir.onednn.kept_nbytes", amp_ir::PersistentNbytes)
      .def_packed("amp_ir.onednn.with_scratch", amp_ir::CallWithWorkspace)
      .def("amp_ir.onednn.implementations", Implementations)
      .def("amp_ir.onednn.clear_cache",
           [] {
             amp_ir::onednn::ClearCachedPlans();
             amp_ir::onednn::ClearRecurrencePlans();
           })
      .def("amp_ir.onednn.isa", IsaName)
      .def("amp_ir.onednn.is_native", [](DLDataType dtype) {
        amp_ir::CheckDtype("amp_ir.onednn.is_native", "dtype", dtype);
        return amp_ir::onednn::IsNative(dtype);
      });
}
