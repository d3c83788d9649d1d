// SPDX-License-Identifier: Apache-2.0
// Workspace that the caller provides for library calls, and the query of how much they need.
//
// Both are thread-local, and each library that includes this file has its own: a scope around a
// call reaches that library's calls and no other's.
#ifndef AMP_IR_KERNELS_WORKSPACE_H_
#define AMP_IR_KERNELS_WORKSPACE_H_

#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cstddef>

namespace amp_ir {

struct Workspace {
  char* data = nullptr;
  size_t nbytes = 0;
};

// While it lives, calls of this thread use `memory` as their workspace where it is enough for
// them. Scopes nest.
class CallerWorkspace {
 public:
  explicit CallerWorkspace(Workspace memory) : outer_(current_) { current_ = memory; }
  ~CallerWorkspace() { current_ = outer_; }
  CallerWorkspace(const CallerWorkspace&) = delete;
  CallerWorkspace& operator=(const CallerWorkspace&) = delete;
  static Workspace Current() { return current_; }

 private:
  Workspace outer_;
  static inline thread_local Workspace current_;
};

// While it lives, calls of this thread compute nothing; it records the workspace bytes that the
// largest needs, and its persistent bytes: those that a library allocates itself and never frees.
class WorkspaceQuery {
 public:
  WorkspaceQuery() : outer_(current_) { current_ = this; }
  ~WorkspaceQuery() { current_ = outer_; }
  WorkspaceQuery(const WorkspaceQuery&) = delete;
  WorkspaceQuery& operator=(const WorkspaceQuery&) = delete;
  size_t nbytes() const { return nbytes_; }
  size_t persistent_nbytes() const { return persistent_nbytes_; }
  void Note(size_t nbytes, size_t persistent_nbytes = 0) {
    nbytes_ = std::max(nbytes_, nbytes);
    persistent_nbytes_ = std::max(persistent_nbytes_, persistent_nbytes);
  }
  // The query of this thread; null where calls compute.
  static WorkspaceQuery* Current() { return current_; }

 private:
  WorkspaceQuery* outer_;
  size_t nbytes_ = 0, persistent_nbytes_ = 0;
  static inline thread_local WorkspaceQuery* current_ = nullptr;
};

struct MemoryNeed {
  size_t nbytes, persistent_nbytes;
};

// Returns what the call of (name, arguments...) needs. It computes nothing and reads no tensor's
// contents.
inline MemoryNeed QueryNeed(tvm::ffi::PackedArgs args) {
  const auto call = tvm::ffi::Function::GetGlobalRequired(args[0].cast<tvm::ffi::String>());
  WorkspaceQuery query;
  tvm::ffi::Any nothing;
  call.CallPacked(args.Slice(1), &nothing);
  return {query.nbytes(), query.persistent_nbytes()};
}

// (name, arguments...) -> bytes of workspace that the call needs.
inline void WorkspaceNbytes(tvm::ffi::PackedArgs args, tvm::ffi::Any* result) {
  *result = static_cast<int64_t>(QueryNeed(args).nbytes);
}

// (name, arguments...) -> the bytes that the call's library allocates itself and never frees.
inline void PersistentNbytes(tvm::ffi::PackedArgs args, tvm::ffi::Any* result) {
  *result = static_cast<int64_t>(QueryNeed(args).persistent_nbytes);
}

// (name, workspace: uint8[n], arguments...): the call with `workspace` as its workspace.
inline void CallWithWorkspace(tvm::ffi::PackedArgs args, tvm::ffi::Any* result) {
  const auto call = tvm::ffi::Function::GetGlobalRequired(args[0].cast<tvm::ffi::String>());
  const auto workspace = args[1].cast<tvm::ffi::TensorView>();
  const CallerWorkspace scope(
      {static_cast<char*>(workspace.data_ptr()), static_cast<size_t>(workspace.numel())});
  call.CallPacked(args.Slice(2), result);
}

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_WORKSPACE_H_
