// SPDX-License-Identifier: Apache-2.0
// The operations of this library, once their arguments are checked.
#ifndef AMP_IR_KERNELS_TORCH_OPS_H_
#define AMP_IR_KERNELS_TORCH_OPS_H_

#include "tensors/strided_tensor.h"
#include "torch/tensor.h"

namespace amp_ir::torch {

// Says whether PyTorch uses this CPU's bfloat16 instructions; before, that it does where there are
// some. Its other bfloat16 kernels are slow and round partial sums, so that without the
// instructions the operations below compute in float32.
void SetFastBfloat16(bool is_fast);

// out [batch..., m, n] = epilogue(a [batch..., m, k] @ b [batch..., k, n] + bias [n]), rounded
// once; on CUDA without bias and epilogue.
void Matmul(const Place& place, const StridedTensor& a, const StridedTensor& b,
            const StridedTensor* bias, const StridedTensor& out, Epilogue epilogue);

// out = beta * c + alpha * (a @ b): matrices of float32 on a CPU, `c` laid out as `out`, and
// perhaps in its memory. An absent factor is 1.
void MatmulAccumulate(const Place& place, const StridedTensor& a, const StridedTensor& b,
                      const StridedTensor& c, const float* alpha, const float* beta,
                      const StridedTensor& out);

// y of the convolution of x and w.
void Convolve(const Place& place, const StridedTensor& x, const StridedTensor& w,
              const StridedTensor& y, const Convolution& convolution);

enum class Gradient { kInput, kWeight };

// The gradient of x or of w, from that of y and the other of the two.
void ConvolveBackward(const Place& place, Gradient which, const StridedTensor& grad,
                      const StridedTensor& other, const StridedTensor& out,
                      const Convolution& convolution);

struct AttentionOptions {
  bool is_causal;
  double scale;
};

// out, lse of q [n, h, s, d], k and v [n, h, t, d] in one dtype, on CUDA a low one; out like q, lse
// f32[n, h, s].
void Attend(const Place& place, const StridedTensor& q, const StridedTensor& k,
            const StridedTensor& v, const AttentionOptions& options, const StridedTensor& out,
            const StridedTensor& lse);

struct AttentionGradients {
  const StridedTensor &q, &k, &v;
};

// The gradients of q, k and v; grad is that of out.
void AttendBackward(const Place& place, const StridedTensor& grad, const StridedTensor& q,
                    const StridedTensor& k, const StridedTensor& v, const StridedTensor& out,
                    const StridedTensor& lse, const AttentionOptions& options,
                    const AttentionGradients& results);

}  // namespace amp_ir::torch

#endif  // AMP_IR_KERNELS_TORCH_OPS_H_
