// SPDX-License-Identifier: Apache-2.0
// How many library calls this thread has begun and ended: which one failed, at no cost while none
// does.
#ifndef AMP_IR_KERNELS_CALL_COUNT_H_
#define AMP_IR_KERNELS_CALL_COUNT_H_

#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <new>

namespace amp_ir {

struct CallCount {
  int64_t begun = 0, ended = 0;
};

// The function that gives the address of a thread's count to all libraries (step/step_run.cc).
constexpr const char* kCallCountAddress = "amp_ir.step.call_count_address";

// The count of this thread; a library's own where a step runs without step/step_run.cc.
inline CallCount* ThreadCallCount() {
  static thread_local CallCount own;
  static thread_local CallCount* const shared = [] {
    const auto address = tvm::ffi::Function::GetGlobal(kCallCountAddress);
    return address ? reinterpret_cast<CallCount*>((*address)().cast<int64_t>()) : &own;
  }();
  return shared;
}

// A library function as it is registered: counted, and with what the C++ library throws where
// memory ends said as the error that it is.
template <auto kFunction>
struct Counted;

template <class... Arguments, void (*kFunction)(Arguments...)>
struct Counted<kFunction> {
  static void Call(Arguments... arguments) {
    CallCount* const count = ThreadCallCount();
    ++count->begun;
    try {
      kFunction(arguments...);
    } catch (const std::bad_alloc&) {
      TVM_FFI_THROW(MemoryError) << "the system has no memory left (std::bad_alloc)";
    }
    ++count->ended;
  }
};

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_CALL_COUNT_H_
