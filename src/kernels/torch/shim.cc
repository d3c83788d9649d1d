// SPDX-License-Identifier: Apache-2.0
// PyTorch's kernels behind tvm-ffi: checks what compiled programs send, and registers functions.
//
// amp_ir.torch.* run on the CPU and are registered where PyTorch has the kernel; where one is
// missing the dispatcher takes the next choice. amp_ir.torch_cuda.* have the same arguments and are
// always registered, so that steps for a GPU can be compiled anywhere; what they call is looked for
// at the first call (torch/api.h). They take their results and workspaces from PyTorch's own
// allocator: in a CUDA graph, that must be captured by PyTorch (torch.cuda.graph).
#include <tvm/ffi/reflection/registry.h>

#include <string>
#include <type_traits>

#include "step/call_count.h"
#include "tensors/factor.h"
#include "tensors/library_calls.h"
#include "tensors/workspace.h"
#include "torch/ops.h"

namespace {

namespace ffi = tvm::ffi;
namespace torch = amp_ir::torch;
using amp_ir::Convolution;
using amp_ir::Counted;
using amp_ir::MakeImage;
using amp_ir::MakeStrided;
using amp_ir::SameDtype;
using amp_ir::StridedTensor;

struct Cpu {
  static constexpr const char* kLibrary = "amp_ir.torch.";
  static const torch::Api& Api() { return *torch::CpuApi(); }
};

struct Cuda {
  static constexpr const char* kLibrary = "amp_ir.torch_cuda.";
  static const torch::Api& Api() { return torch::CudaApi(); }
};

// What a call about a convolution y of x and w computes, and what it is called.
enum class Of { kResult, kInput, kWeight };
constexpr const char* kConvolutionVerbs[] = {"conv", "conv_backward_input", "conv_backward_weight"};

// The functions of one kind of device. Tensors of another kind are refused before they are touched.
template <class Kind>
struct Functions {
  static std::string Name(const char* verb) { return std::string(Kind::kLibrary) + verb; }

  static const torch::Api& ApiFor(const std::string& name, DLDevice device) {
    const torch::Api& api = Kind::Api();
    const int expected = api.is_cuda ? kDLCUDA : kDLCPU;
    if (device.device_type != expected && !api.is_on_host) {
      TVM_FFI_THROW(ValueError) << name << ": the result is on device type "
                                << static_cast<int>(device.device_type) << "; expected " << expected
                                << (api.is_cuda ? " (CUDA)" : " (CPU)");
    }
    return api;
  }

  static void Matmul(const ffi::TensorView& a, const ffi::TensorView& b,
                     const ffi::Optional<ffi::TensorView>& bias, const ffi::Shape& a_dims,
                     const ffi::Shape& a_strides, const ffi::Shape& b_dims,
                     const ffi::Shape& b_strides, const ffi::Shape& out_dims,
                     const ffi::Shape& out_strides, const ffi::String& epilogue,
                     const ffi::TensorView& out) {
    const std::string name = Name("matmul");
    StridedTensor left = MakeStrided(name.c_str(), "a", a, a_dims, a_strides);
    StridedTensor right = MakeStrided(name.c_str(), "b", b, b_dims, b_strides);
    StridedTensor result = MakeStrided(name.c_str(), "out", out, out_dims, out_strides);
    StridedTensor shift;
    if (bias.has_value()) {
      shift = MakeStrided(name.c_str(), "bias", *bias, (*bias).shape(), (*bias).strides());
    }
    const StridedTensor* shift_or_null = bias.has_value() ? &shift : nullptr;
    const amp_ir::Epilogue finish = amp_ir::ParseEpilogue(name.c_str(), epilogue);
    amp_ir::CheckMatmul(name.c_str(), left, right, shift_or_null, result);
    const torch::Place place(ApiFor(name, out.device()), out.device());
    torch::Matmul(place, left, right, shift_or_null, result, finish);
  }

  // out = beta * c + alpha * (a @ b); `c` is laid out as `out` is, and may be it. There is neither
  // a bias nor an epilogue.
  static void MatmulAccumulate(const ffi::TensorView& a, const ffi::TensorView& b,
                               const ffi::TensorView& c, const ffi::Optional<ffi::TensorView>& bias,
                               const ffi::Optional<ffi::TensorView>& alpha,
                               const ffi::Optional<ffi::TensorView>& beta, const ffi::Shape& a_dims,
                               const ffi::Shape& a_strides, const ffi::Shape& b_dims,
                               const ffi::Shape& b_strides, const ffi::Shape& out_dims,
                               const ffi::Shape& out_strides, const ffi::String& epilogue,
                               const ffi::TensorView& out) {
    const std::string name = Name("matmul_accumulate");
    const StridedTensor left = MakeStrided(name.c_str(), "a", a, a_dims, a_strides);
    const StridedTensor right = MakeStrided(name.c_str(), "b", b, b_dims, b_strides);
    const StridedTensor before = MakeStrided(name.c_str(), "c", c, out_dims, out_strides);
    const StridedTensor total = MakeStrided(name.c_str(), "out", out, out_dims, out_strides);
    amp_ir::CheckMatmul(name.c_str(), left, right, nullptr, total);
    bool is_full = total.rank == 2;
    for (const StridedTensor* one : {&left, &right, &before, &total}) {
      is_full = is_full && amp_ir::IsFloat(one->dtype, 32);
    }
    if (!is_full || bias.has_value() ||
        amp_ir::ParseEpilogue(name.c_str(), epilogue) != amp_ir::Epilogue::kNone) {
      TVM_FFI_THROW(ValueError) << name
                                << ": it adds the product of two float32 matrices to a "
                                   "third; expected no other rank or dtype, no bias and "
                                   "no epilogue (amp_ir.onednn.matmul_accumulate has them)";
    }
    const float* product = amp_ir::Factor(name.c_str(), "alpha", alpha);
    const float* kept = amp_ir::Factor(name.c_str(), "beta", beta);
    const torch::Place place(ApiFor(name, out.device()), out.device());
    torch::MatmulAccumulate(place, left, right, before, product, kept, total);
  }

  // y of x and w; or the gradient of x of that of y and w; or that of w of that of y and x.
  template <Of kOf>
  static void Convolve(const ffi::TensorView& a, const ffi::TensorView& b, const ffi::Shape& a_dims,
                       const ffi::Shape& a_strides, const ffi::Shape& b_dims,
                       const ffi::Shape& b_strides, const ffi::Shape& out_dims,
                       const ffi::Shape& out_strides, const ffi::Shape& strides,
                       const ffi::Shape& padding, const ffi::Shape& dilation, int64_t groups,
                       const ffi::TensorView& out) {
    const std::string name = Name(kConvolutionVerbs[static_cast<int>(kOf)]);
    // Weights, too: where PyTorch takes x for channels last, it expects the same of w.
    StridedTensor first =
        MakeImage(name.c_str(), kOf == Of::kResult ? "x" : "grad", a, a_dims, a_strides);
    StridedTensor second =
        MakeImage(name.c_str(), kOf == Of::kWeight ? "x" : "w", b, b_dims, b_strides);
    StridedTensor result = MakeImage(name.c_str(), "out", out, out_dims, out_strides);
    const Convolution convolution{strides, padding, dilation, groups};
    const StridedTensor& x = kOf == Of::kResult ? first : kOf == Of::kInput ? result : second;
    const StridedTensor& w = kOf == Of::kWeight ? result : second;
    const StridedTensor& y = kOf == Of::kResult ? result : first;
    amp_ir::CheckConvolution(name.c_str(), x, w, y, convolution);
    const torch::Place place(ApiFor(name, out.device()), out.device());
    if (kOf == Of::kResult) {
      torch::Convolve(place, x, w, y, convolution);
      return;
    }
    constexpr auto kWhich = kOf == Of::kInput ? torch::Gradient::kInput : torch::Gradient::kWeight;
    torch::ConvolveBackward(place, kWhich, first, second, result, convolution);
  }
};

// [n, h, s, d] seen in memory that is dense as [n, s, h, d]: how PyTorch's kernels write results.
StridedTensor RowsOutside(const char* function, const char* name, const ffi::TensorView& memory,
                          const StridedTensor& like) {
  const int64_t heads = like.dims[1], rows = like.dims[2], width = like.dims[3];
  const int64_t strides[] = {rows * heads * width, width, heads * width, 1};
  return MakeStrided(function, name, memory, ffi::ShapeView(like.dims.data(), 4),
                     ffi::ShapeView(strides, 4));
}

void CheckAttention(const char* function, const StridedTensor& q, const StridedTensor& k,
                    const StridedTensor& v, bool is_causal, bool is_cuda) {
  bool fits = q.rank == 4 && k.rank == 4 && v.rank == 4 && SameDtype(q.dtype, k.dtype) &&
              SameDtype(q.dtype, v.dtype) && (q.dtype.bits == 16 || !is_cuda);
  for (int i : {0, 1, 3}) {
    fits = fits && k.dims[i] == q.dims[i] && v.dims[i] == q.dims[i];
  }
  fits = fits && v.dims[2] == k.dims[2] && k.dims[2] > 0 &&
         (!is_cuda || (q.dims[3] % 8 == 0 && q.dims[3] <= 256));
  fits = fits && (!is_causal || q.dims[2] == k.dims[2]);
  for (const StridedTensor* t : {&q, &k, &v}) fits = fits && t->strides[t->rank - 1] == 1;
  if (!fits) {
    TVM_FFI_THROW(ValueError) << function << ": q " << amp_ir::DimsToString(q) << ", k "
                              << amp_ir::DimsToString(k) << ", v " << amp_ir::DimsToString(v)
                              << (is_causal ? ", causal" : "") << "; expected "
                              << (is_cuda ? "bfloat16 or float16 [n, h, s, d], [n, h, t, d] twice, "
                                            "dense along d, a multiple of 8 up to 256, and s = t "
                                            "if causal"
                                          : "[n, h, s, d], [n, h, t, d] twice in one dtype, dense "
                                            "along d, and s = t if causal");
  }
}

// out: dense as [n, s, h, d]; lse: dense f32[n, h, s].
template <class Kind>
void Attention(const ffi::TensorView& q, const ffi::TensorView& k, const ffi::TensorView& v,
               const ffi::Shape& q_dims, const ffi::Shape& q_strides, const ffi::Shape& k_dims,
               const ffi::Shape& k_strides, const ffi::Shape& v_dims, const ffi::Shape& v_strides,
               bool is_causal, double scale, const ffi::TensorView& out,
               const ffi::TensorView& lse) {
  const std::string name = Functions<Kind>::Name("attention");
  const char* function = name.c_str();
  StridedTensor query = MakeStrided(function, "q", q, q_dims, q_strides);
  StridedTensor key = MakeStrided(function, "k", k, k_dims, k_strides);
  StridedTensor value = MakeStrided(function, "v", v, v_dims, v_strides);
  CheckAttention(function, query, key, value, is_causal, std::is_same_v<Kind, Cuda>);
  const int64_t heads = query.dims[1], rows = query.dims[2];
  const int64_t sums[] = {query.dims[0], heads, rows}, strides[] = {heads * rows, rows, 1};
  const torch::Place place(Functions<Kind>::ApiFor(name, out.device()), out.device());
  torch::Attend(
      place, query, key, value, {is_causal, scale}, RowsOutside(function, "out", out, query),
      MakeStrided(function, "lse", lse, ffi::ShapeView(sums, 3), ffi::ShapeView(strides, 3)));
}

// grad and out are seen as [n, h, s, d]; lse is dense f32[n, h, s]; the gradients are dense as
// [n, s, h, d] and [n, t, h, d].
template <class Kind>
void AttentionBackward(const ffi::TensorView& grad, const ffi::TensorView& q,
                       const ffi::TensorView& k, const ffi::TensorView& v,
                       const ffi::TensorView& out, const ffi::TensorView& lse,
                       const ffi::Shape& grad_dims, const ffi::Shape& grad_strides,
                       const ffi::Shape& q_dims, const ffi::Shape& q_strides,
                       const ffi::Shape& k_dims, const ffi::Shape& k_strides,
                       const ffi::Shape& v_dims, const ffi::Shape& v_strides,
                       const ffi::Shape& out_dims, const ffi::Shape& out_strides, bool is_causal,
                       double scale, const ffi::TensorView& grad_q, const ffi::TensorView& grad_k,
                       const ffi::TensorView& grad_v) {
  const std::string name = Functions<Kind>::Name("attention_backward");
  const char* function = name.c_str();
  StridedTensor query = MakeStrided(function, "q", q, q_dims, q_strides);
  StridedTensor key = MakeStrided(function, "k", k, k_dims, k_strides);
  StridedTensor value = MakeStrided(function, "v", v, v_dims, v_strides);
  CheckAttention(function, query, key, value, is_causal, std::is_same_v<Kind, Cuda>);
  StridedTensor gradient = MakeStrided(function, "grad", grad, grad_dims, grad_strides);
  StridedTensor result = MakeStrided(function, "out", out, out_dims, out_strides);
  const int64_t heads = query.dims[1], rows = query.dims[2];
  const int64_t sums[] = {query.dims[0], heads, rows}, strides[] = {heads * rows, rows, 1};
  StridedTensor logs =
      MakeStrided(function, "lse", lse, ffi::ShapeView(sums, 3), ffi::ShapeView(strides, 3));
  StridedTensor of_q = RowsOutside(function, "grad_q", grad_q, query);
  StridedTensor of_k = RowsOutside(function, "grad_k", grad_k, key);
  StridedTensor of_v = RowsOutside(function, "grad_v", grad_v, value);
  const torch::Place place(Functions<Kind>::ApiFor(name, grad_q.device()), grad_q.device());
  torch::AttendBackward(place, gradient, query, key, value, result, logs, {is_causal, scale},
                        {of_q, of_k, of_v});
}

void RegisterCpu() {
  const torch::Api* api = torch::CpuApi();
  if (api == nullptr) return;
  tvm::ffi::reflection::GlobalDef functions;
  functions.def("amp_ir.torch.set_fast_bfloat16", torch::SetFastBfloat16)
      .def_packed("amp_ir.torch.scratch_nbytes", amp_ir::WorkspaceNbytes)
      .def_packed("amp_ir.torch.kept_nbytes", amp_ir::PersistentNbytes)
      .def_packed("amp_ir.torch.with_scratch", amp_ir::CallWithWorkspace);
  if (api->mm != nullptr && api->bmm != nullptr) {
    functions.def("amp_ir.torch.matmul", Counted<Functions<Cpu>::Matmul>::Call);
  }
  if (api->addmm != nullptr) {
    functions.def("amp_ir.torch.matmul_accumulate",
                  Counted<Functions<Cpu>::MatmulAccumulate>::Call);
  }
  if (api->conv != nullptr) {
    functions.def("amp_ir.torch.conv", Counted<Functions<Cpu>::Convolve<Of::kResult>>::Call);
  }
  if (api->conv_backward != nullptr) {
    functions.def("amp_ir.torch.conv_backward_input",
                  Counted<Functions<Cpu>::Convolve<Of::kInput>>::Call);
    functions.def("amp_ir.torch.conv_backward_weight",
                  Counted<Functions<Cpu>::Convolve<Of::kWeight>>::Call);
  }
  if (api->cpu_attention != nullptr && api->cpu_attention_backward != nullptr) {
    functions.def("amp_ir.torch.attention", Counted<Attention<Cpu>>::Call);
    functions.def("amp_ir.torch.attention_backward", Counted<AttentionBackward<Cpu>>::Call);
  }
}

void RegisterCuda() {
  tvm::ffi::reflection::GlobalDef()
      .def("amp_ir.torch_cuda.matmul", Counted<Functions<Cuda>::Matmul>::Call)
      .def("amp_ir.torch_cuda.conv", Counted<Functions<Cuda>::Convolve<Of::kResult>>::Call)
      .def("amp_ir.torch_cuda.conv_backward_input",
           Counted<Functions<Cuda>::Convolve<Of::kInput>>::Call)
      .def("amp_ir.torch_cuda.conv_backward_weight",
           Counted<Functions<Cuda>::Convolve<Of::kWeight>>::Call)
      .def("amp_ir.torch_cuda.attention", Counted<Attention<Cuda>>::Call)
      .def("amp_ir.torch_cuda.attention_backward", Counted<AttentionBackward<Cuda>>::Call)
      .def("amp_ir.torch_cuda.use", [](const ffi::String& path) { torch::UseCuda(path); });
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  RegisterCpu();
  RegisterCuda();
}
