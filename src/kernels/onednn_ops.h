// SPDX-License-Identifier: Apache-2.0
// The operations of this library, once their arguments are checked.
#ifndef AMP_IR_KERNELS_ONEDNN_OPS_H_
#define AMP_IR_KERNELS_ONEDNN_OPS_H_

#include "strided_tensor.h"

namespace amp_ir::onednn {

// out [batch..., m, n] = epilogue(a [batch..., m, k] @ b [batch..., k, n] + bias [n]), accumulated
// in float32 and rounded once.
void Matmul(const StridedTensor& a, const StridedTensor& b, const StridedTensor* bias,
            const StridedTensor& out, Epilogue epilogue);

enum class ConvKind { kForward, kBackwardInput, kBackwardWeight };

// One of x, w and y is computed from the other two; the names are those of the forward convolution.
void Convolve(ConvKind kind, const StridedTensor& x, const StridedTensor& w, const StridedTensor& y,
              const Convolution& convolution);

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_ONEDNN_OPS_H_
