// SPDX-License-Identifier: Apache-2.0
// When each call of a compiled program begins and ends.
//
// The virtual machine calls its instrument before and after every call. In C++ that costs some
// hundred nanoseconds; in Python it would cost more than many kernels take.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <chrono>
#include <string>
#include <vector>

namespace {

namespace ffi = tvm::ffi;

struct Reading {
  std::string symbol;
  int64_t begin_nanoseconds, end_nanoseconds;
};

// A thread's readings: programs of other threads do not mix into them. A loop is one call, which
// calls the kernels of its body; `depth` counts the calls that have begun and not ended.
thread_local std::vector<Reading> readings;
thread_local int depth = 0;

int64_t Now() {
  const auto since_boot = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since_boot).count();
}

// The instrument: (function, symbol, is_before, result, arguments...).
void Record(ffi::PackedArgs args, ffi::Any*) {
  const int64_t now = Now();
  if (!args[2].cast<bool>()) {
    if (depth > 0) --depth;
    if (depth == 0 && !readings.empty()) readings.back().end_nanoseconds = now;
    return;
  }
  if (depth++ > 0) return;
  readings.push_back({args[1].cast<ffi::String>(), 0, 0});
  readings.back().begin_nanoseconds = Now();
}

// Forgets this thread's readings and returns them: symbols, and [begin, end, begin, ...].
ffi::Array<ffi::Any> Take() {
  ffi::Array<ffi::String> symbols;
  std::vector<int64_t> times;
  for (const Reading& reading : readings) {
    symbols.push_back(reading.symbol);
    times.push_back(reading.begin_nanoseconds);
    times.push_back(reading.end_nanoseconds);
  }
  readings.clear();
  depth = 0;
  return {symbols, ffi::Shape(times)};
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def_packed("amp_ir.call_clock.record", Record)
      .def("amp_ir.call_clock.take", Take);
}
