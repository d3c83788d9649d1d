// SPDX-License-Identifier: Apache-2.0
#include "torch/api.h"

#include <dlfcn.h>
#include <tvm/ffi/tvm_ffi.h>

#include <memory>
#include <mutex>

namespace amp_ir::torch {
namespace {

template <class Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// Python loads PyTorch's libraries with local visibility, so the process-wide table does not have
// their functions; RTLD_NOLOAD finds the copy that is loaded and never loads another.
void* Loaded(const char* name) { return dlopen(name, RTLD_LAZY | RTLD_NOLOAD); }

// What every call needs; all of it is in libtorch_cpu, for any kind of device.
bool FindTensorFunctions(void* lib, Api* api) {
  Find(lib, "torch_exception_get_what_without_backtrace", &api->what);
  return Find(lib, "aoti_torch_create_tensor_from_blob", &api->from_blob) &&
         Find(lib, "aoti_torch_empty_strided", &api->empty_strided) &&
         Find(lib, "aoti_torch_new_uninitialized_tensor", &api->undefined) &&
         Find(lib, "aoti_torch_get_data_ptr", &api->data_ptr) &&
         Find(lib, "aoti_torch_delete_tensor_object", &api->destroy) &&
         Find(lib, "aoti_torch_copy_", &api->copy) &&
         Find(lib, "aoti_torch_dtype_float32", &api->float32) &&
         Find(lib, "aoti_torch_dtype_float16", &api->float16) &&
         Find(lib, "aoti_torch_dtype_bfloat16", &api->bfloat16);
}

bool FindDeviceType(void* lib, const char* name, Api* api) {
  int32_t (*device_type)() = nullptr;
  if (!Find(lib, name, &device_type)) return false;
  api->device_type = device_type();
  return true;
}

std::unique_ptr<Api> FindCpu() {
  auto api = std::make_unique<Api>();
  void* lib = Loaded("libtorch_cpu.so");
  if (lib == nullptr || !FindTensorFunctions(lib, api.get()) ||
      !FindDeviceType(lib, "aoti_torch_device_type_cpu", api.get())) {
    return nullptr;
  }
  Find(lib, "aoti_torch_cpu_mm_out", &api->mm);
  Find(lib, "aoti_torch_cpu_bmm_out", &api->bmm);
  Find(lib, "aoti_torch_cpu_addmm_out", &api->addmm);
  Find(lib, "aoti_torch_cpu_convolution", &api->conv);
  Find(lib, "aoti_torch_cpu_convolution_backward", &api->conv_backward);
  Find(lib, "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu", &api->cpu_attention);
  Find(lib, "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward",
       &api->cpu_attention_backward);
  return api;
}

bool FindCudaFunctions(void* lib, Api* api) {
  return Find(lib, "aoti_torch_cuda_mm_out", &api->mm) &&
         Find(lib, "aoti_torch_cuda_bmm_out", &api->bmm) &&
         Find(lib, "aoti_torch_cuda_convolution", &api->conv) &&
         Find(lib, "aoti_torch_cuda_convolution_backward", &api->conv_backward) &&
         Find(lib, "aoti_torch_cuda__scaled_dot_product_flash_attention", &api->attention) &&
         Find(lib, "aoti_torch_cuda__scaled_dot_product_flash_attention_backward",
              &api->attention_backward) &&
         Find(lib, "aoti_torch_create_cuda_stream_guard", &api->create_stream_guard) &&
         Find(lib, "aoti_torch_delete_cuda_stream_guard", &api->delete_stream_guard);
}

std::unique_ptr<Api> FindCuda(const std::string& path, std::string* why) {
  auto api = std::make_unique<Api>();
  void* general = Loaded("libtorch_cpu.so");
  void* lib = path.empty() ? Loaded("libtorch_cuda.so") : dlopen(path.c_str(), RTLD_LAZY);
  if (general == nullptr || lib == nullptr) {
    *why = "it is a build without CUDA, or `import torch` has not run";
    return nullptr;
  }
  api->is_cuda = true;
  api->is_on_host = dlsym(lib, "amp_ir_torch_cuda_is_on_host") != nullptr;
  const char* device =
      api->is_on_host ? "aoti_torch_device_type_cpu" : "aoti_torch_device_type_cuda";
  if (!FindTensorFunctions(general, api.get()) || !FindDeviceType(general, device, api.get()) ||
      !FindCudaFunctions(lib, api.get())) {
    *why = "its C interface (aoti_torch_cuda_*) lacks a function of PyTorch 2.11";
    return nullptr;
  }
  return api;
}

struct CudaState {
  std::mutex mutex;
  std::string path;
  const Api* api = nullptr;  // never freed: other threads may be inside of a call
};

CudaState& TheCudaState() {
  static CudaState* state = new CudaState;
  return *state;
}

}  // namespace

const Api* CpuApi() {
  static const Api* api = FindCpu().release();
  return api;
}

const Api& CudaApi() {
  CudaState& state = TheCudaState();
  std::lock_guard<std::mutex> lock(state.mutex);
  std::string why;
  if (state.api == nullptr) state.api = FindCuda(state.path, &why).release();
  if (state.api == nullptr) {
    TVM_FFI_THROW(RuntimeError)
        << "PyTorch's CUDA kernels, which convolutions and attention of a CUDA step call, are not "
           "in this PyTorch: "
        << why << "; install a CUDA build of PyTorch 2.11 or newer (pytorch.org)";
  }
  return *state.api;
}

void UseCuda(const std::string& path) {
  CudaState& state = TheCudaState();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.path = path;
  state.api = nullptr;
}

void Check(const Api& api, Error error, const char* what) {
  if (error == 0) return;
  // Before 2.13 its functions write the reason to the standard error, and give only a number.
  TVM_FFI_THROW(RuntimeError) << "PyTorch's " << what << " failed: "
                              << (api.what != nullptr ? api.what()
                                                      : "it says why on the standard error");
}

}  // namespace amp_ir::torch
