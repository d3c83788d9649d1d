// SPDX-License-Identifier: Apache-2.0
#ifndef AMP_IR_KERNELS_WIDEN_H_
#define AMP_IR_KERNELS_WIDEN_H_

#include "tensors/strided_tensor.h"

namespace amp_ir {

// Copies `from` to `to`, which has the same dims and any strides of its own, changing the dtype
// from float32 to a low one or back (round to nearest even; NaN stays NaN) or keeping it. Strides
// of 0 in `from` repeat its elements.
//
// oneDNN's own reorders need avx512 for bfloat16 and avx512_fp16 for float16 to be fast; this
// serves the CPUs without. Runs on OpenMP's threads. Cost: one pass over memory where the innermost
// dims of both are dense, else a scalar loop.
void ConvertStrided(const StridedTensor& from, const StridedTensor& to);

// to = total * (to + factor * from), element by element, all in float32; both have the same dims.
void AddStrided(const StridedTensor& from, float factor, float total, const StridedTensor& to);

// The strides that `t`'s dims would have without gaps, in the order of its present strides.
StridedTensor DenseLike(const StridedTensor& t, DLDataType dtype);

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_WIDEN_H_
