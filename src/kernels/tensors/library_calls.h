// SPDX-License-Identifier: Apache-2.0
#ifndef AMP_IR_KERNELS_LIBRARY_CALLS_H_
#define AMP_IR_KERNELS_LIBRARY_CALLS_H_

// The order of the arguments of amp_ir.<library>.<function>, and of the results after them, which
// the caller provides. Python writes them in python/amp_ir/ir/library_call.py; a test compares the
// two, and these names with those of the parameters.
//
// A tensor is memory: `x_dims` and `x_strides`, in elements, say how `x` is laid out in it.
// `packed` is what `pack` wrote for a matrix of `b_dims`. `epilogue` is an activation, then "+tf32"
// or
// "+<algorithm>" where one is asked for. bias, alpha and beta may be absent. `dims` of a recurrent
// layer are time steps, rows and the width of its state.
//
// matmul(a, b, bias, a_dims, a_strides, b_dims, b_strides, out_dims, out_strides, epilogue) ->
//     out
// matmul_accumulate(a, b, c, bias, alpha, beta, a_dims, a_strides, b_dims, b_strides, out_dims,
//     out_strides, epilogue) -> out
// matmul_packed(a, packed, bias, a_dims, a_strides, b_dims, out_dims, out_strides, epilogue) ->
//     out
// pack(b, b_dims, b_strides) -> packed
// conv(x, w, x_dims, x_strides, w_dims, w_strides, out_dims, out_strides, strides, padding,
//     dilation, groups) -> out
// conv_backward_input(grad, w, grad_dims, grad_strides, w_dims, w_strides, out_dims, out_strides,
//     strides, padding, dilation, groups) -> out
// conv_backward_weight(grad, x, grad_dims, grad_strides, x_dims, x_strides, out_dims,
//     out_strides, strides, padding, dilation, groups) -> out
// attention(q, k, v, q_dims, q_strides, k_dims, k_strides, v_dims, v_strides, is_causal, scale)
//     -> out, lse
// attention_backward(grad, q, k, v, out, lse, grad_dims, grad_strides, q_dims, q_strides, k_dims,
//     k_strides, v_dims, v_strides, out_dims, out_strides, is_causal, scale) -> grad_q, grad_k,
//     grad_v
// lstm(gates, weight, hidden, cell, dims, reverse) -> states, cells, activated
// lstm_backward(grad, grad_hidden, grad_cell, activated, cells, weight, dims, reverse) ->
//     grad_gates, grad_hidden0, grad_cell0
// gru(gates, weight, bias, hidden, dims, reverse) -> states, activated
// gru_backward(grad, grad_hidden, activated, states, weight, dims, reverse) -> grad_gates,
//     grad_recurrent, grad_hidden0
// rnn_tanh(gates, weight, hidden, dims, reverse) -> states
// rnn_tanh_backward(grad, grad_hidden, states, weight, dims, reverse) -> grad_gates, grad_hidden0
// rnn_relu(gates, weight, hidden, dims, reverse) -> states
// rnn_relu_backward(grad, grad_hidden, states, weight, dims, reverse) -> grad_gates, grad_hidden0

#endif  // AMP_IR_KERNELS_LIBRARY_CALLS_H_
