// SPDX-License-Identifier: Apache-2.0
// A stand-in for the part of libtorch_cuda that amp_ir calls, which computes on the CPU.
//
// It defines aoti_torch_cuda_* by PyTorch's own CPU kernels. Compiled against PyTorch's headers, a
// function whose declaration there differs is an error; static_asserts compare the declarations of
// src/kernels/torch_api.h with the same headers.
//
// Build:  fake_torch_cuda.build(directory) -> path
// Load:   `with fake_torch_cuda.installed(path) as fake:`, or
//         native.function("amp_ir.torch_cuda.use")(path)
//
// Convolutions and attention of low dtypes are computed in float32 and rounded once, as cuDNN does.
// PyTorch's own CPU kernels for these dtypes round between samples or groups, and elsewhere on
// each kind of CPU.
//
// Not imitated: streams (the last one is recorded), PyTorch's CUDA allocator, cuDNN's choices,
// flash attention's order of summation.
#define USE_CUDA
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include <stdexcept>
#include <type_traits>
#include <utility>

#include "torch/api.h"

namespace {

using amp_ir::torch::Api;

// Handles and enumerations have other names here and there; their sizes, and pointer or number,
// say as much as the C interface does.
template <class T>
constexpr int kKind = static_cast<int>(sizeof(T)) * 4 + (std::is_pointer_v<T> ? 2 : 0) +
                      (std::is_floating_point_v<T> ? 1 : 0);

template <class Function>
struct Signature;
template <class R, class... Args>
struct Signature<R (*)(Args...)> {
  using Type = std::integer_sequence<int, kKind<R>, kKind<Args>...>;
};

#define SAME(field, function)                                                                      \
  static_assert(                                                                                   \
      std::is_same_v<Signature<decltype(Api::field)>::Type, Signature<decltype(&function)>::Type>, \
      #function " is not declared as in PyTorch's headers")

SAME(from_blob, aoti_torch_create_tensor_from_blob);
SAME(empty_strided, aoti_torch_empty_strided);
SAME(undefined, aoti_torch_new_uninitialized_tensor);
SAME(data_ptr, aoti_torch_get_data_ptr);
SAME(destroy, aoti_torch_delete_tensor_object);
SAME(copy, aoti_torch_copy_);
SAME(float32, aoti_torch_dtype_float32);
SAME(mm, aoti_torch_cpu_mm_out);
SAME(mm, aoti_torch_cuda_mm_out);
SAME(bmm, aoti_torch_cuda_bmm_out);
SAME(conv, aoti_torch_cpu_convolution);
SAME(conv, aoti_torch_cuda_convolution);
SAME(conv_backward, aoti_torch_cpu_convolution_backward);
SAME(conv_backward, aoti_torch_cuda_convolution_backward);
SAME(attention, aoti_torch_cuda__scaled_dot_product_flash_attention);
SAME(attention_backward, aoti_torch_cuda__scaled_dot_product_flash_attention_backward);
SAME(create_stream_guard, aoti_torch_create_cuda_stream_guard);
SAME(delete_stream_guard, aoti_torch_delete_cuda_stream_guard);

void* last_stream = nullptr;
int32_t last_device = -1;
int64_t open_guards = 0, calls = 0, calls_without_guard = 0;

template <class Function>
Function* OnCpu(const char* name) {
  static void* lib = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  ++calls;
  if (open_guards == 0) ++calls_without_guard;
  return reinterpret_cast<Function*>(dlsym(lib, name));
}

#define ON_CPU(name) OnCpu<decltype(name)>(#name)

void Check(AOTITorchError error) {
  if (error != 0) throw std::runtime_error("a call of PyTorch's C interface failed");
}

int32_t DtypeOf(AtenTensorHandle tensor) {
  int32_t dtype = 0;
  Check(ON_CPU(aoti_torch_get_dtype)(tensor, &dtype));
  return dtype;
}

// A copy of `tensor` in another dtype, with its strides where these are dense.
AtenTensorHandle Converted(AtenTensorHandle tensor, int32_t dtype) {
  int64_t rank = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  Check(ON_CPU(aoti_torch_get_dim)(tensor, &rank));
  Check(ON_CPU(aoti_torch_get_sizes)(tensor, &sizes));
  Check(ON_CPU(aoti_torch_get_strides)(tensor, &strides));
  AtenTensorHandle copy = nullptr;
  Check(ON_CPU(aoti_torch_empty_strided)(rank, sizes, strides, dtype,
                                         ON_CPU(aoti_torch_device_type_cpu)(), 0, &copy));
  Check(ON_CPU(aoti_torch_copy_)(copy, tensor, 0));
  return copy;
}

// An operand in float32: itself, or a copy that lives as long as this.
class Wide {
 public:
  explicit Wide(AtenTensorHandle tensor) : tensor_(tensor) {
    const int32_t full = ON_CPU(aoti_torch_dtype_float32)();
    if (DtypeOf(tensor) != full) copy_ = Converted(tensor, full);
  }
  ~Wide() {
    if (copy_ != nullptr) ON_CPU(aoti_torch_delete_tensor_object)(copy_);
  }
  Wide(const Wide&) = delete;
  Wide& operator=(const Wide&) = delete;
  AtenTensorHandle get() const { return copy_ != nullptr ? copy_ : tensor_; }

 private:
  AtenTensorHandle tensor_;
  AtenTensorHandle copy_ = nullptr;
};

// Rounds a result of float32 to the dtype of `like`.
void Round(AtenTensorHandle* result, AtenTensorHandle like) {
  const int32_t dtype = DtypeOf(like);
  if (DtypeOf(*result) == dtype) return;
  AtenTensorHandle full = *result;
  *result = Converted(full, dtype);
  ON_CPU(aoti_torch_delete_tensor_object)(full);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int amp_ir_torch_cuda_is_on_host() { return 1; }

// state: the stream and the device of the last guard, guards open now, calls, and those of them
// outside of any guard.
EXPORT void amp_ir_fake_state(int64_t state[5]) {
  state[0] = reinterpret_cast<int64_t>(last_stream);
  state[1] = last_device;
  state[2] = open_guards;
  state[3] = calls;
  state[4] = calls_without_guard;
}

EXPORT AOTITorchError aoti_torch_create_cuda_stream_guard(void* stream, int32_t device_index,
                                                          CUDAStreamGuardHandle* guard) {
  last_stream = stream;
  last_device = device_index;
  ++open_guards;
  *guard = reinterpret_cast<CUDAStreamGuardHandle>(&open_guards);
  return 0;
}

EXPORT AOTITorchError aoti_torch_delete_cuda_stream_guard(CUDAStreamGuardHandle) {
  --open_guards;
  return 0;
}

EXPORT AOTITorchError aoti_torch_cuda_mm_out(AtenTensorHandle out, AtenTensorHandle self,
                                             AtenTensorHandle mat2) {
  return ON_CPU(aoti_torch_cpu_mm_out)(out, self, mat2);
}

EXPORT AOTITorchError aoti_torch_cuda_bmm_out(AtenTensorHandle out, AtenTensorHandle self,
                                              AtenTensorHandle mat2) {
  return ON_CPU(aoti_torch_cpu_bmm_out)(out, self, mat2);
}

EXPORT AOTITorchError aoti_torch_cuda_convolution(
    AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, const int64_t* stride,
    int64_t stride_len, const int64_t* padding, int64_t padding_len, const int64_t* dilation,
    int64_t dilation_len, int32_t transposed, const int64_t* output_padding,
    int64_t output_padding_len, int64_t groups, AtenTensorHandle* result) {
  Wide x(input), w(weight);
  const AOTITorchError error = ON_CPU(aoti_torch_cpu_convolution)(
      x.get(), w.get(), bias, stride, stride_len, padding, padding_len, dilation, dilation_len,
      transposed, output_padding, output_padding_len, groups, result);
  if (error == 0) Round(result, input);
  return error;
}

EXPORT AOTITorchError aoti_torch_cuda_convolution_backward(
    AtenTensorHandle grad_output, AtenTensorHandle input, AtenTensorHandle weight,
    const int64_t** bias_sizes, int64_t bias_sizes_len, const int64_t* stride, int64_t stride_len,
    const int64_t* padding, int64_t padding_len, const int64_t* dilation, int64_t dilation_len,
    int32_t transposed, const int64_t* output_padding, int64_t output_padding_len, int64_t groups,
    const int32_t* output_mask, int64_t output_mask_len, AtenTensorHandle* of_input,
    AtenTensorHandle* of_weight, AtenTensorHandle* of_bias) {
  Wide dy(grad_output), x(input), w(weight);
  const AOTITorchError error = ON_CPU(aoti_torch_cpu_convolution_backward)(
      dy.get(), x.get(), w.get(), bias_sizes, bias_sizes_len, stride, stride_len, padding,
      padding_len, dilation, dilation_len, transposed, output_padding, output_padding_len, groups,
      output_mask, output_mask_len, of_input, of_weight, of_bias);
  if (error == 0 && output_mask[0] != 0) Round(of_input, input);
  if (error == 0 && output_mask[1] != 0) Round(of_weight, weight);
  return error;
}

EXPORT AOTITorchError aoti_torch_cuda__scaled_dot_product_flash_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, double dropout_p,
    int32_t is_causal, int32_t return_debug_mask, double* scale, AtenTensorHandle* out,
    AtenTensorHandle* logsumexp, AtenTensorHandle* cum_seq_q, AtenTensorHandle* cum_seq_k,
    int64_t* max_q, int64_t* max_k, AtenTensorHandle* rng_state, AtenTensorHandle* unused,
    AtenTensorHandle* debug_attn_mask) {
  if (dropout_p != 0 || return_debug_mask != 0) return 1;
  // As the real one, which gives undefined tensors for what does not apply.
  for (AtenTensorHandle* none : {cum_seq_q, cum_seq_k, rng_state, unused, debug_attn_mask}) {
    if (const AOTITorchError error = ON_CPU(aoti_torch_new_uninitialized_tensor)(none))
      return error;
  }
  *max_q = *max_k = 0;
  Wide q(query), k(key), v(value);
  const AOTITorchError error = ON_CPU(aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu)(
      q.get(), k.get(), v.get(), dropout_p, is_causal, nullptr, scale, out, logsumexp);
  if (error == 0) Round(out, query);
  return error;
}

EXPORT AOTITorchError aoti_torch_cuda__scaled_dot_product_flash_attention_backward(
    AtenTensorHandle grad_out, AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
    AtenTensorHandle out, AtenTensorHandle logsumexp, AtenTensorHandle cum_seq_q,
    AtenTensorHandle cum_seq_k, int64_t max_q, int64_t max_k, double dropout_p, int32_t is_causal,
    AtenTensorHandle philox_seed, AtenTensorHandle philox_offset, double* scale,
    AtenTensorHandle* of_q, AtenTensorHandle* of_k, AtenTensorHandle* of_v) {
  for (AtenTensorHandle none : {cum_seq_q, cum_seq_k, philox_seed, philox_offset}) {
    bool is_defined = true;
    ON_CPU(aoti_torch_is_defined)(none, &is_defined);
    if (is_defined) return 1;
  }
  int64_t rows = 0, columns = 0;
  ON_CPU(aoti_torch_get_size)(query, 2, &rows);
  ON_CPU(aoti_torch_get_size)(key, 2, &columns);
  if (dropout_p != 0 || max_q != rows || max_k != columns) return 1;
  Wide dy(grad_out), q(query), k(key), v(value), y(out);
  const AOTITorchError error =
      ON_CPU(aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward)(
          dy.get(), q.get(), k.get(), v.get(), y.get(), logsumexp, dropout_p, is_causal, nullptr,
          scale, of_q, of_k, of_v);
  for (AtenTensorHandle* result : {of_q, of_k, of_v}) {
    if (error == 0) Round(result, query);
  }
  return error;
}
