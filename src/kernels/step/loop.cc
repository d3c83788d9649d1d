// SPDX-License-Identifier: Apache-2.0
// A loop of a step: one program of TVM's virtual machine, run on the entries of stacked tensors.
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstring>
#include <vector>

#include "step/call_count.h"

namespace {

namespace ffi = tvm::ffi;

// What ir/loop_call.py writes: six numbers of the loop, then five of each input and output.
constexpr size_t kHead = 6, kFields = 5;
enum Kind : int64_t { kWhole = 0, kEntry = 1, kCarried = 2 };

// One tensor of the body: its kind; entry first + stride * step, or for a carried input the output
// that it was in the step before; its elements; where its aligned copy is in the workspace, or -1.
struct Operand {
  int64_t kind, first, stride, size, scratch;
  ffi::Tensor tensor;
};

int64_t Bytes(const Operand& one) {
  return static_cast<int64_t>(
      ffi::GetDataSize(static_cast<size_t>(one.size), one.tensor.GetDLTensorPtr()->dtype));
}

// A flat tensor of `size` elements of `dtype` at an address in the memory of `owner`.
ffi::Tensor At(const ffi::Tensor& owner, char* data, int64_t size, DLDataType dtype) {
  int64_t shape = size > 0 ? size : 1;
  int64_t stride = 1;
  DLTensor prototype = *owner.GetDLTensorPtr();
  prototype.data = data;
  prototype.byte_offset = 0;
  prototype.dtype = dtype;
  prototype.ndim = 1;
  prototype.shape = &shape;
  prototype.strides = &stride;
  TVMFFIObjectHandle view = nullptr;
  TVMFFIObjectHandle source = ffi::details::ObjectUnsafe::TVMFFIObjectPtrFromObjectRef(owner);
  TVM_FFI_CHECK_SAFE_CALL(TVMFFITensorCreateUnsafeView(source, &prototype, &view));
  return ffi::Tensor(ffi::details::ObjectUnsafe::ObjectPtrFromOwned<ffi::TensorObj>(
      static_cast<TVMFFIObject*>(view)));
}

char* Data(const ffi::Tensor& tensor) {
  const DLTensor* prototype = tensor.GetDLTensorPtr();
  return static_cast<char*>(prototype->data) + prototype->byte_offset;
}

class Loop {
 public:
  Loop(const ffi::Tensor& workspace, const ffi::Shape& spec, ffi::PackedArgs tensors)
      : workspace_(workspace), steps_(spec[0]), arena_nbytes_(spec[3]) {
    const auto inputs = static_cast<size_t>(spec[1]), outputs = static_cast<size_t>(spec[2]);
    if (spec.size() != kHead + kFields * (inputs + outputs) ||
        static_cast<size_t>(tensors.size()) != inputs + outputs) {
      TVM_FFI_THROW(ValueError) << "amp_ir.loop.run: got " << tensors.size() << " tensors and "
                                << spec.size() << " numbers for " << inputs << " inputs and "
                                << outputs << " outputs";
    }
    for (size_t k = 0; k < inputs + outputs; ++k) {
      const int64_t* of = spec.data() + kHead + kFields * k;
      auto& side = k < inputs ? inputs_ : outputs_;
      side.push_back(
          {of[0], of[1], of[2], of[3], of[4], tensors[static_cast<int>(k)].cast<ffi::Tensor>()});
    }
  }

  // Calls `body(arena, inputs..., outputs...)` for every step.
  void Run(const ffi::Function& invoke, const ffi::Any& machine, const ffi::Any& body) {
    std::vector<ffi::AnyView> given{machine, body};
    std::vector<ffi::Tensor> views;
    for (int64_t step = 0; step < steps_; ++step) {
      views.clear();
      views.push_back(At(workspace_, Data(workspace_), arena_nbytes_, {kDLUInt, 8, 1}));
      for (const Operand& one : inputs_) views.push_back(Input(one, step));
      for (const Operand& one : outputs_) views.push_back(Output(one, step));
      given.resize(2);
      for (const ffi::Tensor& view : views) given.emplace_back(view);
      ffi::Any nothing;
      invoke.CallPacked(ffi::PackedArgs(given.data(), static_cast<int>(given.size())), &nothing);
      for (const Operand& one : outputs_) {
        if (one.kind == kEntry && one.scratch >= 0) {
          std::memcpy(Entry(one, step), Scratch(one), static_cast<size_t>(Bytes(one)));
        }
      }
    }
  }

 private:
  char* Scratch(const Operand& one) const { return Data(workspace_) + one.scratch; }

  char* Entry(const Operand& one, int64_t step) const {
    return Data(one.tensor) + (one.first + one.stride * step) * Bytes(one);
  }

  // Where an output of a step is: the last step's is the result, and those before it take turns.
  char* Place(const Operand& one, int64_t step) const {
    if (one.kind == kEntry) return Entry(one, step);
    const bool in_turn = one.kind == kCarried && (steps_ - 1 - step) % 2 != 0;
    return in_turn ? Scratch(one) : Data(one.tensor);
  }

  ffi::Tensor Input(const Operand& one, int64_t step) const {
    char* data = Data(one.tensor);
    if (one.kind == kEntry) data = Entry(one, step);
    if (one.kind == kCarried && step > 0) {
      data = Place(outputs_[static_cast<size_t>(one.first)], step - 1);
    }
    if (one.scratch >= 0) {
      std::memcpy(Scratch(one), data, static_cast<size_t>(Bytes(one)));
      data = Scratch(one);
    }
    return At(one.tensor, data, one.size, one.tensor.GetDLTensorPtr()->dtype);
  }

  ffi::Tensor Output(const Operand& one, int64_t step) const {
    const bool is_copied = one.kind == kEntry && one.scratch >= 0;
    char* data = is_copied ? Scratch(one) : Place(one, step);
    return At(one.tensor, data, one.size, one.tensor.GetDLTensorPtr()->dtype);
  }

  ffi::Tensor workspace_;
  int64_t steps_, arena_nbytes_;
  std::vector<Operand> inputs_, outputs_;
};

// (machine, body, workspace: uint8[n], spec, inputs..., outputs...): one library call of the step,
// however many the body makes.
void Run(ffi::PackedArgs args, ffi::Any* result) {
  static const ffi::Function invoke = ffi::Function::GetGlobalRequired("vm.builtin.invoke_closure");
  amp_ir::CallCount* const count = amp_ir::ThreadCallCount();
  const amp_ir::CallCount before = *count;
  Loop loop(args[2].cast<ffi::Tensor>(), args[3].cast<ffi::Shape>(), args.Slice(4));
  *count = {before.begun + 1, before.ended};
  try {
    loop.Run(invoke, ffi::Any(args[0]), ffi::Any(args[1]));
  } catch (...) {
    *count = {before.begun + 1, before.ended};
    throw;
  }
  *count = {before.begun + 1, before.ended + 1};
  *result = int64_t{0};
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def_packed("amp_ir.loop.run", Run);
}
