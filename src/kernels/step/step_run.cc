// SPDX-License-Identifier: Apache-2.0
// One run of a compiled step: what is kept to undo it, and how far it got where it fails.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstring>

#include "step/call_count.h"

namespace {

namespace ffi = tvm::ffi;

struct StepRun {
  int64_t ticket = -1;
  bool is_finished = false;
  amp_ir::CallCount calls;
};

// A thread's last run.
thread_local StepRun last_run;

// Calls `copy(kept memory, tensor's memory, bytes)` for the arguments at `positions`, whose bytes
// follow one another in `kept`.
template <class Copy>
void ForKept(const ffi::TensorView& kept, const ffi::Shape& positions, ffi::PackedArgs arguments,
             Copy copy) {
  char* place = static_cast<char*>(kept.data_ptr());
  int64_t left = kept.numel();
  for (int64_t position : positions) {
    const auto tensor = arguments[position].cast<ffi::TensorView>();
    const auto nbytes =
        static_cast<int64_t>(ffi::GetDataSize(static_cast<size_t>(tensor.numel()), tensor.dtype()));
    if (tensor.device().device_type != kDLCPU || nbytes > left) {
      TVM_FFI_THROW(ValueError) << "amp_ir.step.run: argument " << position << " takes " << nbytes
                                << " bytes; expected at most " << left << ", on the CPU";
    }
    copy(place, static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset(), nbytes);
    place += nbytes;
    left -= nbytes;
  }
}

// (ticket, main, kept: uint8[n], positions, arguments...): copies the arguments at `positions` to
// `kept`, then calls `main` with the arguments. Whatever it raises is passed on.
void Run(ffi::PackedArgs args, ffi::Any* result) {
  const auto main = args[1].cast<ffi::Function>();
  const auto positions = args[3].cast<ffi::Shape>();
  const ffi::PackedArgs arguments = args.Slice(4);
  if (positions.size() != 0) {
    ForKept(args[2].cast<ffi::TensorView>(), positions, arguments,
            [](char* kept, char* tensor, int64_t nbytes) { std::memcpy(kept, tensor, nbytes); });
  }
  // From here on there is something to undo, and all that it takes.
  last_run = StepRun{args[0].cast<int64_t>(), false, {}};
  main.CallPacked(arguments, result);
  last_run.is_finished = true;
}

// (kept: uint8[n], positions, arguments...): what `Run` copied goes back.
void Restore(ffi::PackedArgs args, ffi::Any*) {
  ForKept(args[0].cast<ffi::TensorView>(), args[1].cast<ffi::Shape>(), args.Slice(2),
          [](char* kept, char* tensor, int64_t nbytes) { std::memcpy(tensor, kept, nbytes); });
}

// This thread's last run: [ticket, whether main returned, library calls begun, and ended].
ffi::Shape Progress() {
  const amp_ir::CallCount& calls = last_run.calls;
  return {last_run.ticket, last_run.is_finished ? 1 : 0, calls.begun, calls.ended};
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def_packed("amp_ir.step.run", Run)
      .def_packed("amp_ir.step.restore", Restore)
      .def("amp_ir.step.progress", Progress)
      .def(amp_ir::kCallCountAddress, [] { return reinterpret_cast<int64_t>(&last_run.calls); })
      // For functions that are not C++: a call begins.
      .def("amp_ir.step.call_begins", [] { ++last_run.calls.begun; });
}
