// SPDX-License-Identifier: Apache-2.0
// Matmul and convolution through PyTorch's C interface, without PyTorch's headers.
//
// The aoti_torch_* functions of libtorch_cpu are plain C over opaque handles and keep their binary
// interface between releases (torch/csrc/inductor/aoti_torch/c/shim.h says so). They are looked up
// in the libtorch_cpu that `import torch` has loaded; where one is missing, the function of ours
// that needs it is not registered, and the dispatcher takes the next choice.
#include <dlfcn.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cmath>
#include <vector>

#include "strided_tensor.h"

namespace {

namespace ffi = tvm::ffi;
using amp_ir::Convolution;
using amp_ir::Epilogue;
using amp_ir::StridedTensor;

using Handle = void*;   // AtenTensorHandle
using Error = int32_t;  // AOTITorchError; 0 is success
using Dims = const int64_t*;

struct TorchFunctions {
  Error (*from_blob)(void*, int64_t, Dims, Dims, int64_t, int32_t, int32_t, int32_t, Handle*);
  Error (*empty_strided)(int64_t, Dims, Dims, int32_t, int32_t, int32_t, Handle*);
  Error (*data_ptr)(Handle, void**);
  Error (*destroy)(Handle);
  Error (*copy)(Handle, Handle, int32_t);
  Error (*mm)(Handle, Handle, Handle);
  Error (*bmm)(Handle, Handle, Handle);
  Error (*conv)(Handle, Handle, Handle*, Dims, int64_t, Dims, int64_t, Dims, int64_t, int32_t, Dims,
                int64_t, int64_t, Handle*);
  Error (*conv_backward)(Handle, Handle, Handle, Dims*, int64_t, Dims, int64_t, Dims, int64_t, Dims,
                         int64_t, int32_t, Dims, int64_t, int64_t, const int32_t*, int64_t, Handle*,
                         Handle*, Handle*);
  int32_t (*float32)();
  int32_t (*float16)();
  int32_t (*bfloat16)();
  int32_t (*cpu)();
  const char* (*what)();  // the last error's text; absent before torch 2.10
};

template <class Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

TorchFunctions torch;

bool FindTensorFunctions(void* lib) {
  Find(lib, "torch_exception_get_what_without_backtrace", &torch.what);
  return Find(lib, "aoti_torch_create_tensor_from_blob", &torch.from_blob) &&
         Find(lib, "aoti_torch_empty_strided", &torch.empty_strided) &&
         Find(lib, "aoti_torch_get_data_ptr", &torch.data_ptr) &&
         Find(lib, "aoti_torch_delete_tensor_object", &torch.destroy) &&
         Find(lib, "aoti_torch_copy_", &torch.copy) &&
         Find(lib, "aoti_torch_dtype_float32", &torch.float32) &&
         Find(lib, "aoti_torch_dtype_float16", &torch.float16) &&
         Find(lib, "aoti_torch_dtype_bfloat16", &torch.bfloat16) &&
         Find(lib, "aoti_torch_device_type_cpu", &torch.cpu);
}

void Check(Error error, const char* what) {
  if (error == 0) return;
  TVM_FFI_THROW(RuntimeError) << "PyTorch's " << what << " failed"
                              << (torch.what != nullptr ? std::string(": ") + torch.what() : "");
}

// Owns one PyTorch tensor object.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(const StridedTensor& t) {
    Check(torch.from_blob(t.data, t.rank, t.dims.data(), t.strides.data(), 0, DtypeCode(t.dtype),
                          torch.cpu(), 0, &handle_),
          "from_blob");
  }
  Tensor(Tensor&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_ != nullptr) torch.destroy(handle_);
  }

  static Tensor DenseFloat32(const StridedTensor& like, StridedTensor* view) {
    *view = like;
    view->dtype = DLDataType{kDLFloat, 32, 1};
    int64_t stride = 1;
    for (int i = view->rank - 1; i >= 0; --i) {
      view->strides[i] = stride;
      stride *= view->dims[i];
    }
    Tensor result;
    Check(torch.empty_strided(view->rank, view->dims.data(), view->strides.data(), torch.float32(),
                              torch.cpu(), 0, &result.handle_),
          "empty_strided");
    Check(torch.data_ptr(result.handle_, &view->data), "data_ptr");
    return result;
  }

  Handle get() const { return handle_; }
  Handle* out() { return &handle_; }

 private:
  static int32_t DtypeCode(DLDataType dtype) {
    if (amp_ir::IsFloat(dtype, 32)) return torch.float32();
    return amp_ir::IsBfloat16(dtype) ? torch.bfloat16() : torch.float16();
  }
  Handle handle_ = nullptr;
};

void Copy(const Tensor& to, const Tensor& from) {
  Check(torch.copy(to.get(), from.get(), 0), "copy_");
}

// Whether PyTorch multiplies this dtype at the speed of the hardware, with float32 accumulation.
// Its float16 kernels run at about 1 GFLOP/s on a CPU without float16 arithmetic (measured), and
// bfloat16 without avx512_bf16 is no better than float32; both are then computed in float32.
bool IsFast(DLDataType dtype) {
#if defined(__x86_64__)
  return amp_ir::IsFloat(dtype, 32) ||
         (amp_ir::IsBfloat16(dtype) && __builtin_cpu_supports("avx512bf16"));
#else
  return amp_ir::IsFloat(dtype, 32);
#endif
}

// An operand in the dtype of the computation: itself, or a float32 copy.
class Operand {
 public:
  Operand(const StridedTensor& source, bool as_float32) : view(source), tensor_(source) {
    if (!as_float32 || amp_ir::IsFloat(source.dtype, 32)) return;
    Tensor wide = Tensor::DenseFloat32(source, &view);
    Copy(wide, tensor_);
    wide_.push_back(std::move(wide));
  }
  Handle get() const { return wide_.empty() ? tensor_.get() : wide_.back().get(); }
  StridedTensor view;

 private:
  Tensor tensor_;
  std::vector<Tensor> wide_;
};

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
void MultiplyBatches(const StridedTensor& a, const StridedTensor& b, const StridedTensor& out) {
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
      MultiplyBatches(slice(a, i), slice(b, i), slice(out, i));
    }
    return;
  }
  Tensor left(a), right(b), result(out);
  auto multiply = out.rank == 3 ? torch.bmm : torch.mm;
  Check(multiply(result.get(), left.get(), right.get()), out.rank == 3 ? "bmm" : "mm");
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

void Matmul(const ffi::TensorView& a, const ffi::TensorView& b,
            const ffi::Optional<ffi::TensorView>& bias, const ffi::Shape& a_dims,
            const ffi::Shape& a_strides, const ffi::Shape& b_dims, const ffi::Shape& b_strides,
            const ffi::Shape& out_dims, const ffi::Shape& out_strides, const ffi::String& epilogue,
            const ffi::TensorView& out) {
  constexpr const char* kName = "amp_ir.torch.matmul";
  StridedTensor left = amp_ir::MakeStrided(kName, "a", a, a_dims, a_strides);
  StridedTensor right = amp_ir::MakeStrided(kName, "b", b, b_dims, b_strides);
  StridedTensor result = amp_ir::MakeStrided(kName, "out", out, out_dims, out_strides);
  StridedTensor shift;
  if (bias.has_value()) {
    shift = amp_ir::MakeStrided(kName, "bias", *bias, (*bias).shape(), (*bias).strides());
  }
  Epilogue finish = amp_ir::ParseEpilogue(kName, epilogue);
  amp_ir::CheckMatmul(kName, left, right, bias.has_value() ? &shift : nullptr, result);
  if (result.numel() == 0) return;
  const bool plain = !bias.has_value() && finish == Epilogue::kNone;
  const bool native = amp_ir::SameDtype(left.dtype, right.dtype) && IsFast(left.dtype) && plain &&
                      amp_ir::SameDtype(left.dtype, result.dtype);
  Operand wide_left(left, !native), wide_right(right, !native);
  StridedTensor x = Broadcast(wide_left.view, result), y = Broadcast(wide_right.view, result);
  if (native || (plain && amp_ir::IsFloat(result.dtype, 32))) {
    MultiplyBatches(x, y, result);
    return;
  }
  StridedTensor rows;
  Tensor full = Tensor::DenseFloat32(result, &rows);
  MultiplyBatches(x, y, rows);
  if (!plain) {
    Operand wide_shift(shift, bias.has_value());
    FinishRows(rows, bias.has_value() ? &wide_shift.view : nullptr, finish);
  }
  Copy(Tensor(result), full);
}

void Conv(const ffi::TensorView& x, const ffi::TensorView& w, const ffi::Shape& x_dims,
          const ffi::Shape& x_strides, const ffi::Shape& w_dims, const ffi::Shape& w_strides,
          const ffi::Shape& out_dims, const ffi::Shape& out_strides, const ffi::Shape& strides,
          const ffi::Shape& padding, const ffi::Shape& dilation, int64_t groups,
          const ffi::TensorView& out) {
  constexpr const char* kName = "amp_ir.torch.conv";
  StridedTensor data = amp_ir::MakeStrided(kName, "x", x, x_dims, x_strides);
  StridedTensor weight = amp_ir::MakeStrided(kName, "w", w, w_dims, w_strides);
  StridedTensor result = amp_ir::MakeStrided(kName, "out", out, out_dims, out_strides);
  amp_ir::CheckConvolution(kName, data, weight, result, {strides, padding, dilation, groups});
  const bool native = amp_ir::SameDtype(data.dtype, weight.dtype) && IsFast(data.dtype) &&
                      amp_ir::SameDtype(data.dtype, result.dtype);
  Operand wide_data(data, !native), wide_weight(weight, !native);
  std::vector<int64_t> zeros(strides.size(), 0);
  const int64_t n = static_cast<int64_t>(strides.size());
  Tensor full;
  Check(torch.conv(wide_data.get(), wide_weight.get(), nullptr, strides.data(), n, padding.data(),
                   n, dilation.data(), n, 0, zeros.data(), n, groups, full.out()),
        "convolution");
  Copy(Tensor(result), full);
}

enum class Gradient { kInput, kWeight };

// first is the gradient of y; second is w for the input's gradient and x for the weight's.
void ConvBackward(const char* name, Gradient which, const StridedTensor& grad,
                  const StridedTensor& second, const StridedTensor& out, const Convolution& conv) {
  const bool of_input = which == Gradient::kInput;
  amp_ir::CheckConvolution(name, of_input ? out : second, of_input ? second : out, grad, conv);
  const bool native = amp_ir::SameDtype(grad.dtype, second.dtype) && IsFast(grad.dtype) &&
                      amp_ir::SameDtype(grad.dtype, out.dtype);
  // PyTorch asks for the tensor whose gradient it computes, and reads only its shape and dtype;
  // the result's own memory serves, as float32 when the computation is.
  StridedTensor shape_only = out;
  shape_only.dtype = native ? grad.dtype : DLDataType{kDLFloat, 32, 1};
  StridedTensor unused;
  Tensor stand_in = native || amp_ir::IsFloat(out.dtype, 32)
                        ? Tensor(shape_only)
                        : Tensor::DenseFloat32(shape_only, &unused);
  Operand wide_grad(grad, !native), wide_second(second, !native);
  std::vector<int64_t> zeros(conv.strides.size(), 0);
  const int64_t n = static_cast<int64_t>(conv.strides.size());
  const int32_t mask[3] = {of_input ? 1 : 0, of_input ? 0 : 1, 0};
  Tensor results[3];
  Check(torch.conv_backward(wide_grad.get(), of_input ? stand_in.get() : wide_second.get(),
                            of_input ? wide_second.get() : stand_in.get(), nullptr, 0,
                            conv.strides.data(), n, conv.padding.data(), n, conv.dilation.data(), n,
                            0, zeros.data(), n, conv.groups, mask, 3, results[0].out(),
                            results[1].out(), results[2].out()),
        "convolution_backward");
  Copy(Tensor(out), results[of_input ? 0 : 1]);
}

void ConvBackwardInput(const ffi::TensorView& grad, const ffi::TensorView& w,
                       const ffi::Shape& grad_dims, const ffi::Shape& grad_strides,
                       const ffi::Shape& w_dims, const ffi::Shape& w_strides,
                       const ffi::Shape& out_dims, const ffi::Shape& out_strides,
                       const ffi::Shape& strides, const ffi::Shape& padding,
                       const ffi::Shape& dilation, int64_t groups, const ffi::TensorView& out) {
  constexpr const char* kName = "amp_ir.torch.conv_backward_input";
  ConvBackward(kName, Gradient::kInput,
               amp_ir::MakeStrided(kName, "grad", grad, grad_dims, grad_strides),
               amp_ir::MakeStrided(kName, "w", w, w_dims, w_strides),
               amp_ir::MakeStrided(kName, "out", out, out_dims, out_strides),
               {strides, padding, dilation, groups});
}

void ConvBackwardWeight(const ffi::TensorView& grad, const ffi::TensorView& x,
                        const ffi::Shape& grad_dims, const ffi::Shape& grad_strides,
                        const ffi::Shape& x_dims, const ffi::Shape& x_strides,
                        const ffi::Shape& out_dims, const ffi::Shape& out_strides,
                        const ffi::Shape& strides, const ffi::Shape& padding,
                        const ffi::Shape& dilation, int64_t groups, const ffi::TensorView& out) {
  constexpr const char* kName = "amp_ir.torch.conv_backward_weight";
  ConvBackward(kName, Gradient::kWeight,
               amp_ir::MakeStrided(kName, "grad", grad, grad_dims, grad_strides),
               amp_ir::MakeStrided(kName, "x", x, x_dims, x_strides),
               amp_ir::MakeStrided(kName, "out", out, out_dims, out_strides),
               {strides, padding, dilation, groups});
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  // Python loads libtorch_cpu with local visibility, so the process-wide table does not have it;
  // RTLD_NOLOAD finds the copy that is loaded and never loads another.
  void* lib = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (lib == nullptr || !FindTensorFunctions(lib)) return;
  refl::GlobalDef functions;
  if (Find(lib, "aoti_torch_cpu_mm_out", &torch.mm) &&
      Find(lib, "aoti_torch_cpu_bmm_out", &torch.bmm)) {
    functions.def("amp_ir.torch.matmul", Matmul);
  }
  if (Find(lib, "aoti_torch_cpu_convolution", &torch.conv)) {
    functions.def("amp_ir.torch.conv", Conv);
  }
  if (Find(lib, "aoti_torch_cpu_convolution_backward", &torch.conv_backward)) {
    functions.def("amp_ir.torch.conv_backward_input", ConvBackwardInput);
    functions.def("amp_ir.torch.conv_backward_weight", ConvBackwardWeight);
  }
}
