// SPDX-License-Identifier: Apache-2.0
// Convolutions in bfloat16 as matmuls of the patches that they read.
#ifndef AMP_IR_KERNELS_PATCH_MATMUL_H_
#define AMP_IR_KERNELS_PATCH_MATMUL_H_

#include <memory>

#include "onednn/ops.h"
#include "onednn/plan.h"

namespace amp_ir::onednn {

// A convolution in bfloat16, or a gradient of one, as oneDNN's matmul; null where it is not for
// that, or slower.
std::shared_ptr<const Plan> PatchMatmulPlan(ConvKind kind, const StridedTensor& x,
                                            const StridedTensor& w, const StridedTensor& y,
                                            const Convolution& convolution);

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_PATCH_MATMUL_H_
