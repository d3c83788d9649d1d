// SPDX-License-Identifier: Apache-2.0
// Compiled kernels on OpenMP's threads, and tensors inside an arena.
//
// This library links libgomp by its SONAME, libgomp.so.1. PyTorch brings a libgomp of that name;
// when torch is imported before this library is loaded, the dynamic linker reuses torch's copy and
// PyTorch, oneDNN and our kernels share one pool. Two pools would compete for the same cores.
#include <omp.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "tensors/strided_tensor.h"

namespace {

namespace ffi = tvm::ffi;

// Mirrors TVMParallelGroupEnv of tvm/runtime/c_backend_api.h, which compiled kernels rely on.
struct ParallelGroup {
  void* sync_handle;
  int32_t num_task;
};

using ParallelLambda = int (*)(int task_id, ParallelGroup* group, void* cdata);

// Runs `lambda` once for each task id; stands in for TVMBackendParallelLaunch.
//
// num_task 0 asks for one task a thread. OpenMP may grant fewer threads than there are tasks
// (inside another parallel region it grants one), so threads take tasks in turns. The barrier that
// TVM offers to tasks is not supported: sync_handle is null. Ensures: -1 when a task failed, with
// the first task's error raised on the calling thread (an error
//          is thread-local, so it is carried over from the thread that met it).
int LaunchParallel(ParallelLambda lambda, void* cdata, int num_task) {
  ParallelGroup group{nullptr, num_task > 0 ? num_task : omp_get_max_threads()};
  if (group.num_task == 1) return lambda(0, &group, cdata) == 0 ? 0 : -1;
  std::atomic<bool> failed{false};
  TVMFFIObjectHandle first_error = nullptr;
  const int threads = std::min<int>(group.num_task, omp_get_max_threads());
#pragma omp parallel num_threads(threads)
  for (int task = omp_get_thread_num(); task < group.num_task; task += omp_get_num_threads()) {
    if (lambda(task, &group, cdata) == 0) continue;
    TVMFFIObjectHandle error = nullptr;
    TVMFFIErrorMoveFromRaised(&error);
    if (!failed.exchange(true)) {
      first_error = error;
    } else if (error != nullptr) {
      TVMFFIObjectDecRef(error);
    }
  }
  if (!failed) return 0;
  if (first_error != nullptr) {
    TVMFFIErrorSetRaised(first_error);
    TVMFFIObjectDecRef(first_error);
  } else {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", "a parallel task failed without saying why");
  }
  return -1;
}

int64_t LaunchAddress() { return reinterpret_cast<int64_t>(&LaunchParallel); }

// A dense tensor of `shape` that starts `offset_bytes` into `arena` and keeps the arena alive.
//
// The data pointer itself is shifted and byte_offset is 0, because compiled kernels refuse tensors
// with any other byte_offset.
ffi::Tensor View(const ffi::Tensor& arena, int64_t offset_bytes, const ffi::Shape& shape,
                 DLDataType dtype) {
  int64_t nbytes = (dtype.bits * dtype.lanes + 7) / 8;
  for (int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(nbytes, extent, &nbytes)) {
      TVM_FFI_THROW(ValueError) << "a view of " << amp_ir::ToString(shape)
                                << " is of no tensor that fits into memory";
    }
  }
  int64_t arena_nbytes = static_cast<int64_t>(ffi::GetDataSize(*arena.GetDLTensorPtr()));
  if (offset_bytes < 0 || offset_bytes > arena_nbytes || nbytes > arena_nbytes - offset_bytes) {
    TVM_FFI_THROW(ValueError) << "a view of " << nbytes << " bytes at offset " << offset_bytes
                              << " does not lie inside an arena of " << arena_nbytes << " bytes";
  }
  ffi::ShapeView dims = shape;
  std::vector<int64_t> strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) strides[i - 1] = strides[i] * dims[i];
  DLTensor prototype = *arena.GetDLTensorPtr();
  prototype.data = static_cast<char*>(prototype.data) + prototype.byte_offset + offset_bytes;
  prototype.byte_offset = 0;
  prototype.dtype = dtype;
  prototype.ndim = static_cast<int32_t>(dims.size());
  prototype.shape = const_cast<int64_t*>(dims.data());
  prototype.strides = strides.data();
  TVMFFIObjectHandle view = nullptr;
  TVMFFIObjectHandle source = ffi::details::ObjectUnsafe::TVMFFIObjectPtrFromObjectRef(arena);
  TVM_FFI_CHECK_SAFE_CALL(TVMFFITensorCreateUnsafeView(source, &prototype, &view));
  return ffi::Tensor(ffi::details::ObjectUnsafe::ObjectPtrFromOwned<ffi::TensorObj>(
      static_cast<TVMFFIObject*>(view)));
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("amp_ir.openmp.launch_address", LaunchAddress)
      .def("amp_ir.openmp.max_threads",
           []() { return static_cast<int64_t>(omp_get_max_threads()); })
      .def("amp_ir.view", View);
}
