// SPDX-License-Identifier: Apache-2.0
// The operations of this library, once their arguments are checked.
#ifndef AMP_IR_KERNELS_ONEDNN_OPS_H_
#define AMP_IR_KERNELS_ONEDNN_OPS_H_

#include "tensors/strided_tensor.h"

namespace amp_ir::onednn {

// out [batch..., m, n] = epilogue(a [batch..., m, k] @ b [batch..., k, n] + bias [n]), accumulated
// in float32 and rounded once.
void Matmul(const StridedTensor& a, const StridedTensor& b, const StridedTensor* bias,
            const StridedTensor& out, Epilogue epilogue);

// out = beta * out + alpha * (a @ b + bias), all in float32 but a and b, which have any of the
// dtypes; a factor that is null is 1.
void MatmulAccumulate(const StridedTensor& a, const StridedTensor& b, const StridedTensor* bias,
                      const float* alpha, const float* beta, const StridedTensor& out);

// Bytes for a copy of b [k, n] as oneDNN would have it for its matmuls, enough for a plain one too;
// 0 where it would have it plain.
int64_t PackedBytes(const StridedTensor& b);

// Writes that copy of b to `packed`, 64-byte aligned. On a CPU where it needs more than `nbytes`,
// or where oneDNN would have it plain, a row-major copy instead, which MatmulPacked expects there.
void Pack(const StridedTensor& b, void* packed, int64_t nbytes);

// As Matmul with rank 2 throughout; b.data is what Pack wrote for a b of these dims and dtype, with
// these `nbytes`. The strides of b mean nothing.
void MatmulPacked(const StridedTensor& a, const StridedTensor& b, int64_t nbytes,
                  const StridedTensor* bias, const StridedTensor& out, Epilogue epilogue);

enum class ConvKind { kForward, kBackwardInput, kBackwardWeight };

// One of x, w and y is computed from the other two; the names are those of the forward convolution.
void Convolve(ConvKind kind, const StridedTensor& x, const StridedTensor& w, const StridedTensor& y,
              const Convolution& convolution);

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_ONEDNN_OPS_H_
