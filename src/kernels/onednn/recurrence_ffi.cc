// SPDX-License-Identifier: Apache-2.0
// Recurrent layers behind tvm-ffi: checks what compiled programs send, and registers the functions.
//
// Tensors are dense, and flat or not: `dims` are [t, n, h], steps, samples and the hidden state.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <string>

#include "onednn/plan.h"
#include "onednn/recurrence.h"
#include "step/call_count.h"
#include "tensors/library_calls.h"

namespace {

namespace ffi = tvm::ffi;
using amp_ir::Counted;
using amp_ir::onednn::Guard;
using amp_ir::onednn::RecurrentLayer;

constexpr int64_t kMostSteps = int64_t{1} << 40;

// The operands of one call; each is checked as it is read.
class Operands {
 public:
  // `first` is a tensor of the layer's dtype.
  Operands(const char* function, const char* name, const ffi::TensorView& first,
           const ffi::Shape& dims, int64_t reverse)
      : function_(function), first_(name) {
    amp_ir::CheckDtype(function, name, first.dtype());
    if (dims.size() != 3 || dims[0] < 1 || dims[1] < 0 || dims[2] < 1) {
      TVM_FFI_THROW(ValueError) << function << ": dims are " << amp_ir::ToString(dims)
                                << "; expected [steps, samples, hidden], with steps and hidden of "
                                   "at least 1";
    }
    // States have a time more than there are steps, gates up to four times their width, in bytes.
    int64_t nbytes = 16, times = dims[0] < kMostSteps ? dims[0] + 1 : -1;
    if (times < 0 || __builtin_mul_overflow(nbytes, times, &nbytes) ||
        (dims[1] > 0 && __builtin_mul_overflow(nbytes, dims[1], &nbytes)) ||
        __builtin_mul_overflow(nbytes, dims[2], &nbytes)) {
      TVM_FFI_THROW(ValueError) << function << ": dims are " << amp_ir::ToString(dims)
                                << ", more than memory holds";
    }
    layer_ = {dims[0], dims[1], dims[2], first.dtype(), reverse != 0};
  }

  const RecurrentLayer& layer() const { return layer_; }

  // Of the layer's dtype, for each sample at so many times, with so many gates.
  void* Low(const char* name, const ffi::TensorView& tensor, int64_t times, int64_t gates) const {
    CheckLow(name, tensor);
    return Data(name, tensor, {times, layer_.rows, gates * layer_.hidden});
  }

  float* Full(const char* name, const ffi::TensorView& tensor, int64_t times) const {
    if (!amp_ir::IsFloat(tensor.dtype(), 32)) {
      TVM_FFI_THROW(TypeError) << function_ << ": " << name << " is " << Text(tensor.dtype())
                               << "; expected float32, in which cells are kept";
    }
    return static_cast<float*>(Data(name, tensor, {times, layer_.rows, layer_.hidden}));
  }

  // Of the layer's dtype, the same for all samples: [gates * h, columns].
  void* Shared(const char* name, const ffi::TensorView& tensor, int64_t gates,
               int64_t columns) const {
    CheckLow(name, tensor);
    return Data(name, tensor, {gates * layer_.hidden, columns});
  }

 private:
  static std::string Text(DLDataType dtype) { return ffi::DLDataTypeToString(dtype); }

  void CheckLow(const char* name, const ffi::TensorView& tensor) const {
    if (!amp_ir::SameDtype(tensor.dtype(), layer_.dtype)) {
      TVM_FFI_THROW(TypeError) << function_ << ": " << name << " is " << Text(tensor.dtype())
                               << "; expected " << Text(layer_.dtype) << ", as " << first_;
    }
  }

  void* Data(const char* name, const ffi::TensorView& tensor, const ffi::Shape& shape) const {
    if (!tensor.IsContiguous() || tensor.numel() != shape.Product()) {
      TVM_FFI_THROW(ValueError) << function_ << ": " << name << " has " << tensor.numel()
                                << " elements" << (tensor.IsContiguous() ? "" : " with gaps")
                                << "; expected those of " << amp_ir::ToString(shape)
                                << ", one after the other, for [t, n, h] = [" << layer_.steps
                                << ", " << layer_.rows << ", " << layer_.hidden << "]";
    }
    return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
  }

  const char* function_;
  const char* first_;
  RecurrentLayer layer_;
};

void Lstm(const ffi::TensorView& gates, const ffi::TensorView& weight,
          const ffi::TensorView& hidden, const ffi::TensorView& cell, const ffi::Shape& dims,
          int64_t reverse, const ffi::TensorView& states, const ffi::TensorView& cells,
          const ffi::TensorView& activated) {
  constexpr const char* kName = "amp_ir.onednn.lstm";
  const Operands of(kName, "gates", gates, dims, reverse);
  const int64_t steps = of.layer().steps;
  amp_ir::onednn::Lstm lstm;
  lstm.gates = of.Low("gates", gates, steps, 4);
  lstm.weight = of.Shared("weight", weight, 4, of.layer().hidden);
  lstm.hidden = of.Low("hidden", hidden, 1, 1);
  lstm.cell = of.Full("cell", cell, 1);
  lstm.states = of.Low("states", states, steps + 1, 1);
  lstm.cells = of.Full("cells", cells, steps + 1);
  lstm.activated = of.Low("activated", activated, steps, 4);
  Guard(kName, [&] { Run(of.layer(), lstm); });
}

void LstmBackward(const ffi::TensorView& grad, const ffi::TensorView& grad_hidden,
                  const ffi::TensorView& grad_cell, const ffi::TensorView& activated,
                  const ffi::TensorView& cells, const ffi::TensorView& weight,
                  const ffi::Shape& dims, int64_t reverse, const ffi::TensorView& grad_gates,
                  const ffi::TensorView& grad_hidden0, const ffi::TensorView& grad_cell0) {
  constexpr const char* kName = "amp_ir.onednn.lstm_backward";
  const Operands of(kName, "grad", grad, dims, reverse);
  const int64_t steps = of.layer().steps;
  amp_ir::onednn::LstmBackward lstm;
  lstm.grad = of.Low("grad", grad, steps, 1);
  lstm.grad_hidden = of.Low("grad_hidden", grad_hidden, 1, 1);
  lstm.grad_cell = of.Full("grad_cell", grad_cell, 1);
  lstm.activated = of.Low("activated", activated, steps, 4);
  lstm.cells = of.Full("cells", cells, steps + 1);
  lstm.weight = of.Shared("weight", weight, 4, of.layer().hidden);
  lstm.grad_gates = of.Low("grad_gates", grad_gates, steps, 4);
  lstm.grad_hidden0 = of.Low("grad_hidden0", grad_hidden0, 1, 1);
  lstm.grad_cell0 = of.Full("grad_cell0", grad_cell0, 1);
  Guard(kName, [&] { Run(of.layer(), lstm); });
}

void Gru(const ffi::TensorView& gates, const ffi::TensorView& weight, const ffi::TensorView& bias,
         const ffi::TensorView& hidden, const ffi::Shape& dims, int64_t reverse,
         const ffi::TensorView& states, const ffi::TensorView& activated) {
  constexpr const char* kName = "amp_ir.onednn.gru";
  const Operands of(kName, "gates", gates, dims, reverse);
  const int64_t steps = of.layer().steps;
  amp_ir::onednn::Gru gru;
  gru.gates = of.Low("gates", gates, steps, 3);
  gru.weight = of.Shared("weight", weight, 3, of.layer().hidden);
  gru.bias = of.Shared("bias", bias, 3, 1);
  gru.hidden = of.Low("hidden", hidden, 1, 1);
  gru.states = of.Low("states", states, steps + 1, 1);
  gru.activated = of.Low("activated", activated, steps, 4);
  Guard(kName, [&] { Run(of.layer(), gru); });
}

void GruBackward(const ffi::TensorView& grad, const ffi::TensorView& grad_hidden,
                 const ffi::TensorView& activated, const ffi::TensorView& states,
                 const ffi::TensorView& weight, const ffi::Shape& dims, int64_t reverse,
                 const ffi::TensorView& grad_gates, const ffi::TensorView& grad_recurrent,
                 const ffi::TensorView& grad_hidden0) {
  constexpr const char* kName = "amp_ir.onednn.gru_backward";
  const Operands of(kName, "grad", grad, dims, reverse);
  const int64_t steps = of.layer().steps;
  amp_ir::onednn::GruBackward gru;
  gru.grad = of.Low("grad", grad, steps, 1);
  gru.grad_hidden = of.Low("grad_hidden", grad_hidden, 1, 1);
  gru.activated = of.Low("activated", activated, steps, 4);
  gru.states = of.Low("states", states, steps + 1, 1);
  gru.weight = of.Shared("weight", weight, 3, of.layer().hidden);
  gru.grad_gates = of.Low("grad_gates", grad_gates, steps, 3);
  gru.grad_recurrent = of.Low("grad_recurrent", grad_recurrent, steps, 3);
  gru.grad_hidden0 = of.Low("grad_hidden0", grad_hidden0, 1, 1);
  Guard(kName, [&] { Run(of.layer(), gru); });
}

void RunRnn(const char* name, bool is_relu, const ffi::TensorView& gates,
            const ffi::TensorView& weight, const ffi::TensorView& hidden, const ffi::Shape& dims,
            int64_t reverse, const ffi::TensorView& states) {
  const Operands of(name, "gates", gates, dims, reverse);
  const int64_t steps = of.layer().steps;
  amp_ir::onednn::Rnn rnn;
  rnn.gates = of.Low("gates", gates, steps, 1);
  rnn.weight = of.Shared("weight", weight, 1, of.layer().hidden);
  rnn.hidden = of.Low("hidden", hidden, 1, 1);
  rnn.is_relu = is_relu;
  rnn.states = of.Low("states", states, steps + 1, 1);
  Guard(name, [&] { Run(of.layer(), rnn); });
}

void RunRnnBackward(const char* name, bool is_relu, const ffi::TensorView& grad,
                    const ffi::TensorView& grad_hidden, const ffi::TensorView& states,
                    const ffi::TensorView& weight, const ffi::Shape& dims, int64_t reverse,
                    const ffi::TensorView& grad_gates, const ffi::TensorView& grad_hidden0) {
  const Operands of(name, "grad", grad, dims, reverse);
  const int64_t steps = of.layer().steps;
  amp_ir::onednn::RnnBackward rnn;
  rnn.grad = of.Low("grad", grad, steps, 1);
  rnn.grad_hidden = of.Low("grad_hidden", grad_hidden, 1, 1);
  rnn.states = of.Low("states", states, steps + 1, 1);
  rnn.weight = of.Shared("weight", weight, 1, of.layer().hidden);
  rnn.is_relu = is_relu;
  rnn.grad_gates = of.Low("grad_gates", grad_gates, steps, 1);
  rnn.grad_hidden0 = of.Low("grad_hidden0", grad_hidden0, 1, 1);
  Guard(name, [&] { Run(of.layer(), rnn); });
}

void RnnTanh(const ffi::TensorView& gates, const ffi::TensorView& weight,
             const ffi::TensorView& hidden, const ffi::Shape& dims, int64_t reverse,
             const ffi::TensorView& states) {
  RunRnn("amp_ir.onednn.rnn_tanh", false, gates, weight, hidden, dims, reverse, states);
}

void RnnTanhBackward(const ffi::TensorView& grad, const ffi::TensorView& grad_hidden,
                     const ffi::TensorView& states, const ffi::TensorView& weight,
                     const ffi::Shape& dims, int64_t reverse, const ffi::TensorView& grad_gates,
                     const ffi::TensorView& grad_hidden0) {
  RunRnnBackward("amp_ir.onednn.rnn_tanh_backward", false, grad, grad_hidden, states, weight, dims,
                 reverse, grad_gates, grad_hidden0);
}

void RnnRelu(const ffi::TensorView& gates, const ffi::TensorView& weight,
             const ffi::TensorView& hidden, const ffi::Shape& dims, int64_t reverse,
             const ffi::TensorView& states) {
  RunRnn("amp_ir.onednn.rnn_relu", true, gates, weight, hidden, dims, reverse, states);
}

void RnnReluBackward(const ffi::TensorView& grad, const ffi::TensorView& grad_hidden,
                     const ffi::TensorView& states, const ffi::TensorView& weight,
                     const ffi::Shape& dims, int64_t reverse, const ffi::TensorView& grad_gates,
                     const ffi::TensorView& grad_hidden0) {
  RunRnnBackward("amp_ir.onednn.rnn_relu_backward", true, grad, grad_hidden, states, weight, dims,
                 reverse, grad_gates, grad_hidden0);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("amp_ir.onednn.lstm", Counted<Lstm>::Call)
      .def("amp_ir.onednn.lstm_backward", Counted<LstmBackward>::Call)
      .def("amp_ir.onednn.gru", Counted<Gru>::Call)
      .def("amp_ir.onednn.gru_backward", Counted<GruBackward>::Call)
      .def("amp_ir.onednn.rnn_tanh", Counted<RnnTanh>::Call)
      .def("amp_ir.onednn.rnn_tanh_backward", Counted<RnnTanhBackward>::Call)
      .def("amp_ir.onednn.rnn_relu", Counted<RnnRelu>::Call)
      .def("amp_ir.onednn.rnn_relu_backward", Counted<RnnReluBackward>::Call);
}
