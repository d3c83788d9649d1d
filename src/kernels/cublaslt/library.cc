// SPDX-License-Identifier: Apache-2.0
// Finding and loading cuBLASLt when it is first needed.
#include <dlfcn.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cublaslt/api.h"

namespace amp_ir::cublaslt {
namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr const char* kVariable = "AMP_IR_CUBLASLT";

template <class Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

bool FindFunctions(void* lib, Api* api) {
  api->is_on_host = dlsym(lib, "amp_ir_cublaslt_is_on_host") != nullptr;
  return Find(lib, "cublasLtGetVersion", &api->version) &&
         Find(lib, "cublasLtGetStatusString", &api->status_string) &&
         Find(lib, "cublasLtCreate", &api->create) &&
         Find(lib, "cublasLtMatmulDescCreate", &api->desc_create) &&
         Find(lib, "cublasLtMatmulDescDestroy", &api->desc_destroy) &&
         Find(lib, "cublasLtMatmulDescSetAttribute", &api->desc_set) &&
         Find(lib, "cublasLtMatrixLayoutCreate", &api->layout_create) &&
         Find(lib, "cublasLtMatrixLayoutDestroy", &api->layout_destroy) &&
         Find(lib, "cublasLtMatrixLayoutSetAttribute", &api->layout_set) &&
         Find(lib, "cublasLtMatmulPreferenceCreate", &api->preference_create) &&
         Find(lib, "cublasLtMatmulPreferenceDestroy", &api->preference_destroy) &&
         Find(lib, "cublasLtMatmulPreferenceSetAttribute", &api->preference_set) &&
         Find(lib, "cublasLtMatmulAlgoGetHeuristic", &api->heuristic) &&
         Find(lib, "cublasLtMatmul", &api->matmul);
}

struct State {
  std::mutex mutex;
  std::string chosen;
  std::vector<std::string> more_paths;
  // An Api is never freed and its library never closed: plans of other threads may still point to
  // them.
  const Api* api = nullptr;
  std::map<std::pair<const Api*, int32_t>, Handle> handles;
};

State& TheState() {
  static State* state = new State;
  return *state;
}

// The library at `path`, or null with a line about why not added to `tried`.
const Api* Load(const std::string& path, int flags, std::string* tried) {
  void* lib = dlopen(path.c_str(), flags);
  if (lib == nullptr) {
    // For a copy that would have to be loaded already there is nothing to tell.
    const char* why = dlerror();
    if ((flags & RTLD_NOLOAD) == 0) *tried += std::string("\n  ") + (why != nullptr ? why : "?");
    return nullptr;
  }
  auto api = std::make_unique<Api>();
  if (!FindFunctions(lib, api.get())) {
    *tried += "\n  " + path + ": it lacks a function that amp_ir needs (CUDA 11 or newer has them)";
    return nullptr;
  }
  api->path = path;
  return api.release();
}

const Api* Search(const State& state, std::string* tried) {
  const char* named = std::getenv(kVariable);
  if (!state.chosen.empty()) return Load(state.chosen, RTLD_NOW | RTLD_LOCAL, tried);
  if (named != nullptr && *named != '\0') return Load(named, RTLD_NOW | RTLD_LOCAL, tried);
  for (const char* name : kNames) {
    if (const Api* api = Load(name, RTLD_NOW | RTLD_NOLOAD, tried)) return api;
  }
  for (const std::string& path : state.more_paths) {
    if (const Api* api = Load(path, RTLD_NOW | RTLD_LOCAL, tried)) return api;
  }
  for (const char* name : kNames) {
    if (const Api* api = Load(name, RTLD_NOW | RTLD_LOCAL, tried)) return api;
  }
  return nullptr;
}

const Api* Found(std::string* tried) {
  State& state = TheState();
  std::lock_guard<std::mutex> lock(state.mutex);
  if (state.api == nullptr) state.api = Search(state, tried);
  return state.api;
}

}  // namespace

const Api& Library() {
  std::string tried;
  const Api* api = Found(&tried);
  if (api == nullptr) {
    TVM_FFI_THROW(RuntimeError)
        << "cuBLASLt, which the matmuls of a CUDA step call, cannot be loaded:" << tried
        << "\nInstall a CUDA build of PyTorch, or `pip install nvidia-cublas`, or set " << kVariable
        << " to the path of libcublasLt.so.13 or .12";
  }
  return *api;
}

bool IsAvailable() {
  std::string tried;
  return Found(&tried) != nullptr;
}

void Use(const std::string& path) {
  State& state = TheState();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.chosen = path;
  state.api = nullptr;
}

void AlsoLookAt(const std::string& path) {
  State& state = TheState();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.more_paths.push_back(path);
}

Handle HandleOf(const Api& api, int32_t device_id) {
  State& state = TheState();
  std::lock_guard<std::mutex> lock(state.mutex);
  Handle& handle = state.handles[{&api, device_id}];
  if (handle == nullptr) Check(api, api.create(&handle), "cublasLtCreate");
  return handle;
}

void Check(const Api& api, Status status, const char* what) {
  if (status == kSuccess) return;
  TVM_FFI_THROW(RuntimeError) << what << " failed: " << api.status_string(status) << " (" << status
                              << "), cuBLASLt " << api.version() << " of " << api.path;
}

}  // namespace amp_ir::cublaslt
