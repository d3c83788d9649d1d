// SPDX-License-Identifier: Apache-2.0
#ifndef AMP_IR_KERNELS_TENSORS_FACTOR_H_
#define AMP_IR_KERNELS_TENSORS_FACTOR_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include <string>

#include "tensors/strided_tensor.h"

namespace amp_ir {

// The number in a tensor of one that `function` has as argument `name`; null where there is none.
//
// Raises: TypeError unless it is one float32.
inline const float* Factor(const char* function, const char* name,
                           const tvm::ffi::Optional<tvm::ffi::TensorView>& factor) {
  if (!factor.has_value()) return nullptr;
  if (!IsFloat((*factor).dtype(), 32) || (*factor).numel() != 1) {
    TVM_FFI_THROW(TypeError) << function << ": " << name << " has " << (*factor).numel()
                             << " elements of "
                             << std::string(tvm::ffi::DLDataTypeToString((*factor).dtype()))
                             << "; expected one float32";
  }
  return reinterpret_cast<const float*>(static_cast<const char*>((*factor).data_ptr()) +
                                        (*factor).byte_offset());
}

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_TENSORS_FACTOR_H_
