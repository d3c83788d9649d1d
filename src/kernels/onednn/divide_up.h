// SPDX-License-Identifier: Apache-2.0
// A quotient of positive numbers, rounded up.
#ifndef AMP_IR_KERNELS_DIVIDE_UP_H_
#define AMP_IR_KERNELS_DIVIDE_UP_H_

#include <cstdint>

namespace amp_ir::onednn {

inline int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_DIVIDE_UP_H_
