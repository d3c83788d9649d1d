// SPDX-License-Identifier: Apache-2.0
// Recurrent layers, all time steps in one call; the products by oneDNN.
//
// Time is the first dim of all that has one: t steps of n samples with a hidden state of h. States
// and cells are those before and after each step, t + 1 of them: walking time forwards, states[0]
// is the initial one and states[k + 1] that after time k; walking it backwards, states[t] is the
// initial one and states[k] that after time k. All tensors are dense.
#ifndef AMP_IR_KERNELS_ONEDNN_RECURRENCE_H_
#define AMP_IR_KERNELS_ONEDNN_RECURRENCE_H_

#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <string>
#include <vector>

namespace amp_ir::onednn {

// `dtype` is that of everything but cells and their gradients, which are float32. Sums are float32
// and what is stored is rounded once; products read states and gradients of gates as stored, and
// what else goes from step to step is carried unrounded.
struct RecurrentLayer {
  int64_t steps, rows, hidden;  // t, n, h
  DLDataType dtype;
  bool is_reverse;
};

struct Lstm {
  const void *gates, *weight, *hidden;  // [t, n, 4h], [4h, h], [n, h]
  const float* cell;                    // [n, h]
  void* states;                         // [t + 1, n, h]
  float* cells;                         // [t + 1, n, h]
  void* activated;                      // [t, n, 4h]
};
void Run(const RecurrentLayer& layer, const Lstm& lstm);

struct LstmBackward {
  const void *grad, *grad_hidden;   // [t, n, h], [n, h]
  const float* grad_cell;           // [n, h]
  const void* activated;            // [t, n, 4h]
  const float* cells;               // [t + 1, n, h]
  const void* weight;               // [4h, h]
  void *grad_gates, *grad_hidden0;  // [t, n, 4h], [n, h]
  float* grad_cell0;                // [n, h]
};
void Run(const RecurrentLayer& layer, const LstmBackward& lstm);

struct Gru {
  const void *gates, *weight, *bias, *hidden;  // [t, n, 3h], [3h, h], [3h], [n, h]
  void *states, *activated;                    // [t + 1, n, h], [t, n, 4h]
};
void Run(const RecurrentLayer& layer, const Gru& gru);

struct GruBackward {
  const void *grad, *grad_hidden, *activated,
      *states;                                       // [t, n, h], [n, h], [t, n, 4h], [t + 1, n, h]
  const void* weight;                                // [3h, h]
  void *grad_gates, *grad_recurrent, *grad_hidden0;  // [t, n, 3h] twice, [n, h]
};
void Run(const RecurrentLayer& layer, const GruBackward& gru);

struct Rnn {
  const void *gates, *weight, *hidden;  // [t, n, h], [h, h], [n, h]
  bool is_relu;                         // tanh otherwise
  void* states;                         // [t + 1, n, h]
};
void Run(const RecurrentLayer& layer, const Rnn& rnn);

struct RnnBackward {
  const void *grad, *grad_hidden, *states, *weight;  // [t, n, h], [n, h], [t + 1, n, h], [h, h]
  bool is_relu;
  void *grad_gates, *grad_hidden0;  // [t, n, h], [n, h]
};
void Run(const RecurrentLayer& layer, const RnnBackward& rnn);

std::vector<std::string> RecurrenceImplementations();
void ClearRecurrencePlans();

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_ONEDNN_RECURRENCE_H_
