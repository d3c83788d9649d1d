// SPDX-License-Identifier: Apache-2.0
// The dtypes of stored numbers as types, for loops that are compiled once a dtype.
#ifndef AMP_IR_KERNELS_STORED_FLOAT_H_
#define AMP_IR_KERNELS_STORED_FLOAT_H_

#include "tensors/low_float.h"
#include "tensors/strided_tensor.h"

namespace amp_ir {

struct Float32 {
  using Stored = float;
  static float Widen(float value) { return value; }
  static float Narrow(float value) { return value; }
};

struct Bfloat16 {
  using Stored = uint16_t;
  static float Widen(uint16_t value) { return WidenBfloat16(value); }
  static uint16_t Narrow(float value) { return NarrowBfloat16(value); }
};

struct Float16 {
  using Stored = uint16_t;
  static float Widen(uint16_t value) { return WidenFloat16(value); }
  static uint16_t Narrow(float value) { return NarrowFloat16(value); }
};

// Calls `call` with one of the three, for a dtype that `CheckDtype` accepts.
template <class Call>
void WithDtype(DLDataType dtype, Call call) {
  if (IsFloat(dtype, 32)) return call(Float32());
  if (IsBfloat16(dtype)) return call(Bfloat16());
  call(Float16());
}

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_STORED_FLOAT_H_
