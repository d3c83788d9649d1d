// SPDX-License-Identifier: Apache-2.0
// Matmul by cuBLASLt, once its arguments are checked.
#ifndef AMP_IR_KERNELS_CUBLASLT_MATMUL_H_
#define AMP_IR_KERNELS_CUBLASLT_MATMUL_H_

#include <string>

#include "tensors/strided_tensor.h"

namespace amp_ir::cublaslt {

// out [batch..., m, n] = epilogue(a [batch..., m, k] @ b [batch..., k, n] + bias [n]), accumulated
// in float32 and rounded once.
struct MatmulCall {
  StridedTensor a, b, out;
  const StridedTensor* bias;  // may be null
  Epilogue epilogue;
  bool allow_tf32;  // float32 operands may be rounded to 11 significant bits
};

// How many launches the call takes: 1, or more where the batch dims of the three are not
// adjacent in memory; 0 where cuBLASLt has no form for it, with the reason in `why`. Needs no
// cuBLASLt and no memory.
int64_t CountLaunches(const MatmulCall& call, std::string* why);

// Runs the call on the environment's stream of `device`, with the caller's workspace
// (tensors/workspace.h). It allocates no device memory: without a workspace it uses algorithms that
// need none.
//
// Raises: ValueError where there is no form; RuntimeError for what cuBLASLt says.
void Matmul(const MatmulCall& call, DLDevice device);

int64_t CountCachedPlans();
void ClearCachedPlans();

}  // namespace amp_ir::cublaslt

#endif  // AMP_IR_KERNELS_CUBLASLT_MATMUL_H_
