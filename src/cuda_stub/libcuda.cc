// SPDX-License-Identifier: Apache-2.0
// Stands in for an NVIDIA driver's libcuda.so.1 on a machine that has none, so that TVM's CUDA
// runtime can be loaded there to build modules. Holds what that library refers to and nothing else:
// without cuInit, anybody else who looks for a driver finds that this is none.

namespace {
constexpr int kNoDevice = 100;  // CUDA_ERROR_NO_DEVICE
}

#define AMP_IR_NO_DEVICE(name) \
  extern "C" __attribute__((visibility("default"))) int name() { return kNoDevice; }

AMP_IR_NO_DEVICE(cuDeviceGetName)
AMP_IR_NO_DEVICE(cuFuncSetAttribute)
AMP_IR_NO_DEVICE(cuLaunchKernelEx)
AMP_IR_NO_DEVICE(cuModuleGetFunction)
AMP_IR_NO_DEVICE(cuModuleLoadData)
AMP_IR_NO_DEVICE(cuModuleUnload)
AMP_IR_NO_DEVICE(cuTensorMapEncodeTiled)

// Callers print the text that they ask for without looking at the status.
extern "C" __attribute__((visibility("default"))) int cuGetErrorName(int, const char** text) {
  *text = "CUDA_ERROR_NO_DEVICE";
  return 0;
}

extern "C" __attribute__((visibility("default"))) int cuGetErrorString(int, const char** text) {
  *text = "this machine has no NVIDIA driver";
  return 0;
}
