// SPDX-License-Identifier: Apache-2.0
// cuBLASLt behind tvm-ffi: checks what compiled programs send, and registers the functions.
//
// This library is part of every build, on machines without CUDA too, so that steps for a GPU can be
// compiled anywhere; cuBLASLt itself is loaded at the first matmul (cublaslt/library.cc).
#include <tvm/ffi/reflection/registry.h>

#include <string>

#include "cublaslt/api.h"
#include "cublaslt/matmul.h"
#include "step/call_count.h"
#include "tensors/library_calls.h"
#include "tensors/workspace.h"

namespace {

namespace ffi = tvm::ffi;
using amp_ir::Counted;
using amp_ir::MakeStrided;
using amp_ir::StridedTensor;
using amp_ir::cublaslt::MatmulCall;

// "none", or "none+tf32" where float32 operands may be rounded to TF32: the one place where that is
// said, so that it is a property of a compiled step and not of the process that runs it.
struct Finish {
  amp_ir::Epilogue epilogue;
  bool allow_tf32;
};

Finish ParseFinish(const char* function, std::string text) {
  const std::string suffix = "+tf32";
  const bool allow_tf32 = text.size() >= suffix.size() &&
                          text.compare(text.size() - suffix.size(), suffix.size(), suffix) == 0;
  if (allow_tf32) text.resize(text.size() - suffix.size());
  return {amp_ir::ParseEpilogue(function, text), allow_tf32};
}

void CheckSameDevice(const char* function, DLDevice expected, const char* name, DLDevice device) {
  if (device.device_type == expected.device_type && device.device_id == expected.device_id) return;
  TVM_FFI_THROW(ValueError) << function << ": " << name << " is on device " << device.device_type
                            << ":" << device.device_id << " and out on " << expected.device_type
                            << ":" << expected.device_id << "; expected one device";
}

void Matmul(const ffi::TensorView& a, const ffi::TensorView& b,
            const ffi::Optional<ffi::TensorView>& bias, const ffi::Shape& a_dims,
            const ffi::Shape& a_strides, const ffi::Shape& b_dims, const ffi::Shape& b_strides,
            const ffi::Shape& out_dims, const ffi::Shape& out_strides, const ffi::String& epilogue,
            const ffi::TensorView& out) {
  constexpr const char* kName = "amp_ir.cublaslt.matmul";
  StridedTensor left = MakeStrided(kName, "a", a, a_dims, a_strides);
  StridedTensor right = MakeStrided(kName, "b", b, b_dims, b_strides);
  StridedTensor result = MakeStrided(kName, "out", out, out_dims, out_strides);
  CheckSameDevice(kName, out.device(), "a", a.device());
  CheckSameDevice(kName, out.device(), "b", b.device());
  StridedTensor shift;
  if (bias.has_value()) {
    shift = MakeStrided(kName, "bias", *bias, (*bias).shape(), (*bias).strides());
    CheckSameDevice(kName, out.device(), "bias", (*bias).device());
  }
  const StridedTensor* shift_or_null = bias.has_value() ? &shift : nullptr;
  const Finish finish = ParseFinish(kName, epilogue);
  amp_ir::CheckMatmul(kName, left, right, shift_or_null, result);
  amp_ir::cublaslt::Matmul({left, right, result, shift_or_null, finish.epilogue, finish.allow_tf32},
                           out.device());
}

StridedTensor Described(const char* name, const ffi::Shape& dims, const ffi::Shape& strides,
                        DLDataType dtype) {
  constexpr const char* kName = "amp_ir.cublaslt.launches";
  amp_ir::CheckDtype(kName, name, dtype);
  if (dims.size() != strides.size() || dims.size() > amp_ir::kMaxRank) {
    TVM_FFI_THROW(ValueError) << kName << ": " << name << " has " << dims.size() << " dims and "
                              << strides.size() << " strides; expected as many of each, at most "
                              << amp_ir::kMaxRank;
  }
  StridedTensor view;
  view.dtype = dtype;
  view.rank = static_cast<int>(dims.size());
  for (int i = 0; i < view.rank; ++i) {
    view.dims[i] = dims[i];
    view.strides[i] = strides[i];
  }
  return amp_ir::WithoutIdleStrides(view);
}

// How many launches amp_ir.cublaslt.matmul takes for such tensors, 0 where it refuses them. Needs
// neither memory nor cuBLASLt: the dispatcher asks.
int64_t Launches(const ffi::Shape& a_dims, const ffi::Shape& a_strides, const ffi::Shape& b_dims,
                 const ffi::Shape& b_strides, const ffi::Shape& out_dims,
                 const ffi::Shape& out_strides, DLDataType a, DLDataType b, DLDataType out,
                 const ffi::Optional<DLDataType>& bias, const ffi::String& epilogue) {
  StridedTensor left = Described("a", a_dims, a_strides, a);
  StridedTensor right = Described("b", b_dims, b_strides, b);
  StridedTensor result = Described("out", out_dims, out_strides, out);
  constexpr const char* kName = "amp_ir.cublaslt.launches";
  StridedTensor shift;
  if (bias.has_value()) {
    amp_ir::CheckDtype(kName, "bias", *bias);
    shift.dtype = *bias;
    shift.rank = 1;
    shift.dims[0] = result.rank > 0 ? result.dims[result.rank - 1] : 1;
    shift.strides[0] = 1;
  }
  const StridedTensor* shift_or_null = bias.has_value() ? &shift : nullptr;
  amp_ir::CheckMatmul(kName, left, right, shift_or_null, result);
  const Finish finish = ParseFinish(kName, epilogue);
  std::string why;
  return amp_ir::cublaslt::CountLaunches(
      {left, right, result, shift_or_null, finish.epilogue, finish.allow_tf32}, &why);
}

void Use(const ffi::String& path) {
  amp_ir::cublaslt::ClearCachedPlans();
  amp_ir::cublaslt::Use(path);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  namespace cublaslt = amp_ir::cublaslt;
  refl::GlobalDef()
      .def("amp_ir.cublaslt.matmul", Counted<Matmul>::Call)
      .def("amp_ir.cublaslt.launches", Launches)
      .def_packed("amp_ir.cublaslt.scratch_nbytes", amp_ir::WorkspaceNbytes)
      .def_packed("amp_ir.cublaslt.with_scratch", amp_ir::CallWithWorkspace)
      .def("amp_ir.cublaslt.available", cublaslt::IsAvailable)
      .def("amp_ir.cublaslt.version",
           [] { return static_cast<int64_t>(cublaslt::Library().version()); })
      .def("amp_ir.cublaslt.use", Use)
      .def("amp_ir.cublaslt.also_look_at",
           [](const ffi::String& path) { cublaslt::AlsoLookAt(path); })
      .def("amp_ir.cublaslt.cached_plans", cublaslt::CountCachedPlans)
      .def("amp_ir.cublaslt.clear_cache", cublaslt::ClearCachedPlans);
}
