// SPDX-License-Identifier: Apache-2.0
// libcuda.so.1 of the emulator: modules are shared libraries of kernels compiled for the CPU.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "emulator.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator {
namespace {

constexpr char kImageMark[] = "emulated:";
long counters[kCounters];
bool is_capturing;
std::vector<Work> captured;

struct LaunchConfiguration {  // CUlaunchConfig
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_nbytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};

// A kernel's arguments by value: a captured launch runs when the caller's are gone.
std::vector<std::vector<char>> CopyArguments(const EmulatedKernel& kernel, void** arguments) {
  // A kernel has 32764 bytes of arguments at most, which are pointers.
  int nbytes[32764 / sizeof(void*) + 1];
  int count = kernel.sizes(nbytes);
  std::vector<std::vector<char>> copies;
  for (int k = 0; k < count; ++k) {
    const char* value = static_cast<const char*>(arguments[k]);
    copies.emplace_back(value, value + nbytes[k]);
  }
  return copies;
}

}  // namespace

void Count(Counter counter) { ++counters[counter]; }
bool IsCapturing() { return is_capturing; }

int Enqueue(Work work) {
  if (!is_capturing) return work();
  captured.push_back(std::move(work));
  return kSuccess;
}

int BeginCapture() {
  if (is_capturing) return kNotWhileCapturing;
  is_capturing = true;
  captured.clear();
  return kSuccess;
}

int EndCapture(void** graph) {
  if (!is_capturing) return kInvalidValue;
  is_capturing = false;
  *graph = new std::vector<Work>(std::move(captured));
  return kSuccess;
}

}  // namespace emulator

using namespace emulator;

EXPORT int cuInit(unsigned) { return kSuccess; }
EXPORT int cuDeviceGetCount(int* count) {
  *count = 1;
  return kSuccess;
}
EXPORT int cuDeviceGetName(char* name, int nbytes, int) {
  snprintf(name, nbytes, "emulated GPU");
  return kSuccess;
}
EXPORT int cuGetErrorName(int, const char** text) {
  *text = LastError();
  return kSuccess;
}
EXPORT int cuGetErrorString(int, const char** text) {
  *text = LastError();
  return kSuccess;
}
EXPORT int cuFuncSetAttribute(void*, int, int) { return kSuccess; }
EXPORT int cuTensorMapEncodeTiled() { return kInvalidValue; }

EXPORT int cuModuleLoadData(void** module, const void* image) {
  const char* text = static_cast<const char*>(image);
  if (strncmp(text, kImageMark, strlen(kImageMark)) != 0) {
    SetLastError("the module was not compiled for the emulator");
    return kInvalidValue;
  }
  if (IsCapturing()) {
    SetLastError("a module is loaded while a stream is captured");
    return kNotWhileCapturing;
  }
  *module = dlopen(text + strlen(kImageMark), RTLD_NOW | RTLD_LOCAL);
  if (*module == nullptr) SetLastError("%s", dlerror());
  return *module == nullptr ? kNotFound : kSuccess;
}

// Kernels stay: a graph may still launch them.
EXPORT int cuModuleUnload(void*) { return kSuccess; }

EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = dlsym(module, (std::string("emulated_") + name).c_str());
  if (*function == nullptr) SetLastError("the module has no kernel %s", name);
  return *function == nullptr ? kNotFound : kSuccess;
}

EXPORT int cuLaunchKernelEx(const LaunchConfiguration* configuration, void* function,
                            void** arguments, void**) {
  const auto& c = *configuration;
  Launch launch{static_cast<const EmulatedKernel*>(function),
                {c.grid_x, c.grid_y, c.grid_z},
                {c.block_x, c.block_y, c.block_z},
                c.shared_nbytes};
  if (!IsCapturing()) {
    Count(kLaunches);
    return Run(launch, arguments);
  }
  auto copies = CopyArguments(*launch.kernel, arguments);
  return Enqueue([launch, copies]() mutable {
    std::vector<void*> pointers;
    for (auto& value : copies) pointers.push_back(value.data());
    Count(kLaunches);
    return Run(launch, pointers.data());
  });
}

// For process.py

EXPORT void emulator_counters(long* values) {
  memcpy(values, counters, sizeof(counters));
  memset(counters, 0, sizeof(counters));
}
EXPORT const char* emulator_last_error() { return LastError(); }
EXPORT size_t emulator_peak_nbytes() { return PeakNbytes(); }
// A library's work on the host, in the order of the stream: at once, or at each launch of the graph
// that is being captured.
EXPORT int emulator_enqueue(int (*work)(void*), void* data) {
  return Enqueue([work, data] { return work(data); });
}
