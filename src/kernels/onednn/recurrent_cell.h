// SPDX-License-Identifier: Apache-2.0
// What recurrent layers do with the products of a time step, element by element.
#ifndef AMP_IR_KERNELS_RECURRENT_CELL_H_
#define AMP_IR_KERNELS_RECURRENT_CELL_H_

#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>

namespace amp_ir {

// Columns of the hidden state of one sample. Each pointer is at the first of the columns; of what
// has several gates, a gate's columns begin `..._stride` elements after those of the gate before.
// `void*` is of the layer's dtype, float32, bfloat16 or float16; everything else is float32.
// Arithmetic is float32, and what is stored is rounded once, to nearest even.
//
// Source: the formulas are those of torch.nn.LSTM, GRU and RNN, with their order of gates.

// activated = (i, f, m, o); cell = f * cell_before + i * m; state = o * tanh(cell).
struct LstmForwardRow {
  const float* product;  // h_prev W^T
  int64_t product_stride;
  const void* gates;
  const float* cell_before;
  int64_t gate_stride;  // of gates and activated
  float* cell;
  void* state;
  void* activated;
};
void ComputeRow(DLDataType dtype, const LstmForwardRow& row, int64_t columns);

// The gradient of the state is grad + product; grad_cell is that of `cell` and becomes that of
// `cell_before`.
struct LstmBackwardRow {
  const float* product;  // grad_gates W of the time step after
  const void* grad;
  const void* activated;
  const float *cell, *cell_before;
  int64_t gate_stride;  // of activated and grad_gates
  float* grad_cell;
  void* grad_gates;
};
void ComputeRow(DLDataType dtype, const LstmBackwardRow& row, int64_t columns);

// activated = (r, z, n, p) with p = W_hn h_prev + b_hn; state = n + z * (carried - n), and so
// becomes carried: the state before it was rounded to the layer's dtype.
struct GruForwardRow {
  const float* product;  // h_prev W^T
  int64_t product_stride;
  const void* gates;
  const void* bias;     // of h_prev W^T
  int64_t gate_stride;  // of gates, bias and activated
  float* carried;
  void* state;
  void* activated;
};
void ComputeRow(DLDataType dtype, const GruForwardRow& row, int64_t columns);

// The gradient of the state is grad + product + carried; carried becomes what reaches
// `state_before` past the gates.
struct GruBackwardRow {
  const float* product;  // grad_recurrent W of the time step after
  const void* grad;
  const void* activated;
  const void* state_before;
  int64_t gate_stride;  // of activated, grad_gates and grad_recurrent
  float* carried;
  void* grad_gates;
  void* grad_recurrent;
};
void ComputeRow(DLDataType dtype, const GruBackwardRow& row, int64_t columns);

// state = tanh(gates + product), or relu of it.
struct RnnForwardRow {
  const float* product;  // h_prev W^T
  const void* gates;
  bool is_relu;
  void* state;
};
void ComputeRow(DLDataType dtype, const RnnForwardRow& row, int64_t columns);

// The gradient of the state is grad + product.
struct RnnBackwardRow {
  const float* product;  // grad_gates W of the time step after
  const void* grad;
  const void* state;
  bool is_relu;
  void* grad_gates;
};
void ComputeRow(DLDataType dtype, const RnnBackwardRow& row, int64_t columns);

// to = from.
void WidenColumns(DLDataType dtype, const void* from, float* to, int64_t columns);
void NarrowColumns(DLDataType dtype, const float* from, void* to, int64_t columns);

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_RECURRENT_CELL_H_
