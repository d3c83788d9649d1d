// SPDX-License-Identifier: Apache-2.0
// PyTorch's C interface, declared here so that no build needs PyTorch's headers.
//
// The aoti_torch_* functions are plain C over opaque handles and keep their binary interface
// between releases (torch/csrc/inductor/aoti_torch/c/shim.h says so). They are looked up in the
// libraries that `import torch` has loaded. Source of the declarations: that header, and
// generated/c_shim_{cpu,cuda}.h beside it; the same in PyTorch 2.11, 2.12 and 2.13.
#ifndef AMP_IR_KERNELS_TORCH_API_H_
#define AMP_IR_KERNELS_TORCH_API_H_

#include <cstdint>
#include <string>

namespace amp_ir::torch {

using Handle = void*;   // AtenTensorHandle
using Error = int32_t;  // AOTITorchError; 0 is success
using Dims = const int64_t*;

// Those of the kernels for one kind of device; null where this PyTorch lacks one.
struct Api {
  Error (*from_blob)(void*, int64_t, Dims, Dims, int64_t, int32_t, int32_t, int32_t, Handle*);
  Error (*empty_strided)(int64_t, Dims, Dims, int32_t, int32_t, int32_t, Handle*);
  Error (*undefined)(Handle*);
  Error (*data_ptr)(Handle, void**);
  Error (*destroy)(Handle);
  Error (*copy)(Handle to, Handle from, int32_t non_blocking);
  int32_t (*float32)();
  int32_t (*float16)();
  int32_t (*bfloat16)();
  const char* (*what)();  // the last error's text; absent before torch 2.13

  Error (*mm)(Handle out, Handle, Handle);
  Error (*bmm)(Handle out, Handle, Handle);
  // CPU only. out = beta * to + alpha * (a @ b); a null function where PyTorch lacks it.
  Error (*addmm)(Handle out, Handle to, Handle a, Handle b, double beta, double alpha);
  // (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
  Error (*conv)(Handle, Handle, Handle*, Dims, int64_t, Dims, int64_t, Dims, int64_t, int32_t, Dims,
                int64_t, int64_t, Handle*);
  // (grad_output, input, weight, bias_sizes, the options as above, output_mask)
  Error (*conv_backward)(Handle, Handle, Handle, Dims*, int64_t, Dims, int64_t, Dims, int64_t, Dims,
                         int64_t, int32_t, Dims, int64_t, int64_t, const int32_t*, int64_t, Handle*,
                         Handle*, Handle*);

  // CPU only. (query, key, value, dropout_p, is_causal, mask, scale) -> (output, logsumexp)
  Error (*cpu_attention)(Handle, Handle, Handle, double, int32_t, Handle*, double*, Handle*,
                         Handle*);
  // (grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, mask, scale) ->
  // (grad_query, grad_key, grad_value)
  Error (*cpu_attention_backward)(Handle, Handle, Handle, Handle, Handle, Handle, double, int32_t,
                                  Handle*, double*, Handle*, Handle*, Handle*);
  // CUDA only. (query, key, value, dropout_p, is_causal, return_debug_mask, scale) -> (output,
  // logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused, debug_attn_mask)
  Error (*attention)(Handle, Handle, Handle, double, int32_t, int32_t, double*, Handle*, Handle*,
                     Handle*, Handle*, int64_t*, int64_t*, Handle*, Handle*, Handle*);
  // (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
  // is_causal, philox_seed, philox_offset, scale) -> (grad_query, grad_key, grad_value)
  Error (*attention_backward)(Handle, Handle, Handle, Handle, Handle, Handle, Handle, Handle,
                              int64_t, int64_t, double, int32_t, Handle, Handle, double*, Handle*,
                              Handle*, Handle*);
  Error (*create_stream_guard)(void* stream, int32_t device_index, void** guard);
  Error (*delete_stream_guard)(void* guard);

  int32_t device_type;
  bool is_cuda;
  // Of a stand-in for tests only: "CUDA" tensors are in this process's own memory.
  bool is_on_host;
};

// The functions for the CPU; null where libtorch_cpu is not loaded or lacks what all calls need.
const Api* CpuApi();

// Those for CUDA, found at the first call.
//
// Raises: RuntimeError where this PyTorch has none; they are looked for again at the next call.
const Api& CudaApi();

// Takes the CUDA functions from the library at `path` from now on; "" for PyTorch's own.
void UseCuda(const std::string& path);

// Raises: RuntimeError with PyTorch's own words unless `error` is 0.
void Check(const Api& api, Error error, const char* what);

}  // namespace amp_ir::torch

#endif  // AMP_IR_KERNELS_TORCH_API_H_
