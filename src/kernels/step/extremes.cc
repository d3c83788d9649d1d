// SPDX-License-Identifier: Apache-2.0
// The smallest and the largest of a few integers, for checks of a batch's indices: PyTorch's op and
// the two reads of its results take longer than a small step's matmul.
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>

namespace {

namespace ffi = tvm::ffi;

template <class Integer>
ffi::Shape Extremes(int64_t address, int64_t count) {
  const auto* values = reinterpret_cast<const Integer*>(address);
  Integer least = values[0], most = values[0];
  for (int64_t k = 1; k < count; ++k) {
    least = std::min(least, values[k]);
    most = std::max(most, values[k]);
  }
  return {static_cast<int64_t>(least), static_cast<int64_t>(most)};
}

// (address, count, bits): the smallest and the largest of so many integers of 32 or 64 bits.
ffi::Shape ExtremesOf(int64_t address, int64_t count, int64_t bits) {
  if (address == 0 || count < 1 || (bits != 32 && bits != 64)) {
    TVM_FFI_THROW(ValueError) << "amp_ir.step.extremes: " << count << " integers of " << bits
                              << " bits at " << address << "; expected at least 1, of 32 or 64";
  }
  return bits == 32 ? Extremes<int32_t>(address, count) : Extremes<int64_t>(address, count);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef().def("amp_ir.step.extremes", ExtremesOf);
}
