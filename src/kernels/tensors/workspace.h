// SPDX-License-Identifier: Apache-2.0
// Scratch memory that the caller lends to library calls, and how it asks how much they need.
//
// Both are kept a thread, and each library that includes this file keeps its own: a scope around a
// call reaches that library's calls and no other's.
#ifndef AMP_IR_KERNELS_WORKSPACE_H_
#define AMP_IR_KERNELS_WORKSPACE_H_

#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cstddef>

namespace amp_ir {

struct ScratchMemory {
  char* data = nullptr;
  size_t nbytes = 0;
};

// While it lives, calls of this thread use `memory` as their scratch memory where it is enough for
// them. Scopes nest.
class LentScratch {
 public:
  explicit LentScratch(ScratchMemory memory) : outer_(current_) { current_ = memory; }
  ~LentScratch() { current_ = outer_; }
  LentScratch(const LentScratch&) = delete;
  LentScratch& operator=(const LentScratch&) = delete;
  static ScratchMemory Current() { return current_; }

 private:
  ScratchMemory outer_;
  static inline thread_local ScratchMemory current_;
};

// While it lives, calls of this thread compute nothing; it remembers the scratch bytes that the
// largest needs, and the bytes that one takes from the system itself and that stay the process's.
class ScratchQuery {
 public:
  ScratchQuery() : outer_(current_) { current_ = this; }
  ~ScratchQuery() { current_ = outer_; }
  ScratchQuery(const ScratchQuery&) = delete;
  ScratchQuery& operator=(const ScratchQuery&) = delete;
  size_t nbytes() const { return nbytes_; }
  size_t kept_nbytes() const { return kept_nbytes_; }
  void Note(size_t nbytes, size_t kept_nbytes = 0) {
    nbytes_ = std::max(nbytes_, nbytes);
    kept_nbytes_ = std::max(kept_nbytes_, kept_nbytes);
  }
  // Who asks on this thread; null: nobody, so compute.
  static ScratchQuery* Current() { return current_; }

 private:
  ScratchQuery* outer_;
  size_t nbytes_ = 0, kept_nbytes_ = 0;
  static inline thread_local ScratchQuery* current_ = nullptr;
};

struct MemoryNeed {
  size_t nbytes, kept_nbytes;
};

// What the call of (name, arguments...) needs; nothing is computed, and the contents of the tensors
// do not matter.
inline MemoryNeed AskForNeed(tvm::ffi::PackedArgs args) {
  const auto call = tvm::ffi::Function::GetGlobalRequired(args[0].cast<tvm::ffi::String>());
  ScratchQuery query;
  tvm::ffi::Any nothing;
  call.CallPacked(args.Slice(1), &nothing);
  return {query.nbytes(), query.kept_nbytes()};
}

// (name, arguments...) -> bytes of scratch memory that the call needs.
inline void ScratchNbytes(tvm::ffi::PackedArgs args, tvm::ffi::Any* result) {
  *result = static_cast<int64_t>(AskForNeed(args).nbytes);
}

// (name, arguments...) -> the bytes that it takes from the system itself, and that stay taken.
inline void KeptNbytes(tvm::ffi::PackedArgs args, tvm::ffi::Any* result) {
  *result = static_cast<int64_t>(AskForNeed(args).kept_nbytes);
}

// (name, scratch: uint8[n], arguments...): the call with `scratch` as its scratch memory.
inline void WithScratch(tvm::ffi::PackedArgs args, tvm::ffi::Any* result) {
  const auto call = tvm::ffi::Function::GetGlobalRequired(args[0].cast<tvm::ffi::String>());
  const auto scratch = args[1].cast<tvm::ffi::TensorView>();
  const LentScratch lent(
      {static_cast<char*>(scratch.data_ptr()), static_cast<size_t>(scratch.numel())});
  call.CallPacked(args.Slice(2), result);
}

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_WORKSPACE_H_
